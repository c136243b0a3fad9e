"""Qwen3.5-MoE and Qwen3.6-MoE, the text part of them: Qwen3-Next with separate projections in its delta nets."""

from __future__ import annotations

from dataclasses import replace

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.config import Config
from tutel_pack.convert.families.qwen3_next import RENAMES, SKIPS, hybrid_spec, moe
from tutel_pack.errors import InputError
from tutel_pack.spec import ModelSpec, Moe, Router


def spec(config: dict) -> ModelSpec:
    """Of a model with vision, whose text part is described in text_config, or of a text model."""
    if "text_config" not in config:
        return _text_spec(config)
    text = config["text_config"]
    if not isinstance(text, dict):
        raise InputError(f"config.json has text_config: {text!r:.100} where an object is needed: download it again.")
    # transformers ties by what the whole says, not its text part.
    return replace(_text_spec(text), tied_head=Config(config).flag("tie_word_embeddings", False))


def _text_spec(config: dict) -> ModelSpec:
    # Positions of text are the same in all three of M-RoPE's sections, whatever their sizes: it is plain rope.
    return hybrid_spec("qwen3_5_moe", config, False, _moe)


def _moe(c: Config, layer: int) -> Moe:
    c.require("attn_output_gate", True)
    c.require("norm_topk_prob", True)
    c.require("decoder_sparse_step", 1)
    c.require("mlp_only_layers", [])
    return moe(c, Router())


FAMILY = Family(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    spec=spec,
    renames=RENAMES,
    skips={**SKIPS, r"model\.visual\..+": "the vision part is not used: only text is"},
    prefix="model.language_model.",
)
