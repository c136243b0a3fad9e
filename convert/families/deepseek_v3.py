"""DeepSeek-V3, R1, V3.1 and Kimi-K2: latent attention, routed experts in groups, multi-token prediction.

What the other families with latent attention share with it is here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import BUFFERS, PER_EXPERT
from tutel_pack.convert.families.config import Config
from tutel_pack.errors import InputError
from tutel_pack.spec import Indexer, Layer, Mla, Mlp, ModelSpec, Moe, Rope, Router

ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}


def spec(config: dict) -> ModelSpec:
    c = Config(config, ALIASES)
    c.require("moe_layer_freq", 1)
    mla = latent_attention(c, config, interleaved=c.flag("rope_interleave", True))
    return decoder("deepseek_v3", c, lambda layer: mla, dense_layers(c))


def latent_attention(
    c: Config, config: dict, interleaved: bool, indexer: Indexer | None = None, reuse_index: bool = False
) -> Mla:
    c.require("num_key_value_heads", c.size("num_attention_heads"))
    rope, nope_dim = rotation(c, interleaved), c.size("qk_nope_head_dim")
    # null has a meaning here, absence has not.
    direct = "q_lora_rank" in config and not c.has("q_lora_rank")
    return Mla(
        heads=c.size("num_attention_heads"),
        q_rank=None if direct else c.size("q_lora_rank"),
        kv_rank=c.size("kv_lora_rank"),
        nope_dim=nope_dim,
        v_dim=c.size("v_head_dim"),
        rope=rope,
        scale=(nope_dim + rope.dim) ** -0.5 * _stretch(c, rope) ** 2,
        bias=c.flag("attention_bias", False),
        indexer=indexer,
        reuse_index=reuse_index,
    )


def rotation(c: Config, interleaved: bool) -> Rope:
    return c.rope(c.size("qk_rope_head_dim"), interleaved)


def _stretch(c: Config, rope: Rope) -> float:
    """What a scaled rope multiplies queries and keys by, each: 0.1 · mscale_all_dim · ln(factor) + 1."""
    given = [p for p in (c.object("rope_scaling"), c.object("rope_parameters")) if p.has("mscale_all_dim")]
    if not given or rope.scaling is None or rope.scaling.factor <= 1:
        return 1.0
    return 0.1 * given[0].number("mscale_all_dim") * math.log(rope.scaling.factor) + 1.0


def dense_layers(c: Config, default: int = 3) -> Callable[[int], bool]:
    """Whether a layer has no experts: the first ones have none."""
    first = c.size("first_k_dense_replace", default, least=0)
    return lambda layer: layer < first


def listed_dense_layers(c: Config, config: dict, default: int = 3) -> Callable[[int], bool]:
    """The same where a list of layers may say so."""
    types = kinds(config, "mlp_layer_types", ("dense", "sparse"), c.layers())
    return dense_layers(c, default) if types is None else lambda layer: layer < len(types) and types[layer] == "dense"


def kinds(config: dict, key: str, known: tuple[str, ...], count: int) -> list[str] | None:
    """One of `known` for each of `count` layers (more may follow); None where the key is absent or null."""
    found = config.get(key)
    if found is None:
        return None
    fits = isinstance(found, list | str) and all(isinstance(kind, str) and kind in known for kind in found)
    if not fits or len(found) < count:
        raise InputError(
            f"config.json has {key}: {found!r:.100} where each of {count} layers needs one of {', '.join(known)}."
        )
    return list(found)


def decoder(family: str, c: Config, attention: Callable[[int], Mla], dense: Callable[[int], bool]) -> ModelSpec:
    """attention, dense: by layer, those of multi-token prediction being numbered after the others."""
    c.require("hidden_act", "silu")
    moe, layers = _moe(c), c.layers()
    mtp = c.size("num_nextn_predict_layers", 1, least=0, most=10)
    return c.model(
        family,
        tuple(Layer(attention(i), Mlp(c.size("intermediate_size")) if dense(i) else moe) for i in range(layers)),
        norm_eps=None,
        mtp=tuple(Layer(attention(i), moe) for i in range(layers, layers + mtp)),
    )


def _moe(c: Config) -> Moe:
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    intermediate, shared = c.size("moe_intermediate_size"), c.size("n_shared_experts", 1, least=0)
    router = Router(
        score="sigmoid",
        correction=True,
        groups=c.size("n_group"),
        top_groups=c.size("topk_group"),
        renormalize=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor"),
    )
    return Moe(
        experts=c.size("n_routed_experts"),
        top_k=c.size("num_experts_per_tok"),
        intermediate=intermediate,
        router=router,
        shared=Mlp(shared * intermediate) if shared else None,
    )


# DeepSeek's README_WEIGHTS.md: the multi-token-prediction module shares both with the main model.
SKIPS = BUFFERS | {
    r"model\.layers\.\d+\.embed_tokens\.weight": "multi-token prediction shares the model's own embedding",
    r"model\.layers\.\d+\.shared_head\.head\.weight": "multi-token prediction shares the model's own head",
}

FAMILY = Family(model_types=("deepseek_v3", "kimi_k2"), spec=spec, renames=PER_EXPERT, skips=SKIPS)
