"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose indexer rotates half-split pairs."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import PER_EXPERT
from tutel_pack.convert.families.config import Config
from tutel_pack.convert.families.deepseek_v3 import (
    ALIASES,
    SKIPS,
    decoder,
    latent_attention,
    listed_dense_layers,
    rotation,
)
from tutel_pack.spec import Indexer, ModelSpec

INDEX_ALIASES = {**ALIASES, "num_experts": "n_routed_experts"}


def spec(config: dict) -> ModelSpec:
    c = Config(config, INDEX_ALIASES)
    require_plain(c)
    mla = latent_attention(c, config, interleaved=True, indexer=indexer(c, interleaved=False))
    return decoder("deepseek_v32", c, lambda layer: mla, listed_dense_layers(c, config))


def require_plain(c: Config) -> None:
    """What models with an indexer have no choice of."""
    c.require("rope_interleave", True)
    c.require("mlp_bias", False)
    c.require("moe_layer_freq", 1)
    c.size("q_lora_rank")  # an indexer's queries come from the compressed one


def indexer(c: Config, interleaved: bool) -> Indexer:
    """interleaved: what this architecture takes where config.json does not say."""
    rope = rotation(c, c.flag("indexer_rope_interleave", interleaved))
    return Indexer(c.size("index_n_heads"), c.size("index_head_dim", least=rope.dim), c.size("index_topk"), rope)


FAMILY = Family(model_types=("deepseek_v32",), spec=spec, renames=PER_EXPERT, skips=SKIPS)
