"""ERNIE 4.5 MoE, text models (ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT, heads
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    c.require("hidden_act", "silu")
    c.require("use_bias", False)
    count, kv_heads, head_dim = heads(c)
    attention = Attention(count, kv_heads, head_dim, c.rope(head_dim, interleaved=True, theta=500000.0))
    dense, routed = Layer(attention, Mlp(c.size("intermediate_size"))), Layer(attention, _moe(c))
    return c.model(
        "ernie4_5_moe",
        tuple(routed if _is_routed(c, i) else dense for i in range(c.layers())),
        norm_eps=1e-5,
        tied_head=True,
        names=(("correction", "mlp.gate.moe_statics.e_score_correction_bias"),),
    )


def _is_routed(c: Config, layer: int) -> bool:
    last = c.size("moe_layer_end_index", -1, least=-1)
    last = c.layers() - 1 if last == -1 else last
    first = c.size("moe_layer_start_index", 1, least=0)
    return first <= layer <= last and (layer + 1) % c.size("moe_layer_interval", 1) == 0


def _moe(c: Config) -> Moe:
    intermediate, shared = c.size("moe_intermediate_size"), c.size("moe_num_shared_experts", 2, least=0)
    router = Router(correction=True, epsilon=c.number("moe_norm_min", 1e-12))
    shared = Mlp(intermediate * shared) if shared else None
    return Moe(c.size("moe_num_experts"), c.size("moe_k"), intermediate, router, shared)


FAMILY = Family(
    model_types=("ernie4_5_moe",),
    spec=spec,
    renames=PER_EXPERT
    | {r"(model\.layers\.\d+\.mlp)\.gate\.(moe_statics\.e_score_correction_bias)": (r"\1.\2",)},
    skips=BUFFERS | {r"model\.mtp_.+": "multi-token prediction of ERNIE's own kind is not supported"},
)
