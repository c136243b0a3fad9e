"""Families: a config.json is understood or refused by the key, and every tensor has a use, a reason or a complaint."""

import json
import os
import re
import resource
import time
from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import fp8_config, fuse, garbled, qwen3_config, qwen3_shapes, qwen3_weights, to_fp8, write_checkpoint
from tutel_pack.artifact import Artifact
from tutel_pack.convert import pipeline
from tutel_pack.convert.dialects import find_weights
from tutel_pack.convert.families import MODULES, Family, find_family, match, qwen3_moe
from tutel_pack.convert.headers import read_index
from tutel_pack.convert.source import open_source
from tutel_pack.errors import InputError
from tutel_pack.quant.recipe import Recipe
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Rope
from tutel_pack.tensors import canonical_tensors

INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"


def refusal(source) -> str:
    """The one sentence with which a checkpoint is refused, quickly, in little memory and with nothing written."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InputError) as caught:
        pipeline.convert_checkpoint(str(source), source.parent / "out")
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    text = str(caught.value)
    assert "\n" not in text and len(text) <= 1000 and not [n for n in os.listdir(source.parent) if n.startswith("out")]
    return text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with good weights, whose config.json the tests write."""
    return write_checkpoint(tmp_path_factory.mktemp("families") / "model", qwen3_weights(qwen3_config()), qwen3_config())


# What a config means


def test_the_spec_of_a_config():
    attention = Attention(heads=6, kv_heads=3, head_dim=32, rope=Rope(1e6, 32), qk_norm="head", window=None)
    moe = Moe(experts=12, top_k=2, intermediate=96)
    layers = tuple(Layer(attention, mlp) for mlp in (moe, Mlp(192), moe))
    assert qwen3_moe.spec(qwen3_config()) == ModelSpec("qwen3_moe", 160, 150, 512, 1e-6, False, layers)


