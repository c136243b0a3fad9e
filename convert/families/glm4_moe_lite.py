"""GLM-4.7-Flash: latent attention with the router of GLM-4.5."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import PER_EXPERT
from tutel_pack.convert.families.config import Config
from tutel_pack.convert.families.deepseek_v3 import ALIASES, SKIPS, decoder, latent_attention, listed_dense_layers
from tutel_pack.spec import ModelSpec


def spec(config: dict) -> ModelSpec:
    c = Config(config, ALIASES)
    c.require("moe_layer_freq", 1)
    mla = latent_attention(c, config, interleaved=c.flag("rope_interleave", True))
    return decoder("glm4_moe_lite", c, lambda layer: mla, listed_dense_layers(c, config, default=1))


FAMILY = Family(model_types=("glm4_moe_lite",), spec=spec, renames=PER_EXPERT, skips=SKIPS)
