"""The model of time behind `tutel-run plan`: by hand, by what must grow with what, by models of known size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import DeepseekV3Config, GlmMoeDsaConfig, GptOssConfig

from tests.runtime.fake_model import write_artifact
from tutel_pack.artifact import Artifact
from tutel_pack.convert.families import find_family
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.kernels.triton.gpus import GPUS, INT_OPS
from tutel_pack.kernels.triton.layers import LAYERS
from tutel_pack.known import KNOWN
from tutel_pack.runtime import timing
from tutel_pack.runtime.cli import main
from tutel_pack.spec import DeltaNet, Layer, ModelSpec
from tutel_pack.tensors import EXPERTS, canonical_tensors

ROOT = Path(__file__).parents[2]
QWEN, GLM, OSS = KNOWN["Qwen3-30B-A3B"], KNOWN["GLM-5"], KNOWN["gpt-oss-20b"]
H200 = GPUS["h200"]

PARAMETERS = {  # billions, of all weights and of those a token passes, as makers say: some count the embedding
    "DeepSeek-V3": (671, 37), "Kimi-K2": (1026, 32), "GLM-5": (744, 40), "Qwen3-235B-A22B": (235, 22),
    "Qwen3-30B-A3B": (30.5, 3.3), "gpt-oss-120b": (116.8, 5.1), "gpt-oss-20b": (20.9, 3.6),
}  # fmt: skip


def parameters(spec: ModelSpec) -> tuple[float, float]:
    total = active = 0.0
    for name, tensor in canonical_tensors(spec).items():
        if name.startswith(f"model.layers.{spec.depth}."):
            continue
        size = math.prod(tensor.shape)
        total += size
        if tensor.role == EXPERTS:
            moe = spec.layers[int(name.split(".")[2])].mlp
            size *= moe.top_k / moe.experts
        active += 0 if name == "model.embed_tokens.weight" else size
    return total / 1e9, active / 1e9


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_size(name):
    total, active = parameters(KNOWN[name])
    assert total == pytest.approx(PARAMETERS[name][0], rel=0.002)
    assert active == pytest.approx(PARAMETERS[name][1], rel=0.1)


@pytest.mark.parametrize(
    "name, config",
    [
        ("gpt-oss-120b", GptOssConfig()),
        ("GLM-5", GlmMoeDsaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
        (
            "DeepSeek-V3",
            DeepseekV3Config(
                max_position_embeddings=163840,
                rope_parameters={
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0,
                    "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                    "mscale": 1.0, "mscale_all_dim": 1.0,
                },
            ),
        ),
    ],
    ids=["gpt-oss-120b", "GLM-5", "DeepSeek-V3"],
)  # fmt: skip
def test_known_models_are_what_their_configs_say(name, config):
    """transformers' defaults are those of these models, except for what is given."""
    config = config.to_dict() | {"architectures": ["X"]}
    assert find_family(config).spec(config) == KNOWN[name]


def test_expert_layers_are_those_of_the_models():
    assert set(LAYERS) == {name.lower() for name in KNOWN}
    layer = LAYERS["kimi-k2"]
    assert (layer.experts, layer.hidden, layer.intermediate, layer.top_k) == (384, 7168, 2048, 8)


def test_a_step_of_qwen_by_hand():
    """One sequence with 1000 positions, everything in bfloat16."""
    parts = timing.step(QWEN, timing.entries_of(QWEN, "bf16"), batch=1, context=1000)
    experts = 48 * 8 * 3 * 2048 * 768
    assert parts["experts"] == timing.Part(2 * experts, 2 * experts, {"bf16": experts})
    matrices = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048) + 151936 * 2048
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    assert parts["weights"].bytes == pytest.approx(2 * (matrices + vectors + 2048))  # and a row of the embedding
    assert parts["weights"].flops == 2 * matrices and parts["weights"].decoded == {"bf16": matrices}
    assert parts["cache"] == timing.Part(48 * 1000 * 2 * 4 * 128 * 2, 48 * 1000 * 4 * 32 * 128)


def test_seconds_by_hand():
    part = timing.Part(bytes=4.8e9, flops=989e6, decoded={"mxfp4": 1e9, "bf16": 1e9})
    seconds = part.seconds(H200)
    assert seconds["memory"] == pytest.approx(1e-3) and seconds["matrix"] == pytest.approx(1e-6)
    instructions = (INT_OPS["sm_90"]["mxfp4"] + INT_OPS["sm_90"]["bf16"]) * 1e9
    assert seconds["issue"] == pytest.approx(instructions / (132 * 128 * 1.98e9))


