"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B)."""

from __future__ import annotations

from dataclasses import replace

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT, heads, is_sparse
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Router

_FULL, _SLIDING = "full_attention", "sliding_attention"


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_local_experts": "num_experts"})
    c.require("hidden_act", "silu")
    count, kv_heads, head_dim = heads(c)
    attention = Attention(count, kv_heads, head_dim, c.rope(head_dim), bias="qkv" if c.flag("qkv_bias", True) else "")
    sliding = replace(attention, window=c.size("sliding_window", 4096)) if c.flag("use_sliding_window", False) else None
    return c.model(
        "qwen2_moe",
        tuple(
            Layer(sliding if kind == _SLIDING else attention, _mlp(c, i))
            for i, kind in enumerate(_layer_types(c, sliding is not None))
        ),
        names=(("shared", "mlp.shared_expert"),),
    )


def _layer_types(c: Config, sliding: bool) -> list[str]:
    """Every other layer below max_window_layers slides, if any do, unless they are listed."""
    last = c.size("max_window_layers", 28, least=0) if sliding else 0
    default = [_SLIDING if i % 2 == 0 and i < last else _FULL for i in range(c.layers())]
    return c.names("layer_types", (_FULL, _SLIDING) if sliding else (_FULL,), default)


def _mlp(c: Config, layer: int) -> Mlp | Moe:
    if not is_sparse(c, layer):
        return Mlp(c.size("intermediate_size"))
    return Moe(
        experts=c.size("num_experts"),
        top_k=c.size("num_experts_per_tok"),
        intermediate=c.size("moe_intermediate_size"),
        router=Router(renormalize=c.flag("norm_topk_prob", False)),
        shared=Mlp(c.size("shared_expert_intermediate_size")),
        shared_gated=True,
    )


FAMILY = Family(model_types=("qwen2_moe",), spec=spec, renames=PER_EXPERT, skips=BUFFERS)