@pytest.mark.parametrize("changes, found", [
    ({"head_dim": None}, lambda s: s.layers[0].attention.head_dim == 160 // 5),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, lambda s: s.layers[0].attention.rope.theta == 5e5),
    ({"rope_theta": 7000}, lambda s: s.layers[0].attention.rope.theta == 7000.0),
    ({"rope_theta": None}, lambda s: s.layers[0].attention.rope.theta == 10000.0),
    ({"rope_parameters": {"rope_theta": 3e4}, "rope_scaling": None}, lambda s: s.layers[0].attention.rope.theta == 3e4),
    ({"rope_scaling": {"type": "default"}}, lambda s: s.layers[0].attention.rope.theta == 1e6),
    ({"sliding_window": 128}, lambda s: s.layers[0].attention.window is None),
    ({"sliding_window": 128, "use_sliding_window": True}, lambda s: s.layers[0].attention.window == 128),
    ({"norm_topk_prob": None}, lambda s: s.layers[0].mlp.router.renormalize is False),
    ({"attention_bias": True}, lambda s: s.layers[0].attention.bias),
    ({"num_experts": None, "num_local_experts": 8}, lambda s: s.layers[0].mlp.experts == 8),
    ({"num_experts": 0}, lambda s: all(layer.mlp == Mlp(192) for layer in s.layers)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": None}, lambda s: [type(layer.mlp) for layer in s.layers] == [Mlp, Moe, Mlp]),
    ({"mlp_only_layers": [0, 2, 77]}, lambda s: [type(layer.mlp) for layer in s.layers] == [Mlp, Moe, Mlp]),
    ({"tie_word_embeddings": True}, lambda s: s.tied_head),
    ({"rms_norm_eps": 1e-5}, lambda s: s.norm_eps == 1e-5),
])  # fmt: skip
def test_options_of_a_config(changes, found):
    config = qwen3_config(num_attention_heads=5, num_key_value_heads=5) | changes
    if config["num_experts"] is None:
        del config["num_experts"]
    assert found(qwen3_moe.spec(config))


SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings",
         "num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size")  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_missing_sizes(model, key):
    config = qwen3_config()
    del config[key]
    (model / "config.json").write_text(json.dumps(config))
    assert f"no {key}" in refusal(model)


@pytest.mark.parametrize("key", (*SIZES, "head_dim", "decoder_sparse_step"))
def test_sizes_that_are_none(model, key):
    for value in ("8", [8], {}, 8.0, True, -1, 0, 10**12, 10**400, float("nan"), float("inf"), "x" * 10**6, [[]] * 100_000):
        if key == "num_experts" and value == 0 and value is not False:
            continue  # a dense model, which these weights are not
        (model / "config.json").write_text(json.dumps(qwen3_config(**{key: value})))
        text = refusal(model)
        assert key in text or "of about" in text, (value, text)


@pytest.mark.parametrize("key, values", [
    ("rms_norm_eps", ("1e-6", 0, -1, float("nan"), float("inf"), True, [], 10**400)),
    ("rope_theta", ("1e6", 0, -1, float("nan"), {}, True, 10**400)),
    ("norm_topk_prob", ("false", 1, [], {})), ("tie_word_embeddings", ("true", 0)), ("attention_bias", ("no", 1)),
    ("use_sliding_window", ("false", 1)), ("mlp_only_layers", (1, "01", [1.0], [True], [[1]], {"1": 1})),
    ("rope_scaling", ("yarn", [], 1)), ("rope_parameters", ("yarn", [1], {"rope_theta": "1e6"}, {"rope_theta": float("nan")})),
    ("hidden_act", ("gelu", ["silu"], {}, 1, "silu\nx")), ("quantization_config", ("fp8", [1], 1)),
])  # fmt: skip
def test_other_values_that_are_none(model, key, values):
    for value in values:
        (model / "config.json").write_text(json.dumps(qwen3_config(**{key: value})))
        text = refusal(model)
        assert key in text or "must" in text, (value, text)


@pytest.mark.parametrize("key, scaling", [
    ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}), ("rope_scaling", {"type": "su"}), ("rope_scaling", {"rope_type": ["yarn"]}),
    ("rope_parameters", {"rope_type": "proportional", "rope_theta": 1e6}), ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", {"rope_type": "linear"}), ("rope_scaling", {"rope_type": "yarn", "factor": 0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "truncate": 1}), ("rope_scaling", {"rope_type": "dynamic", "factor": "2"}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
])  # fmt: skip
def test_rope_scalings_that_are_none(model, key, scaling):
    (model / "config.json").write_text(json.dumps(qwen3_config(**{key: scaling})))
    assert re.search("rope scaling|by layer type|rope_scaling.(factor|truncate)|high_freq_factor", refusal(model))


@pytest.mark.parametrize("changes", [
    {"num_key_value_heads": 4}, {"num_experts_per_tok": 13}, {"head_dim": 31}, {"use_sliding_window": True},
])  # fmt: skip
def test_sizes_that_contradict_each_other(model, changes):
    (model / "config.json").write_text(json.dumps(qwen3_config(**changes)))
    refusal(model)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"', "", "{", "[" * 100_000, "1" * 10_000, '{"a": 1, "a": 2}', "\ufeff{}", "{}"])
def test_config_files_that_are_none(model, text):
    (model / "config.json").write_text(text)
    assert "config.json" in refusal(model) or text == "{}"


@pytest.mark.parametrize("model_type, hint", [
    ("qwen3_mo", "Did the config mean 'qwen3_moe'"), (None, "None"), (["qwen3_moe"], "['qwen3_moe']"),
    ({}, "{}"), (3, "3"), ("x" * 10**6, "xxx"), ("qwen3_moe\n", "qwen3_moe"),
])  # fmt: skip
def test_unknown_model_types(model, model_type, hint):
    (model / "config.json").write_text(json.dumps(qwen3_config(model_type=model_type)))
    assert hint in refusal(model)


def test_a_checkpoint_without_a_config(tmp_path):
    (tmp_path / "m").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "m" / "model.safetensors")
    assert "config.json" in refusal(tmp_path / "m")


def test_an_artifact_is_no_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "m", qwen3_weights(qwen3_config()), qwen3_config())
    pipeline.convert_checkpoint(str(tmp_path / "m"), tmp_path / "packed")
    assert "packed artifact already" in refusal(tmp_path / "packed")