def test_formats_by_hand():
    """mxfp4 has 17 bits for 4 weights; what is not experts is fp8, the norms, router and embedding apart."""
    parts = timing.step(QWEN, timing.entries_of(QWEN, "mxfp4"), batch=1, context=1)
    experts = 48 * 8 * 3 * 2048 * 768
    assert parts["experts"].bytes == experts * 17 / 32 and parts["experts"].decoded == {"mxfp4": experts}
    assert parts["weights"].decoded == {"fp8": 48 * 2 * (4096 + 512) * 2048 + 151936 * 2048, "bf16": 48 * 128 * 2048}


def test_experts_in_use_by_hand():
    """Two tokens that choose 8 of 128: 8 + 8 · 120/128 different ones; many use all of them, several times."""
    entries = timing.entries_of(QWEN, "bf16")
    one, two, many = (timing.step(QWEN, entries, batch, 1)["experts"] for batch in (1, 2, 10_000))
    assert two.bytes / one.bytes == pytest.approx(1 + 120 / 128) and two.flops == 2 * one.flops
    assert many.bytes / one.bytes == pytest.approx(128 / 8)
    assert many.decoded["bf16"] / one.decoded["bf16"] == pytest.approx(128 / 8 * 5)  # 625 tokens each, 128 at a time


def test_windows_latents_and_indices_by_hand():
    cache = timing.step(OSS, timing.entries_of(OSS, "mxfp4"), batch=3, context=1000)["cache"]
    assert cache.bytes == 3 * 12 * (128 + 1000) * 2 * 8 * 64 * 2
    cache = timing.step(GLM, timing.entries_of(GLM, "fp8"), batch=1, context=10_000)["cache"]
    assert cache.bytes == 78 * (2048 * 576 + 10_000 * 128) * 2
    assert cache.flops == 78 * 2 * (2048 * 64 * (576 + 512) + 10_000 * 32 * 128)


def test_a_layer_that_reuses_an_index_has_none_of_its_own():
    layer = GLM.layers[-1]
    reusing = replace(layer, attention=replace(layer.attention, indexer=None, reuse_index=True))
    pair = replace(GLM, layers=(layer, reusing), mtp=())
    cache = timing.step(pair, timing.entries_of(pair, "fp8"), batch=1, context=10_000)["cache"]
    assert cache.bytes == (2 * 2048 * 576 + 10_000 * 128) * 2


def test_states_do_not_grow():
    """Of a delta net: 16 · 2 memories of 128 × 128 in float32, and 3 inputs of each channel; read and written."""
    layer = Layer(DeltaNet(16, 32, 128, 128, 4, True), QWEN.layers[0].mlp)
    spec = replace(QWEN, layers=(layer,))
    states = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
    for context in (1, 1000):
        assert timing.step(spec, timing.entries_of(spec, "bf16"), 5, context)["cache"].bytes == 2 * 5 * states
        assert timing.cache_bytes(spec, 5, context) == 5 * states


def test_an_estimate_by_hand():
    """Its parts one after another, divided among the GPUs, and then the gaps, which are not."""
    entries = timing.entries_of(QWEN, "bf16")
    found = timing.estimate(QWEN, entries, H200, 2, 4, 500)
    parts = timing.step(QWEN, entries, 4, 500).values()
    gaps = 48 * (8 + 8) + 3
    seconds = sum(max(p.seconds(H200).values()) for p in parts) / 2 + gaps * timing.GAP
    assert found.seconds == pytest.approx(seconds) and found.tokens_per_second == pytest.approx(4 / seconds)
    weights = sum(entry.nbytes for entry in entries.values())
    assert weights == 2 * sum(math.prod(t.shape) for t in canonical_tensors(QWEN).values())
    assert found.needed == weights + 4 * 500 * 48 * 2 * 512 * 2


def test_what_limits_is_named():
    entries = timing.entries_of(QWEN, "mxfp4")

    def limit(batch=1, **changes):
        return timing.estimate(QWEN, entries, replace(H200, **changes), 1, batch, 1).limit

    assert limit(bandwidth=1e11) == "memory" and limit(batch=100_000, clock=1e12) == "matrix"
    assert limit(clock=1e6) == "issue" and limit(bandwidth=1e15, clock=1e12) == "launches"


