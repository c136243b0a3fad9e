"""Mixtral (Mixtral-8x7B, Mixtral-8x22B)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, MIXTRAL_EXPERTS, heads
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, ModelSpec, Moe


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_experts": "num_local_experts"})
    c.require("hidden_act", "silu")
    count, kv_heads, head_dim = heads(c)
    window = c.size("sliding_window") if c.has("sliding_window") else None
    attention = Attention(count, kv_heads, head_dim, c.rope(head_dim, theta=1e6), window=window)
    moe = Moe(c.size("num_local_experts"), c.size("num_experts_per_tok"), c.size("intermediate_size"))
    return c.model("mixtral", (Layer(attention, moe),) * c.layers(), norm_eps=1e-5)


FAMILY = Family(model_types=("mixtral",), spec=spec, renames=MIXTRAL_EXPERTS, skips=BUFFERS)
