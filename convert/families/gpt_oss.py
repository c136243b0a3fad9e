"""gpt-oss (gpt-oss-20b, gpt-oss-120b)."""

from __future__ import annotations

from dataclasses import replace

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, ClampedSwiglu, Layer, ModelSpec, Moe, Router

_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What transformers takes where config.json has neither rope_parameters nor rope_scaling."""


def spec(config: dict) -> ModelSpec:
    given = {key: value for key, value in config.items() if value is not None}
    c = Config({"rope_parameters": _YARN} | given, aliases={"num_experts": "num_local_experts"})
    c.require("hidden_act", "silu")
    count, head_dim = c.size("num_attention_heads"), c.size("head_dim", 64)
    attention = Attention(
        heads=count,
        kv_heads=c.size("num_key_value_heads", count),
        head_dim=head_dim,
        rope=c.rope(head_dim, theta=150000.0),
        bias="qkvo" if c.flag("attention_bias", True) else "",
        sinks=True,
    )
    windows = {_FULL: None, _SLIDING: c.size("sliding_window", 128)}
    alternating = [_FULL if i % 2 else _SLIDING for i in range(c.layers())]
    kinds = c.names("layer_types", (_FULL, _SLIDING), alternating)
    moe = Moe(
        experts=c.size("num_local_experts"),
        top_k=c.size("num_experts_per_tok"),
        intermediate=c.size("intermediate_size"),
        router=Router(score="softmax_chosen", bias=True, renormalize=False),
        activation=ClampedSwiglu(c.number("swiglu_limit", 7.0), c.number("swiglu_alpha", 1.702), shift=1.0),
        bias=True,
    )
    return c.model(
        "gpt_oss",
        tuple(Layer(replace(attention, window=windows[kind]), moe) for kind in kinds),
        norm_eps=1e-5,
        context=131072,
        names=(("router", "mlp.router"),),
    )


_EXPERTS = r"model\.layers\.\d+\.mlp\.experts\."

FAMILY = Family(
    model_types=("gpt_oss",),
    spec=spec,
    skips=BUFFERS,
    interleaved=(_EXPERTS + "gate_up_proj", _EXPERTS + "gate_up_proj_bias"),
    transposed=(_EXPERTS + "gate_up_proj", _EXPERTS + "down_proj"),
)