def test_garbage_in_any_place_of_a_config(tmp_path):
    """Planned as before, or refused in one sentence: nothing else."""
    config = fp8_config(num_hidden_layers=1, num_experts=2, mlp_only_layers=[5], rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    source = write_checkpoint(tmp_path / "m", to_fp8(qwen3_weights(config)), config)
    tried = refused = 0
    for bad in garbled(config):
        (source / "config.json").write_text(json.dumps(bad))
        tried += 1
        try:
            pipeline.plan(str(source), Recipe())
        except InputError as e:
            refused += 1
            assert "\n" not in str(e) and len(str(e)) <= 1000
    assert tried - 100 > refused > 0.6 * tried > 250


# Completeness


def weights_with(**changes) -> dict:
    """The weights, with tensors added or (None) left out; __ in a name stands for a dot."""
    weights = qwen3_weights(qwen3_config())
    for name, tensor in changes.items():
        weights[name.replace("__", ".")] = tensor
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


E10 = "model.layers.2.mlp.experts.10.down_proj.weight"


@pytest.mark.parametrize("changes, parts", [
    ({"model__layers__0__extra__weight": torch.ones(2)}, ["has unknown 1 tensor: model.layers.0.extra.weight"]),
    ({E10: None}, [f"lacks 1 tensor: {E10}"]),
    ({E10: None, "model.odd": torch.ones(1), "model.odder": torch.ones(1)}, [f"lacks 1 tensor: {E10}", "2 tensors: model.odd, model.odder"]),
    ({f"extra.{i}": torch.ones(1) for i in range(9)}, ["has unknown 9 tensors", "extra.0", "extra.4, …"]),
    ({E10: torch.ones(160, 95)}, [E10, "[160, 95]", "[160, 96]"]),
    ({E10: torch.ones(96, 160)}, [E10, "[96, 160]"]),
    ({E10: torch.ones(160 * 96)}, [E10]), ({E10: torch.ones(1, 160, 96)}, [E10]), ({E10: torch.ones(())}, [E10]),
    ({E10: torch.ones(0, 96)}, [E10, "[0, 96]"]),
    ({"model.norm.weight": torch.ones(161)}, ["model.norm.weight", "[161]"]),
    ({"model.norm.weight": torch.ones(160, 1)}, ["model.norm.weight", "[160, 1]"]),
    ({"model.layers.2.mlp.experts.12.down_proj.weight": torch.ones(160, 96)}, ["experts.12.down_proj"]),
    ({"model.layers.3.input_layernorm.weight": torch.ones(160)}, ["model.layers.3.input_layernorm.weight"]),
    ({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(12, 192, 160)}, ["has unknown 24 tensors", "experts.0.gate_proj"]),
    ({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(12, 192)}, ["has unknown 24 tensors"]),
    ({"mtp.0.weight": torch.ones(1)}, ["mtp.0.weight"]),
    ({"zeilen\nbruch\x1b[31m": torch.ones(1)}, ["zeilen\\nbruch\\x1b[31m"]),
    ({"ünïcode.重み": torch.ones(1)}, ["ünïcode.重み"]),
    ({"n" * 100_000: torch.ones(1)}, ["has unknown 1 tensor"]),
    ({"": torch.ones(1)}, ["has unknown 1 tensor"]),
])  # fmt: skip
def test_unknown_missing_and_misshapen_tensors(tmp_path, changes, parts):
    text = refusal(write_checkpoint(tmp_path / "m", weights_with(**changes), qwen3_config()))
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", E10, "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bool, torch.int64, torch.float8_e5m2, torch.float8_e8m0fnu,
                                   torch.uint16, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e4m3fn])  # fmt: skip
