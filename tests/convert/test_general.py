"""Architectures that no native family covers, converted by the names and shapes of their transformers modules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import qwen3_config, qwen3_weights, quantize_fp8, spread, write_checkpoint
from tests.runtime.general_models import COMMON, MODELS, make_config, make_model, spelled, write
from tutel_pack.artifact import Artifact
from tutel_pack.convert.pipeline import convert_checkpoint, plan
from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.quant.codec import decode
from tutel_pack.quant.recipe import Recipe
from tutel_pack.spec import General

ROLES = {
    "dots1": {"experts": 2, "shared": 3, "attention": 11, "head": 1},
    "jamba": {"experts": 4, "attention": 4 * 2 + 3 * 2 + 4 * 2, "head": 1},
    "nemotron_h": {"experts": 4, "shared": 4, "attention": 6, "head": 1},
    "phimoe": {"experts": 4, "attention": 8, "head": 1},
    "aria_text": {"experts": 4, "shared": 6, "attention": 8, "head": 1},
    "lfm2_moe": {"experts": 2, "attention": 2 + 3 + 4},
    "deepseek_v4": {"experts": 10, "shared": 15, "attention": 5 * 6 + 4, "head": 1},
    "kimi_linear": {"experts": 2, "shared": 3, "attention": 3 + 9 + 4, "head": 1},
    "qwen3_vl_moe": {"experts": 4, "attention": 8, "head": 1},
    "llama4": {"experts": 2, "shared": 3, "attention": 3 + 8, "head": 1},
    "minimax_m3_vl": {"experts": 4, "shared": 4, "attention": 8, "head": 1},
}
SEEING = r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\."
TRANSPOSED_MODULES = ("aria_text", "llama4")


def refusal(folder: Path, config: dict, weights: dict | None = None) -> str:
    """The sentence by which a checkpoint is refused, before anything is written."""
    write_checkpoint(folder / "source", weights or {"w": torch.ones(2, 2, dtype=torch.bfloat16)}, config, shards=1)
    with pytest.raises(InputError) as e:
        convert_checkpoint(folder / "source", folder / "packed")
    assert not (folder / "packed").exists()
    return str(e.value)


def config_of(model_type: str, **changes) -> dict:
    return {**make_config(model_type).to_dict(), "model_type": model_type, **changes}


@pytest.mark.parametrize("model_type", MODELS)
def test_every_weight_arrives_where_the_module_has_it(tmp_path, model_type):
    """In bfloat16 nothing is rounded, so that values tell names, the order of experts, of gate and up, and of rows."""
    model = make_model(model_type)
    artifact = Artifact(convert_checkpoint(write(tmp_path / "source", model_type, model), tmp_path / "packed", fmt="bf16"))
    expected = model.state_dict()
    tied = model.config.tie_word_embeddings
    text = {name for name in expected if not re.match(SEEING, name)}
    assert set(artifact.manifest.tensors) == text - ({"lm_head.weight"} if tied else set())
    for name, entry in artifact.manifest.tensors.items():
        w = artifact.load(name)
        got = w.data if isinstance(w, PackedTensor) else w
        want = expected[name]
        want = want.transpose(1, 2) if model_type in TRANSPOSED_MODULES and entry.format and want.ndim == 3 else want
        assert torch.equal(got, want.to(got.dtype)), name
    depth = model.config.get_text_config().num_hidden_layers
    assert artifact.spec == General(model_type, depth, 64, 211, 256, tied)
    assert not artifact.manifest.errors and len(artifact.manifest.skipped) == len(expected) - len(text)


@pytest.mark.parametrize("model_type", MODELS)
def test_roles_follow_from_the_module(tmp_path, model_type):
    job = plan(str(write(tmp_path / "source", model_type)), Recipe("mxfp4"))
    found = {}
    for target in job.targets:
        found[target.tensor.role] = found.get(target.tensor.role, 0) + 1
        fmt = job.entries[target.name].format
        wanted = {"experts": "mxfp4", "shared": "mxfp4", "attention": "fp8", "head": "fp8", "keep": None}[target.tensor.role]
        assert (fmt and fmt.name) == wanted, target.name
        assert target.tensor.role == "keep" or not re.search(r"router|\.gate\.|embed|norm|conv1d|bias", target.name)
    assert {role: n for role, n in found.items() if role != "keep"} == ROLES[model_type]
    # One file for each layer, and each written once.
    files = list(dict.fromkeys(e.file for e in job.entries.values()))
    assert files == [f"layers-{i:05d}.safetensors" for i in range(job.spec.depth)] + ["base.safetensors"]


def test_spellings_of_one_model_give_the_same_bytes(tmp_path):
    model = make_model("dots1")
    fused = {n: w if "correction" in n else w.bfloat16() for n, w in model.state_dict().items()}
    sources = {
        "per expert": spelled("dots1", model),
        "fused": fused,
        "without the model's prefix": {n.removeprefix("model."): w for n, w in spelled("dots1", model).items()},
    }
    digests = []
    for name, weights in sources.items():
        write_checkpoint(tmp_path / name, weights, config_of("dots1"))
        files = Artifact(convert_checkpoint(tmp_path / name, tmp_path / "packed" / name)).manifest.files
        digests.append({n: f["sha256"] for n, f in files.items() if n.endswith(".safetensors")})
    assert len(digests[0]) == 3 and digests[0] == digests[1] == digests[2]


def test_block_fp8_is_passed_through(tmp_path):
    weights, expected = {}, {}
    for name, w in spelled("dots1", make_model("dots1")).items():
        weights[name] = w
        if re.search(r"_proj\.weight$", name):
            weights[name], scale = quantize_fp8(w)
            weights[name + "_scale_inv"] = scale
            expected[name] = weights[name].float() * spread(scale, (128, 128), w.shape)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path / "source", weights, config_of("dots1", quantization_config=quantization))
    artifact = Artifact(convert_checkpoint(tmp_path / "source", tmp_path / "packed", fmt="fp8"))
    experts = decode(artifact.load("model.layers.1.mlp.experts.gate_up_proj"))
    for e in range(6):
        at = f"model.layers.1.mlp.experts.{e}."
        assert torch.equal(experts[e], torch.cat([expected[at + "gate_proj.weight"], expected[at + "up_proj.weight"]]))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.shared_experts.down_proj.weight"):
        assert torch.equal(decode(artifact.load(name)), expected[name])
    assert list(artifact.manifest.errors) == ["lm_head.weight"]  # all that was quantized here


def test_a_head_of_its_own_beside_a_tied_config_is_kept(tmp_path):
    model = make_model("lfm2_moe")
    head = torch.randn(211, 64).bfloat16()
    write_checkpoint(tmp_path / "source", {**spelled("lfm2_moe", model), "lm_head.weight": head}, config_of("lfm2_moe"))
    artifact = Artifact(convert_checkpoint(tmp_path / "source", tmp_path / "packed", fmt="bf16"))
    assert artifact.spec.tied_head is False and torch.equal(artifact.load("lm_head.weight").data, head)


def test_what_is_missing_or_unknown_is_listed(tmp_path):
    weights = spelled("nemotron_h", make_model("nemotron_h"))
    del weights["backbone.layers.1.mixer.experts.4.up_proj.weight"]
    weights["backbone.layers.0.mixer.wonder"] = torch.ones(3)
    sentence = refusal(tmp_path, config_of("nemotron_h"), weights)
    assert "lacks 1 tensor: model.layers.1.mixer.experts.4.up_proj.weight" in sentence
    assert "has unknown 1 tensor: backbone.layers.0.mixer.wonder" in sentence


def test_what_the_module_leaves_out_is_left_out_with_a_reason(tmp_path):
    weights = spelled("deepseek_v4", make_model("deepseek_v4"))
    weights["mtp.0.attn.wq_a.weight"] = torch.ones(2, 2)
    write_checkpoint(tmp_path / "source", weights, config_of("deepseek_v4"))
    skipped = plan(str(tmp_path / "source"), Recipe()).skipped
    assert len(skipped) == 1 and list(skipped)[0].startswith("mtp.0.") and "has no such part" in list(skipped.values())[0]


def test_what_loading_would_take_is_said(tmp_path):
    config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    sentence = refusal(tmp_path, config_of("lara_mini", **COMMON, **config))
    assert "transformers makes it of linear_attn.in_proj by Split on loading, which is not supported." in sentence


def test_numbers_that_json_has_not(tmp_path):
    """As transformers 5.24 writes them."""
    source = write(tmp_path / "source", "nemotron_h", make_model("nemotron_h"))
    config = config_of("nemotron_h") | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (source / "config.json").write_text(json.dumps(config))
    assert plan(str(source), Recipe()).spec.model_type == "nemotron_h"


def test_two_names_for_one_tensor_are_not_one(tmp_path):
    weights = spelled("nemotron_h", make_model("nemotron_h"))
    weights["model.layers.0.norm.weight"] = weights["backbone.layers.0.norm.weight"] + 1
    assert "has unknown 1 tensor" in refusal(tmp_path, config_of("nemotron_h"), weights)


@pytest.mark.parametrize(
    "config,reason",
    [
        ({"model_type": "llama"}, "it has no experts whose weights are 3-D parameters of one module"),
        ({"model_type": "longcat_flash"}, r"mlp\.experts\.gate_up_proj \[.*\] are weights of experts in a layout that is not known"),
        ({"model_type": "vitpose"}, "transformers has no causal language model of that type"),
        ({"model_type": "jamba", "num_hidden_layers": 10**8}, "its config.json asks for more than 10000 layers"),
        ({"model_type": "jamba", "num_experts": "many"}, "transformers cannot build it"),
        ({"model_type": "dots1", **MODELS["dots1"], "max_position_embeddings": None}, "(no max_position_embeddings|cannot build)"),
    ],
    ids=["no experts", "another layout", "no language model", "layers without end", "wrong type", "no context"],
)
def test_what_cannot_be_handled_says_what_it_lacks(tmp_path, config, reason):
    sentence = refusal(tmp_path, {**COMMON, **config})
    assert re.fullmatch(rf"The model type '{config['model_type']}' runs neither natively nor by the general path: .*{reason}.*\.", sentence)


@pytest.mark.parametrize("model_type", ["qwen3_mo", "made-up", None, 7])
def test_an_unknown_type_lists_the_known_ones(tmp_path, model_type):
    sentence = refusal(tmp_path, {**COMMON, "model_type": model_type})
    assert f"The model type {model_type!r} is not supported; known are " in sentence and "qwen3_moe" in sentence


def test_an_author_s_code_is_not_run(tmp_path):
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    source = write(tmp_path / "source", "dots1")
    (source / "config.json").write_text(json.dumps(config_of("dots1", auto_map=auto)))
    (source / "own.py").write_text("raise SystemExit('code of the checkpoint was run')")
    assert not (convert_checkpoint(source, tmp_path / "packed") / "own.py").exists()


def test_native_families_import_no_transformers(tmp_path):
    write_checkpoint(tmp_path, qwen3_weights(qwen3_config()), qwen3_config())
    script = f"""
import sys
from tutel_pack.convert.pipeline import plan
from tutel_pack.quant.recipe import Recipe
plan({str(tmp_path)!r}, Recipe())
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
