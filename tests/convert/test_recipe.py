"""Recipes: which format each tensor gets, from names, roles and what the source is."""

import pytest
import torch

from tests.checkpoints import fp8_config, qwen3_config, qwen3_weights, to_fp8, write_checkpoint
from tutel_pack.artifact import Artifact
from tutel_pack.convert import pipeline
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS
from tutel_pack.quant.recipe import FORMAT_CHOICES, Recipe
from tutel_pack.tensors import EXPERTS, KEEP

EXPERT, DENSE, ATTENTION, HEAD = (
    "model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.v_proj.weight",
    "lm_head.weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same small model in BF16, in F16 and in block-FP8."""
    folder, config = tmp_path_factory.mktemp("sources"), qwen3_config()
    weights = qwen3_weights(config)
    write_checkpoint(folder / "bf16", weights, config)
    write_checkpoint(folder / "f16", {name: w.half() for name, w in weights.items()}, config)
    write_checkpoint(folder / "fp8", to_fp8(weights), fp8_config())
    return folder


def formats(source, *args, **options) -> list[str]:
    """The formats of an expert tensor, a dense MLP, an attention matrix and the head, after a check of what is kept."""
    job = pipeline.plan(str(source), Recipe(*args, **options))
    kept = {name for name, entry in job.entries.items() if entry.format is None}
    assert kept == {t.name for t in job.targets if t.tensor.role == KEEP} and "model.embed_tokens.weight" in kept
    return [job.entries[name].format.name for name in (EXPERT, DENSE, ATTENTION, HEAD)]


@pytest.mark.parametrize("source, options, expected", [
    ("bf16", {}, "mxfp4 fp8 fp8 fp8"),
    ("bf16", {"fmt": "nvfp4"}, "nvfp4 fp8 fp8 fp8"),
    ("bf16", {"fmt": "fp8"}, "fp8 fp8 fp8 fp8"),
    ("bf16", {"fmt": "bf16"}, "bf16 bf16 bf16 bf16"),
    ("bf16", {"fmt": "source"}, "bf16 bf16 bf16 bf16"),
    ("f16", {"fmt": "source"}, "f16 f16 f16 f16"),
    ("f16", {"fmt": "bf16", "rest": "source"}, "bf16 f16 f16 f16"),
    ("fp8", {}, "mxfp4 fp8 fp8 bf16->fp8"),
    ("fp8", {"fmt": "source"}, "fp8 fp8 fp8 bf16"),
    ("fp8", {"fmt": "bf16"}, "bf16 bf16 bf16 bf16"),
    ("bf16", {"rest": "bf16"}, "mxfp4 bf16 bf16 bf16"),
    ("bf16", {"rest": "nvfp4"}, "mxfp4 nvfp4 nvfp4 nvfp4"),
    ("bf16", {"fmt": "bf16", "rest": "fp8"}, "bf16 fp8 fp8 fp8"),
    ("bf16", {"overrides": (("lm_head", "bf16"),)}, "mxfp4 fp8 fp8 bf16"),
    ("bf16", {"overrides": ((r"layers\.2\.", "bf16"), ("v_proj", "nvfp4"))}, "mxfp4 fp8 nvfp4 fp8"),  # the last decides
    ("bf16", {"overrides": (("v_proj", "nvfp4"), (r"layers\.2\.", "bf16"))}, "mxfp4 fp8 bf16 fp8"),
    ("bf16", {"overrides": ((".", "fp8"),)}, "fp8 fp8 fp8 fp8"),  # what is kept stays, though it matches too
    ("bf16", {"overrides": (("experts", "source"),)}, "bf16 fp8 fp8 fp8"),
    ("bf16", {"overrides": (("^model.*proj$", "fp8"),)}, "fp8 fp8 fp8 fp8"),
])  # fmt: skip
def test_formats_follow_from_roles_and_names(sources, source, options, expected):
    assert formats(sources / source, **options) == [e.split("->")[-1] for e in expected.split()]


def test_formats_never_depend_on_data(sources, tmp_path):
    config = qwen3_config()
    zeros = write_checkpoint(tmp_path / "zeros", {name: w * 0 for name, w in qwen3_weights(config).items()}, config)
    for fmt in FORMAT_CHOICES:
        jobs = [pipeline.plan(str(source), Recipe(fmt)) for source in (sources / "bf16", zeros)]
        assert jobs[0].entries == jobs[1].entries and jobs[0].bytes_written == jobs[1].bytes_written


def refusal(source, *args, **options) -> str:
    with pytest.raises(InputError) as caught:
        pipeline.plan(str(source), Recipe(*args, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("options, parts", [
    ({"fmt": "int3"}, ["int3", "fp8, mxfp4, nvfp4, bf16, source"]),
    ({"fmt": "MXFP4"}, ["MXFP4"]), ({"fmt": ""}, ["''"]), ({"rest": "f32"}, ["f32"]),
    ({"overrides": (("x", "q4"),)}, ["q4"]),
    ({"overrides": (("experts.[", "fp8"),)}, ["experts.[", "not a regular expression"]),
    ({"overrides": (("a{99999999999999}", "fp8"),)}, ["not a regular expression"]),
    ({"overrides": (("(" * 5000 + ")" * 5000, "fp8"),)}, ["not a regular expression"]),
    ({"overrides": (("expertz", "fp8"),)}, ["expertz", "matches no tensor", "model.layers.0."]),
    ({"overrides": (("lm_head", "fp8"), ("^experts", "fp8"))}, ["^experts", "matches no tensor"]),
    ({"overrides": (("norm", "fp8"),)}, ["norm", "stay as they are", "input_layernorm"]),
    ({"overrides": ((r"mlp\.gate\.", "fp8"),)}, ["stay as they are", "mlp.gate.weight"]),
    ({"scales": "best"}, ["mxfp4 has no scale rule 'best'", "lsq, floor, even, ceil"]),
    ({"fmt": "nvfp4", "scales": "floor"}, ["nvfp4 has no scale rule 'floor'", "lsq, amax"]),
    ({"fmt": "source", "scales": "lsq"}, ["--scales"]),
])  # fmt: skip
def test_recipes_that_are_refused(sources, options, parts):
    text = refusal(sources / "bf16", **options)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("fmt, rule, expected", [
    ("mxfp4", None, {"mxfp4": None, "fp8": None}), ("mxfp4", "floor", {"mxfp4": "floor", "fp8": None}),
    ("fp8", "lsq", {"fp8": "lsq"}), ("nvfp4", "amax", {"nvfp4": "amax", "fp8": "amax"}),
])  # fmt: skip
def test_a_scale_rule_holds_for_the_formats_that_know_it(fmt, rule, expected):
    recipe = Recipe(fmt, scales=rule)
    assert {name: recipe.rule_for(FORMATS[name]) for name in expected} == expected


def test_scale_rules_change_what_is_written(sources, tmp_path):
    outs = [pipeline.convert_checkpoint(str(sources / "bf16"), tmp_path / str(rule), scales=rule) for rule in (None, "lsq", "floor", "ceil")]
    default, lsq, floor, ceil = ((out / "layers-00000.safetensors").read_bytes() for out in outs)
    assert default != floor != ceil != default
    # lsq is mxfp4's default and not fp8's, so only the attention differs.
    errors = [Artifact(out).manifest.errors for out in outs]
    assert errors[0][EXPERT] == errors[1][EXPERT] and errors[0][ATTENTION]["rms"] >= errors[1][ATTENTION]["rms"]
    assert errors[0][EXPERT]["rms"] < min(errors[2][EXPERT]["rms"], errors[3][EXPERT]["rms"])


def test_what_the_source_has_is_kept_in_its_own_geometry(tmp_path):
    config = fp8_config((32, 32))
    source = write_checkpoint(tmp_path / "m", to_fp8(qwen3_weights(config), block=(32, 32)), config)
    for fmt in ("fp8", "source"):
        entries = pipeline.plan(str(source), Recipe(fmt)).entries
        assert entries[EXPERT].format == entries[ATTENTION].format == FORMATS["fp8"].with_block((32, 32))


def test_the_recipe_is_written_down(sources, tmp_path):
    out = pipeline.convert_checkpoint(str(sources / "bf16"), tmp_path / "out", fmt="nvfp4", overrides=(("lm_head", "bf16"),), scales="amax")
    assert Artifact(out).manifest.recipe == {"fmt": "nvfp4", "rest": "fp8", "overrides": [["lm_head", "bf16"]], "scales": "amax"}


# The head


@pytest.mark.parametrize("tied, in_files, expected", [(True, False, True), (True, True, False), (False, True, False)])
def test_a_tied_head_stays_tied_and_one_in_the_files_wins(tmp_path, tied, in_files, expected):
    config = qwen3_config(tie_word_embeddings=tied)
    weights = qwen3_weights(config | {"tie_word_embeddings": not in_files})
    job = pipeline.plan(str(write_checkpoint(tmp_path / "m", weights, config)), Recipe())
    assert job.spec.tied_head == expected and (HEAD in job.entries) == (not expected)
    if in_files:
        assert job.entries[HEAD].format.name == "fp8"
    assert job.entries["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_head_that_is_neither_tied_nor_there(tmp_path):
    weights = qwen3_weights(qwen3_config(tie_word_embeddings=True))
    assert "lacks 1 tensor: lm_head.weight" in refusal(write_checkpoint(tmp_path / "m", weights, qwen3_config()))


def test_roles_alone_decide_without_overrides():
    recipe = Recipe("nvfp4")
    assert recipe.format_for("any.name", EXPERTS, FORMATS["bf16"]).name == "nvfp4"
    assert recipe.format_for("any.name", KEEP, FORMATS["bf16"]) is None
