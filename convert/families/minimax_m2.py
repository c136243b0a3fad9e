"""MiniMax-M2 (MiniMax-M2, M2.1, M2.5)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, MIXTRAL_EXPERTS
from tutel_pack.convert.families.config import Config
from tutel_pack.errors import InputError
from tutel_pack.spec import Attention, Layer, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_experts": "num_local_experts"})
    _require_what_is_known(c)
    head_dim = c.size("head_dim", 128)
    rope = c.rope(head_dim, theta=5e6, partial=c.size("rotary_dim", head_dim) / head_dim)
    attention = Attention(c.size("num_attention_heads"), c.size("num_key_value_heads"), head_dim, rope, qk_norm="whole")
    router = Router(score="sigmoid", correction=True)
    moe = Moe(c.size("num_local_experts"), c.size("num_experts_per_tok"), c.size("intermediate_size"), router)
    return c.model(
        "minimax_m2",
        (Layer(attention, moe),) * c.layers(),
        names=(("correction", "mlp.e_score_correction_bias"),),
    )


def _require_what_is_known(c: Config) -> None:
    """The maker's own config has more options than transformers', with one value each in what was released."""
    for key, value in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("attention_bias", False),
        ("shared_intermediate_size", 0),
    ):
        c.require(key, value)
    if set(c.indices("attn_type_list")) - {1}:
        raise InputError("config.json has an attn_type_list with other than 1: only full attention is supported.")


FAMILY = Family(
    model_types=("minimax_m2",),
    spec=spec,
    renames=MIXTRAL_EXPERTS
    | {r"(model\.layers\.\d+)\.mlp\.(e_score_correction_bias)": (r"\1.block_sparse_moe.\2",)},
    skips=BUFFERS,
)