@pytest.mark.parametrize("name", KNOWN)
def test_what_grows_with_what(name):
    spec = KNOWN[name]
    entries = timing.entries_of(spec, "nvfp4")

    def step(gpu=H200, gpus=8, batch=4, context=1000):
        return timing.estimate(spec, entries, gpu, gpus, batch, context)

    steps = [step(batch=b) for b in (1, 2, 8, 64, 512, 4096)]
    assert all(a.seconds < b.seconds and a.tokens_per_second < b.tokens_per_second for a, b in zip(steps, steps[1:]))
    steps = [step(context=c) for c in (1, 1000, 40_000)]
    assert all(a.seconds < b.seconds and a.needed < b.needed for a, b in zip(steps, steps[1:]))
    steps = [step(gpu=replace(H200, bandwidth=b)) for b in (8e12, 4e12, 2e12, 1e12)]
    assert all(a.seconds <= b.seconds for a, b in zip(steps, steps[1:])) and steps[0].seconds < steps[-1].seconds
    assert step(gpus=16).seconds < step().seconds and step(gpus=16).available == 2 * step().available


def test_what_fits():
    """DeepSeek-V3 in 4.5 bits takes 0.4 TB: not on one B200, nor on two, but on three."""
    spec = KNOWN["DeepSeek-V3"]
    entries = timing.entries_of(spec, "nvfp4")
    assert [timing.estimate(spec, entries, GPUS["b200"], n, 1, 4096).fits for n in (1, 2, 3)] == [False, False, True]


def test_counts_of_instructions_are_those_that_were_counted():
    counts = json.loads((ROOT / "bench" / "kernels_aot.json").read_text())
    for chip, formats in INT_OPS.items():
        for fmt, count in formats.items():
            assert count == pytest.approx(counts["3.9"][chip][f"gate_up {fmt} 16"], rel=0.08), (chip, fmt)


def test_only_what_has_been_run_is_calibrated():
    for gpu in GPUS.values():
        assert gpu.measured is None or (ROOT / "bench" / "results" / gpu.measured).is_file()


# The command


def plan(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_all_chips_are_told_of():
    out = plan("--model", "deepseek-v3", "--gpus", "8")
    lines = out.splitlines()
    assert [line.split()[2] for line in lines[1:7]] == list(GPUS)
    assert "does not fit" not in out and lines[7].startswith("Uncalibrated") and all(name in lines[7] for name in GPUS)
    assert "does not fit" in plan("--model", "deepseek-v3", "--chip", "H100")


def test_json():
    words = "--model Kimi-K2 --fmt fp8 --chip b200 --gpus 8 --batch 2 --context 9 --json"
    found = json.loads(plan(*words.split()))
    (chip,) = found["chips"]
    spec = KNOWN["Kimi-K2"]
    assert chip == timing.estimate(spec, timing.entries_of(spec, "fp8"), GPUS["b200"], 8, 2, 9).to_json()
    assert chip["calibrated"] is False and chip["step_seconds"] == pytest.approx(2 / chip["tokens_per_second"])
    assert chip["step_seconds"] == pytest.approx(sum(part["seconds"] for part in chip["parts"].values()))


def test_an_artifact_has_formats_and_a_context_of_its_own(tmp_path):
    path = convert_checkpoint(ROOT / "demo" / "model", tmp_path / "artifact", fmt="mxfp4")
    artifact = Artifact(path)
    (chip,) = json.loads(plan(str(path), "--chip", "a100", "--json"))["chips"]
    found = timing.estimate(artifact.spec, artifact.manifest.tensors, GPUS["a100"], 1, 1, artifact.spec.context)
    assert artifact.spec.context < 4096 and chip == found.to_json()
    assert "positions that the model has" in plan(str(path), "--context", "100000000", code=2)


def test_an_artifact_without_its_tensors(tmp_path):
    path = write_artifact(tmp_path / "model")
    assert "lacks the tensor model.embed_tokens.weight: convert again" in plan(str(path), code=2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "DeepSeek-V33"], "choose one of DeepSeek-V3, "),
        (["--model", "GLM-5", "--chip", "tpu"], "choose one of a100, "),
        (["--model", "GLM-5", "--fmt", "fp5"], "choose one of fp8, "),
        (["--model", "GLM-5", "--batch", "0"], "0 is not in the range"),
        (["somewhere", "--model", "GLM-5"], "give only one"),
        (["somewhere", "--fmt", "fp8"], "--fmt is for --model"),
        (["/nowhere"], "No packed artifact at /nowhere"),
    ],
)
def test_mistakes_get_a_sentence(arguments, said):
    assert said in plan(*arguments, code=2)