def test_tensors_of_odd_types(tmp_path, name, dtype):
    shape = qwen3_shapes(qwen3_config())[name]
    odd = torch.zeros(shape, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(shape, dtype=dtype)
    canonical = name.replace("10.down_proj.weight", "down_proj")
    text = refusal(write_checkpoint(tmp_path / "m", weights_with(**{name: odd}), qwen3_config()))
    assert name in text or canonical in text


def test_buffers_are_left_out_with_a_reason(tmp_path):
    source = write_checkpoint(tmp_path / "m", weights_with(**{INV_FREQ: torch.ones(16)}), qwen3_config())
    out = pipeline.convert_checkpoint(str(source), tmp_path / "out")
    assert Artifact(out).manifest.skipped == {INV_FREQ: "a buffer that follows from the config"}
    assert INV_FREQ not in Artifact(out).manifest.tensors
    # Only whole names are skipped.
    refusal(write_checkpoint(tmp_path / "n" / "m", weights_with(**{INV_FREQ + "s": torch.ones(16)}), qwen3_config()))


def test_experts_by_the_billion_do_not_fill_the_memory(tmp_path):
    for weights in (qwen3_weights(qwen3_config()), fuse(qwen3_weights(qwen3_config()), qwen3_config())):
        source = write_checkpoint(tmp_path / str(len(weights)) / "m", weights, qwen3_config(num_experts=2**31 - 1))
        text = refusal(source)
        assert "of about" in text or "experts" in text or "mlp.gate.weight" in text
    source = write_checkpoint(tmp_path / "l" / "m", qwen3_weights(qwen3_config()), qwen3_config(num_hidden_layers=10_000))
    assert "of about" in refusal(source)


def test_matching_tens_of_thousands_of_tensors_takes_seconds(tmp_path):
    """18,000 tensors, half of what Qwen3-235B has: what is linear takes a second, what is quadratic ten or more."""
    config = qwen3_config(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2, moe_intermediate_size=1,
                          vocab_size=2, num_experts=128, num_hidden_layers=48, mlp_only_layers=[])  # fmt: skip
    tensor = {shape: torch.zeros(shape) for shape in set(qwen3_shapes(config).values())}
    source = write_checkpoint(tmp_path / "m", {name: tensor[s] + 0 for name, s in qwen3_shapes(config).items()}, config, shards=1)
    started = time.process_time()
    job = pipeline.plan(str(source), Recipe())
    assert time.process_time() - started < 5 and len(job.targets) == len(canonical_tensors(job.spec))


# Families as data


def test_a_family_may_spell_its_names_otherwise(tmp_path):
    renames = {r"(model\.layers\.\d+)\.mlp\.experts\.gate_up_proj": (r"\1.moe.w1.{expert}", r"\1.moe.w3.{expert}"),
               r"(model\.layers\.\d+)\.mlp\.experts\.down_proj": (r"\1.moe.w2.{expert}",),
               r"lm_head\.weight": ("head",)}  # fmt: skip
    family = Family(("other",), qwen3_moe.spec, renames, skips={"drop.*": "not needed"})
    weights = {"drop.me": torch.ones(1)}
    for name, w in qwen3_weights(qwen3_config()).items():
        parts = name.split(".")
        if "experts" in parts:
            number = {"gate_proj": 1, "down_proj": 2, "up_proj": 3}[parts[6]]
            name = f"model.layers.{parts[2]}.moe.w{number}.{parts[5]}"
        weights["head" if name == "lm_head.weight" else name] = w
    source = open_source(str(write_checkpoint(tmp_path / "m", weights, qwen3_config())))
    targets, skipped = match(family, qwen3_moe.spec(qwen3_config()), find_weights(read_index(source), {}))
    assert skipped == {"drop.me": "not needed"}
    pieces = {t.name: t.pieces for t in targets}
    found = [[piece.stored.name for piece in row] for row in pieces["model.layers.0.mlp.experts.gate_up_proj"]]
    assert found == [[f"model.layers.0.moe.w1.{e}", f"model.layers.0.moe.w3.{e}"] for e in range(12)]
    assert pieces["lm_head.weight"][0][0].stored.name == "head"


def test_every_family_is_found_by_its_model_types():
    assert find_family({"model_type": "qwen3_moe"}) is qwen3_moe.FAMILY
    assert len(MODULES) == len(set(MODULES))
    for module in MODULES:
        family = import_module(f"tutel_pack.convert.families.{module}").FAMILY
        assert all(find_family({"model_type": name}) is family for name in family.model_types)
