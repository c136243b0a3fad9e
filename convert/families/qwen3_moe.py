"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT, is_sparse
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_local_experts": "num_experts"})
    c.require("hidden_act", "silu")
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    head_dim = c.size("head_dim", hidden // heads)
    attention = Attention(
        heads=heads,
        kv_heads=c.size("num_key_value_heads"),
        head_dim=head_dim,
        rope=c.rope(head_dim),
        qk_norm="head",
        bias="qkvo" if c.flag("attention_bias", False) else "",
        # As transformers does it, max_window_layers has no say here.
        window=c.size("sliding_window") if c.flag("use_sliding_window", False) else None,
    )
    return c.model("qwen3_moe", tuple(Layer(attention, _mlp(c, i)) for i in range(c.layers())))


def _mlp(c: Config, layer: int) -> Mlp | Moe:
    if not is_sparse(c, layer):
        return Mlp(c.size("intermediate_size"))
    router = Router(renormalize=c.flag("norm_topk_prob", False))
    return Moe(c.size("num_experts"), c.size("num_experts_per_tok"), c.size("moe_intermediate_size"), router)


FAMILY = Family(model_types=("qwen3_moe",), spec=spec, renames=PER_EXPERT, skips=BUFFERS)
