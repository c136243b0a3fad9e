"""OLMoE (OLMoE-1B-7B)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT, heads
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_local_experts": "num_experts"})
    c.require("hidden_act", "silu")
    hidden = c.size("hidden_size")
    count, kv_heads, head_dim = heads(c)
    c.require("head_dim", hidden // count)  # its norms of whole projections allow no other
    attention = Attention(
        count,
        kv_heads,
        head_dim,
        c.rope(head_dim),
        qk_norm="whole",
        bias="qkvo" if c.flag("attention_bias", False) else "",
        clip=c.number("clip_qkv") if c.has("clip_qkv") else None,
    )
    router = Router(renormalize=c.flag("norm_topk_prob", False))
    moe = Moe(c.size("num_experts"), c.size("num_experts_per_tok"), c.size("intermediate_size"), router)
    return c.model("olmoe", (Layer(attention, moe),) * c.layers(), norm_eps=1e-5)


FAMILY = Family(model_types=("olmoe",), spec=spec, renames=PER_EXPERT, skips=BUFFERS)
