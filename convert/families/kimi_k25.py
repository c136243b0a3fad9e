"""Kimi-K2.5, K2.6: Kimi-K2 within a model that also sees. Its language part is converted."""

from __future__ import annotations

from dataclasses import replace

from tutel_pack.convert.families import Family, deepseek_v3
from tutel_pack.convert.families.common import PER_EXPERT
from tutel_pack.convert.families.config import Config
from tutel_pack.errors import InputError
from tutel_pack.spec import ModelSpec


def spec(config: dict) -> ModelSpec:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise InputError(f"config.json has text_config: {text!r:.100} where an object is needed: download it again.")
    kind = text.get("model_type", "deepseek_v3")
    if kind not in ("deepseek_v3", "kimi_k2"):
        raise InputError(
            f"config.json has text_config.model_type: {kind!r:.100}; only deepseek_v3 and kimi_k2 are supported."
        )
    # transformers ties unless the outer config says no; a head in the checkpoint counts more than either.
    tied = Config(config).flag("tie_word_embeddings", True)
    return replace(deepseek_v3.spec(text), family="kimi_k25", tied_head=tied)


FAMILY = Family(
    model_types=("kimi_k25",),
    spec=spec,
    renames=PER_EXPERT | {r"lm_head\.weight": ("language_model.lm_head.weight",)},
    skips=deepseek_v3.SKIPS | {r"(model\.)?(vision_tower|mm_projector)\..+": "vision part"},
    prefix="language_model.model.",
)
