"""Granite MoE (granite-3.0-1b-a400m, granite-3.1-3b-a800m)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, heads
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_experts": "num_local_experts"})
    c.require("hidden_act", "silu")
    count, kv_heads, head_dim = heads(c)
    attention = Attention(
        count,
        kv_heads,
        head_dim,
        c.rope(head_dim),
        bias="qkvo" if c.flag("attention_bias", False) else "",
        scale=c.number("attention_multiplier", 1.0),
    )
    router = Router(score="softmax_chosen", renormalize=False)
    moe = Moe(c.size("num_local_experts"), c.size("num_experts_per_tok"), c.size("intermediate_size"), router)
    return c.model(
        "granitemoe",
        (Layer(attention, moe),) * c.layers(),
        embedding_scale=c.number("embedding_multiplier", 1.0),
        residual_scale=c.number("residual_multiplier", 1.0),
        logit_scale=1 / c.number("logits_scaling", 1.0),
        names=(("router", "block_sparse_moe.router"), ("experts", "block_sparse_moe.experts")),
    )


_MOE = r"(model\.layers\.\d+\.block_sparse_moe)\."

FAMILY = Family(
    model_types=("granitemoe",),
    spec=spec,
    renames={
        _MOE + r"experts\.gate_up_proj": (r"\1.input_linear.weight",),
        _MOE + r"experts\.down_proj": (r"\1.output_linear.weight",),
        _MOE + r"router\.weight": (r"\1.router.layer.weight",),
    },
    skips=BUFFERS,
)
