"""GLM-4-MoE (GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT, heads
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    aliases = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    c = Config(config, aliases)
    for key, value in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        c.require(key, value)
    count, kv_heads, head_dim = heads(c)
    attention = Attention(
        count,
        kv_heads,
        head_dim,
        c.rope(head_dim, partial=0.5),
        qk_norm="head" if c.flag("use_qk_norm", False) else None,
        bias="qkv" if c.flag("attention_bias", False) else "",
    )
    dense = Layer(attention, Mlp(c.size("intermediate_size")))
    routed, first = Layer(attention, _moe(c)), c.size("first_k_dense_replace", 1, least=0)
    return c.model(
        "glm4_moe",
        tuple(dense if i < first else routed for i in range(c.layers())),
        norm_eps=1e-5,
        mtp=(routed,) * c.size("num_nextn_predict_layers", 1, least=0, most=10),
    )


def _moe(c: Config) -> Moe:
    intermediate, shared = c.size("moe_intermediate_size"), c.size("n_shared_experts", 1, least=0)
    router = Router(
        score="sigmoid",
        correction=True,
        groups=c.size("n_group", 1),
        top_groups=c.size("topk_group", 1),
        renormalize=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", 1.0),
    )
    shared = Mlp(intermediate * shared) if shared else None
    return Moe(c.size("n_routed_experts"), c.size("num_experts_per_tok"), intermediate, router, shared)


FAMILY = Family(
    model_types=("glm4_moe",),
    spec=spec,
    renames=PER_EXPERT,
    skips=BUFFERS
    | {r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight": "a prediction layer takes the model's own"},
)
