"""Whole conversions: the right values under the right names whatever the source's layout, and whole artifacts or none."""

import json
import os
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import (
    INDEX, experts, finish, forked, fp8_config, fuse, qwen3_config, qwen3_weights, read_stored, spread, to_fp8, tree,
    tutel_convert, write_checkpoint,
)  # fmt: skip
from tests.hub_server import Fault, HubServer
from tutel_pack.artifact import MANIFEST, Artifact
from tutel_pack.convert import layout, pipeline
from tutel_pack.convert.output import MARK
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode
from tutel_pack.quant.recipe import FORMAT_CHOICES

QUANTIZED = ("fp8", "mxfp4", "nvfp4")
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
RAGGED = {"hidden_size": 104, "moe_intermediate_size": 40}  # neither divides by a block of 16 or 32
TALL = {"hidden_size": 96, "moe_intermediate_size": 320, "vocab_size": 300, "num_hidden_layers": 2}  # segments of 2½ cuts of 128 rows


@pytest.fixture
def checkpoint(tmp_path):
    """config, weights -> the folder that holds them, two shards."""

    def write(config=None, weights=None, name="model", **options):
        config = qwen3_config() if config is None else config
        return str(write_checkpoint(tmp_path / name, qwen3_weights(config) if weights is None else weights, config, **options))

    return write


def refusal(kind, *args, **options):
    """The one sentence with which a conversion is refused."""
    with pytest.raises(kind) as caught:
        convert_checkpoint(*args, **options)
    assert caught.value.exit_code == {InputError: 2, ResourceError: 3}[kind] and "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(found: dict, expected: dict):
    """Stored tensors, byte for byte."""
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape, name
        assert torch.equal(found[name].view(torch.uint8), t.view(torch.uint8)), name


def assert_encoded(found, x, fmt, segments=None):
    """That an artifact's tensor is what encoding x gives."""
    expected = encode(x, FORMATS[fmt], segments).tensor
    assert isinstance(found, PackedTensor) and (found.format, found.segments) == (expected.format, expected.segments)
    parts = {suffix: part for suffix, part in expected.parts().items() if part is not None}
    assert_same({suffix: part for suffix, part in found.parts().items() if part is not None}, parts)


# Independent decoders, in float64 and from the stored bytes alone


def decode_float64(stored: dict, name: str, fmt: str, segments: tuple[int, ...]) -> np.ndarray:
    """[E, N, K padded to blocks] of an artifact's tensor by the law in the README of any format: element × scales."""
    data = stored[name].view(torch.uint8).numpy()
    global_scale = np.ones((len(data), len(segments)))
    if fmt == "fp8":
        elements = e4m3(data)
        scale = stored[name + "_scale"].double().numpy()
        rows = np.concatenate([np.arange(n) // 128 + sum(-(-m // 128) for m in segments[:s]) for s, n in enumerate(segments)])
        scale = scale[:, rows][:, :, np.arange(data.shape[2]) // 128]
    else:
        # The low nibble is the even column.
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        elements = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[nibbles]
        scale = stored[name + "_scale"].view(torch.uint8).numpy()
        scale = 2.0 ** (scale.astype(np.float64) - 127) if fmt == "mxfp4" else e4m3(scale)
        scale = scale.repeat(32 if fmt == "mxfp4" else 16, axis=2)
        if fmt == "nvfp4":
            global_scale = stored[name + "_scale_2"].double().numpy()
    return elements * scale * global_scale.repeat(segments, axis=1)[:, :, None]


def e4m3(bits: np.ndarray) -> np.ndarray:
    sign, exponent, mantissa = bits >> 7, (bits >> 3 & 15).astype(int), bits & 7
    magnitude = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return np.where(sign, -magnitude, magnitude)


# BF16 sources


@pytest.mark.parametrize("changes", [{}, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_experts_are_encoded_in_order(checkpoint, tmp_path, fmt, changes):
    config = qwen3_config(**changes)
    weights = qwen3_weights(config)
    artifact = Artifact(convert_checkpoint(checkpoint(config, weights), tmp_path / "out", fmt=fmt))
    gate_up, down = experts(weights, 0)
    i = config["moe_intermediate_size"]
    assert_encoded(artifact.load(GATE_UP), gate_up, fmt, (i, i))
    assert_encoded(artifact.load(DOWN), down, fmt)
    gate_up, down = experts(weights, 2)
    assert_encoded(artifact.load(GATE_UP.replace("0", "2")), gate_up, fmt, (i, i))
    # The rest by default: dense MLP, attention and head in fp8, everything else as it was.
    for name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.2.self_attn.o_proj.weight", "lm_head.weight"):
        assert_encoded(artifact.load(name), weights[name], "fp8")
    plain = [name for name, entry in artifact.manifest.tensors.items() if entry.format is None]
    assert {name.split(".")[-2] for name in plain} == {
        "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "gate", "embed_tokens", "norm"}  # fmt: skip
    assert_same({name: artifact.load(name) for name in plain}, {name: weights[name] for name in plain})


@pytest.mark.parametrize("changes", [{}, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("fmt, limit", [("fp8", 0.03), ("mxfp4", 0.13), ("nvfp4", 0.11)])
def test_experts_decode_to_the_weights_by_an_independent_decoder(checkpoint, tmp_path, fmt, limit, changes):
    config = qwen3_config(**changes)
    weights = qwen3_weights(config)
    out = convert_checkpoint(checkpoint(config, weights), tmp_path / "out", fmt=fmt)
    stored, artifact, i = read_stored(out), Artifact(out), config["moe_intermediate_size"]
    for name, x, segments in zip((GATE_UP, DOWN), experts(weights, 0), ((i, i), (config["hidden_size"],))):
        found, x = decode_float64(stored, name, fmt, segments), x.double().numpy()
        padding = found[:, :, x.shape[2] :]
        found = found[:, :, : x.shape[2]]
        assert not padding.any()
        # One product is rounded once; of nvfp4's two, both.
        exact = found.astype(np.float32)
        np.testing.assert_allclose(decode(artifact.load(name)).numpy(), exact, rtol=2**-22 if fmt == "nvfp4" else 0, atol=0)

        def worst(y):
            """Largest relative error of an expert's segment."""
            at = np.cumsum((0, *segments))
            parts = [(y[:, a:b], x[:, a:b]) for a, b in zip(at, at[1:])]
            return max((np.linalg.norm(p - q, axis=(1, 2)) / np.linalg.norm(q, axis=(1, 2))).max() for p, q in parts)

        assert worst(found) < limit
        # What must not pass: two experts in each other's place, one dead, gate and up swapped, nibbles swapped.
        assert worst(found[[0, 1, 10, 11, *range(2, 10)]]) > 1
        assert worst(np.concatenate([found[:11], 0 * found[11:]])) == 1
        assert len(segments) == 1 or worst(np.roll(found, i, axis=1)) > 1
        assert worst(found.reshape(*found.shape[:2], -1, 2)[..., ::-1].reshape(found.shape)) > 1


def test_expert_ids_sort_as_numbers(checkpoint, tmp_path):
    config, weights = qwen3_config(), qwen3_weights(qwen3_config())
    for name, w in weights.items():
        if ".experts." in name:
            sign, e = (-1 if "up_proj" in name else 1), int(name.split(".")[5])
            w.fill_(sign * (e + 1))
    found = Artifact(convert_checkpoint(checkpoint(config, weights), tmp_path / "out", fmt="bf16")).load(GATE_UP).data
    assert found[:, 0, 0].tolist() == [e + 1 for e in range(12)] and found[:, -1, -1].tolist() == [-e - 1 for e in range(12)]
    assert torch.equal(found[:, :96], -found[:, 96:]) and (found == found[:, :1].sign() * found.abs()).sum() == found.numel() / 2


@pytest.mark.parametrize("fmt", FORMAT_CHOICES)
def test_fused_and_separate_experts_are_equal(checkpoint, tmp_path, fmt):
    config = qwen3_config()
    weights = qwen3_weights(config)
    separate = convert_checkpoint(checkpoint(config, weights, shards=3), tmp_path / "a", fmt=fmt)
    fused = convert_checkpoint(checkpoint(config, fuse(weights, config), "fused", shards=1), tmp_path / "b", fmt=fmt)
    assert tree(separate, "*.safetensors") == tree(fused, "*.safetensors")
    first, second = (json.loads((out / MANIFEST).read_text()) for out in (separate, fused))
    assert first.pop("source") != second.pop("source") and first == second


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sources_of_other_float_types(checkpoint, tmp_path, dtype):
    weights = qwen3_weights(qwen3_config(), dtype)
    source = checkpoint(weights=weights)
    artifact = Artifact(convert_checkpoint(source, tmp_path / "a", fmt="nvfp4"))
    assert_encoded(artifact.load(GATE_UP), experts(weights, 0)[0], "nvfp4", (96, 96))
    assert artifact.load("model.norm.weight").dtype == dtype
    kept = Artifact(convert_checkpoint(source, tmp_path / "b", fmt="source"))
    assert torch.equal(kept.load(GATE_UP).data, experts(weights, 0)[0])
    narrow = Artifact(convert_checkpoint(source, tmp_path / "c", fmt="bf16"))
    assert torch.equal(narrow.load(GATE_UP).data, experts(weights, 0)[0].bfloat16())


# Block-FP8 sources


def fp8_truth(weights: dict, name: str, block=(128, 128)) -> torch.Tensor:
    """What a block-FP8 source means, by indexing: W = f32(q) · s."""
    q = torch.from_numpy(e4m3(weights[name].view(torch.uint8).numpy())).float()
    return q * spread(weights[name + "_scale_inv"], block, q.shape)


def fp8_experts(weights: dict, block=(128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    truth = {name: fp8_truth(weights, name, block) for name in weights if name.startswith("model.layers.0.mlp.experts") and "scale" not in name}
    return experts(truth, 0)


@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=["128", "32"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 18, "moe_intermediate_size": 160}], ids=["even", "576-rows"])
def test_block_fp8_passes_bit_for_bit(checkpoint, tmp_path, block, scale_dtype, changes):
    config = fp8_config(block, **changes)
    weights = to_fp8(qwen3_weights(config), block=block, scale_dtype=scale_dtype)
    source = checkpoint(config, weights)  # neighbours in two shards, so a weight and its scale never share a file
    places = json.loads(open(f"{source}/{INDEX}").read())["weight_map"]
    assert places[Q] != places[Q + "_scale_inv"]
    results = [Artifact(convert_checkpoint(source, tmp_path / fmt, fmt=fmt, overrides=(("lm_head", "bf16"),))) for fmt in ("fp8", "source")]
    assert tree(tmp_path / "fp8", "*.safetensors") == tree(tmp_path / "source", "*.safetensors")
    for artifact in results:
        gate_up, down = fp8_experts(weights, block)
        assert torch.equal(decode(artifact.load(GATE_UP)), gate_up) and torch.equal(decode(artifact.load(DOWN)), down)
        bytes_of = {name: w.view(torch.uint8) for name, w in weights.items() if w.dtype == torch.float8_e4m3fn}
        assert torch.equal(artifact.load(GATE_UP).data.view(torch.uint8), experts(bytes_of, 0)[0])
        for name in (Q, "model.layers.1.mlp.down_proj.weight"):
            found = artifact.load(name)
            assert found.format.block == block and torch.equal(found.data.view(torch.uint8), bytes_of[name])
            assert torch.equal(found.scale, weights[name + "_scale_inv"].float())
            assert torch.equal(decode(found), fp8_truth(weights, name, block))
        assert not any(name.startswith(GATE_UP) for name in artifact.manifest.errors)  # nothing was quantized


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "bf16"])
def test_block_fp8_to_other_formats(checkpoint, tmp_path, fmt):
    config = fp8_config()
    weights = to_fp8(qwen3_weights(config))
    artifact = Artifact(convert_checkpoint(checkpoint(config, weights), tmp_path / "out", fmt=fmt, rest="fp8"))
    gate_up, down = fp8_experts(weights)
    assert_encoded(artifact.load(GATE_UP), gate_up, fmt, (96, 96))
    assert_encoded(artifact.load(DOWN), down, fmt)
    assert torch.equal(artifact.load(Q).data.view(torch.uint8), weights[Q].view(torch.uint8))


def test_other_rows_of_blocks_than_ours_become_ours_only_when_encoded_anew(checkpoint, tmp_path):
    config = fp8_config((32, 32))
    weights = to_fp8(qwen3_weights(config), block=(32, 32)) | {Q: qwen3_weights(config)[Q]}
    del weights[Q + "_scale_inv"]
    artifact = Artifact(convert_checkpoint(checkpoint(config, weights), tmp_path / "out", fmt="fp8"))
    assert artifact.load(Q).format.block == (128, 128) and artifact.load(K).format.block == (32, 32)


@pytest.mark.parametrize("unit", [None, 1])
def test_gate_in_fp8_beside_up_in_bf16(checkpoint, tmp_path, monkeypatch, unit):
    if unit:
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", unit)
    config = fp8_config(**TALL)
    plain = qwen3_weights(config)
    weights = to_fp8(plain, pattern=r"gate_proj\.weight")
    source = checkpoint(config, weights)
    artifact = Artifact(convert_checkpoint(source, tmp_path / "out", fmt="fp8"))
    found = artifact.load(GATE_UP)
    gates, ups = (f"model.layers.0.mlp.experts.{{}}.{kind}_proj.weight" for kind in ("gate", "up"))
    for e in range(12):
        # The gate's bytes are never quantized again, even where its neighbours are, and whatever the units are.
        assert torch.equal(found.data[e, :320].view(torch.uint8), weights[gates.format(e)].view(torch.uint8))
        assert torch.equal(found.scale[e, :3], weights[gates.format(e) + "_scale_inv"])
        up = encode(plain[ups.format(e)], FORMATS["fp8"]).tensor
        assert torch.equal(found.data[e, 320:].view(torch.uint8), up.data.view(torch.uint8))
        assert torch.equal(found.scale[e, 3:], up.scale)
    assert 0 < artifact.manifest.errors[GATE_UP]["rms"] < 0.03
    assert "give it one with --override" in refusal(InputError, source, tmp_path / "b", fmt="source")
    with_override = Artifact(convert_checkpoint(source, tmp_path / "c", fmt="source", overrides=(("gate_up", "mxfp4"),)))
    joined = torch.stack([torch.cat([fp8_truth(weights, gates.format(e)), plain[ups.format(e)].float()]) for e in range(12)])
    assert_encoded(with_override.load(GATE_UP), joined, "mxfp4", (320, 320))


def rename(weights, name, new):
    weights[new] = weights.pop(name)


E7 = "model.layers.0.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize("fault, parts", [
    (lambda w: [w.pop(n) for n in list(w) if n.endswith("_scale_inv")], ["quantized tensors have no scale", "q_proj.weight"]),
    (lambda w: w.pop(E7 + "_scale_inv"), [E7, "have no scale"]),
    (lambda w: rename(w, Q + "_scale_inv", Q[:-7] + ".scales"), [Q, "scales of an unknown name", Q[:-7] + ".scales"]),
    (lambda w: w.update({E7 + "_scale_inv": torch.ones(1, 1)}), [E7 + "_scale_inv", "[1, 1]", "[1, 2]"]),
    (lambda w: w.update({E7 + "_scale_inv": torch.ones(2)}), [E7 + "_scale_inv", "[2]", "[1, 2]"]),
    (lambda w: w.update({E7 + "_scale_inv": torch.ones(())}), [E7 + "_scale_inv", "[]", "[1, 2]"]),
    (lambda w: w.update({E7 + "_scale_inv": torch.ones(1, 2, dtype=torch.int32)}), [E7 + "_scale_inv", "I32"]),
    (lambda w: w.update({E7: w[E7].float()}), ["has unknown 1 tensor", E7 + "_scale_inv"]),
    (lambda w: w.update({E7: w[E7].view(torch.float8_e5m2)}), [E7, "is float8 e5m2, and only e4m3 is supported"]),
    (lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.float8_e4m3fn)}), ["model.norm.weight", "no scale"]),
])  # fmt: skip
def test_scales_that_are_missing_or_do_not_fit(checkpoint, tmp_path, fault, parts):
    weights = to_fp8(qwen3_weights(fp8_config()))
    fault(weights)
    text = refusal(InputError, checkpoint(fp8_config(), weights), tmp_path / "out", fmt="mxfp4")
    assert [part for part in parts if part not in text] == [], text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("block", [None, [], [128], [0, 128], [128, -1], [128, "128"], [128.0, 128], [True, True], "128",
                                   [160, 128], [128, 10**12], [256, 256]])  # fmt: skip
def test_block_sizes_that_are_none(checkpoint, tmp_path, block):
    config = fp8_config()
    config["quantization_config"]["weight_block_size"] = block
    text = refusal(InputError, checkpoint(config, to_fp8(qwen3_weights(config))), tmp_path / "out")
    assert "weight_block_size" in text or "blocks of" in text


# Weights that are no numbers


@pytest.mark.parametrize("unit", [None, 1])
@pytest.mark.parametrize("fmt, bad", [("mxfp4", torch.nan), ("nvfp4", torch.inf), ("nvfp4", torch.nan), ("fp8", -torch.inf),
                                      ("source", torch.nan), ("source", -torch.inf)])  # fmt: skip
def test_non_finite_weights(checkpoint, tmp_path, monkeypatch, fmt, bad, unit):
    if unit:
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", unit)
    config = qwen3_config(**TALL)
    weights = qwen3_weights(config)
    weights[E7][200, 17] = bad  # a row of the up segment
    text = refusal(InputError, checkpoint(config, weights), tmp_path / "out", fmt=fmt)
    assert GATE_UP in text and "[7, 520, 17]" in text
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("name, index, place", [
    ("model.norm.weight", (5,), "[5]"), ("model.embed_tokens.weight", (299, 3), "[299, 3]"),
    ("model.layers.0.mlp.gate.weight", (11, 95), "[11, 95]"), ("lm_head.weight", (140, 1), "[140, 1]"),
])  # fmt: skip
@pytest.mark.parametrize("unit", [None, 1])
def test_non_finite_values_of_what_is_kept(checkpoint, tmp_path, monkeypatch, name, index, place, unit):
    if unit:
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", unit)
    config = qwen3_config(**TALL)
    weights = qwen3_weights(config)
    weights[name][index] = torch.nan
    text = refusal(InputError, checkpoint(config, weights), tmp_path / "out")
    assert name in text and place in text


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("part, value, row", [("", 0xFF, 200), ("_scale_inv", torch.nan, 128)])
def test_non_finite_fp8(checkpoint, tmp_path, fmt, part, value, row):
    config = fp8_config(**TALL)
    weights = to_fp8(qwen3_weights(config))
    if part:
        weights[E7 + part][1, 0] = value
    else:
        weights[E7].view(torch.uint8)[200, 0] = value
    text = refusal(InputError, checkpoint(config, weights), tmp_path / "out", fmt=fmt)
    assert GATE_UP in text and f"[7, {320 + row}, 0]" in text


def test_zero_and_tiny_experts(checkpoint, tmp_path):
    weights = qwen3_weights(qwen3_config())
    for name in weights:
        if ".experts.3." in name:
            weights[name].zero_()
        if ".experts.4." in name:
            weights[name].mul_(1e-30)
    source = checkpoint(weights=weights)
    for fmt in QUANTIZED:
        artifact = Artifact(convert_checkpoint(source, tmp_path / fmt, fmt=fmt))
        found = decode(artifact.load(GATE_UP))
        assert found.isfinite().all() and not found[3].any() and found[5].any()
        assert np.isfinite(artifact.manifest.errors[GATE_UP]["rms"])


# Units: how the work is cut must not show


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8-32"])
def test_units_do_not_show(checkpoint, tmp_path, monkeypatch, fmt, kind):
    block = (32, 32) if kind == "fp8-32" else (128, 128)
    config = qwen3_config(**TALL) if kind == "bf16" else fp8_config(block, **TALL)
    weights = qwen3_weights(config) if kind == "bf16" else to_fp8(qwen3_weights(config), block=block)
    source = checkpoint(config, weights)
    whole = convert_checkpoint(source, tmp_path / "whole", fmt=fmt)
    expert = 2 * TALL["moe_intermediate_size"] * TALL["hidden_size"]
    cuts = []
    for elements in (1, expert // 2, 5 * expert):  # tiles of 128 rows; tiles of a segment; 5, 5 and 2 experts
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", elements)
        cut = convert_checkpoint(source, tmp_path / str(elements), fmt=fmt)
        assert tree(cut, "*.safetensors") == tree(whole, "*.safetensors"), elements
        for name, error in Artifact(whole).manifest.errors.items():
            assert Artifact(cut).manifest.errors[name] == pytest.approx(error, rel=1e-6)
        job = pipeline.plan(source, pipeline.Recipe(fmt))
        cuts.append([len(list(layout.units(t, job.entries[t.name]))) for t in job.targets if t.name in (GATE_UP, "lm_head.weight")])
    assert cuts == [[12 * 2 * 3, 3], [12 * 2 * 2, 1], [3, 1]]  # or nothing was cut


def test_units_cover_every_row_once(checkpoint, monkeypatch):
    monkeypatch.setattr(layout, "UNIT_ELEMENTS", 130 * TALL["hidden_size"])
    job = pipeline.plan(checkpoint(qwen3_config(**TALL)), pipeline.Recipe("nvfp4"))
    for target in job.targets:
        entry, rows = job.entries[target.name], []
        for unit in layout.units(target, entry):
            for piece in unit.pieces():
                rows += [(piece.stored.name, row) for row in range(piece.first, piece.first + piece.rows)]
            if unit.segment is not None:
                assert unit.first % 128 == 0
        assert len(rows) == len(set(rows)) == sum(p.rows for row in target.pieces for p in row), target.name


# Determinism


def test_two_runs_are_equal_with_one_thread_and_two(checkpoint, tmp_path):
    source = checkpoint()
    runs = [tutel_convert(source, "--fmt", "nvfp4", "-o", tmp_path / threads, env={"OMP_NUM_THREADS": threads}) for threads in ("1", "2")]
    assert [finish(run)[0] for run in runs] == [0, 0]
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(convert_checkpoint(source, tmp_path / "3", fmt="nvfp4"))
    assert set(tree(tmp_path / "1")) == {
        "base.safetensors", *(f"layers-{i:05d}.safetensors" for i in range(3)), "config.json", "tokenizer.json", MANIFEST}  # fmt: skip


# The Hub


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """The same repository at two commits with other weights; main is the second."""
    config = qwen3_config(num_hidden_layers=1, mlp_only_layers=[])
    weights = qwen3_weights(config)
    checkpoint(config, {name: w + 1 for name, w in weights.items()}, "old")
    checkpoint(config, weights, "model")
    with HubServer({"org/model": {"a" * 40: tmp_path / "old", "b" * 40: tmp_path / "model"}}) as server:
        server.use(monkeypatch)
        yield server


def test_hub_and_folder_are_equal_and_only_weights_are_transferred(hub, tmp_path):
    remote = convert_checkpoint("org/model", tmp_path / "remote")
    local = convert_checkpoint(str(tmp_path / "model"), tmp_path / "local")
    assert tree(remote, "*.safetensors") == tree(local, "*.safetensors")
    assert Artifact(remote).manifest.source == {"repo": "org/model", "commit": "b" * 40}
    assert Artifact(local).manifest.source == {"repo": "model", "commit": None}
    weights = hub.requests(r"^GET .*\.safetensors\?")
    assert {request.status for request in weights} == {206} and all("range" in request.headers for request in weights)
    stored = sum((tmp_path / "model" / name).stat().st_size for name in tree(tmp_path / "model", "*.safetensors"))
    assert sum(request.sent for request in weights) == stored  # headers once, every weight once, not a byte more
    assert max(request.sent for request in weights) < stored / 10


def test_a_branch_that_moves_while_it_is_read(hub, tmp_path):
    hub.refs["org/model"]["main"] = "a" * 40
    hub.faults.append(Fault(r"GET .*\.safetensors", before=lambda: hub.refs["org/model"].update(main="b" * 40)))
    out = convert_checkpoint("org/model", tmp_path / "out")
    assert hub.refs["org/model"]["main"] == "b" * 40
    assert Artifact(out).manifest.source["commit"] == "a" * 40
    assert tree(out, "*.safetensors") == tree(convert_checkpoint(str(tmp_path / "old"), tmp_path / "old-out"), "*.safetensors")
    # The other commit gives other bytes, or the comparison would mean nothing.
    assert tree(out, "*.safetensors") != tree(convert_checkpoint("org/model", tmp_path / "new-out"), "*.safetensors")


def test_the_command_converts_from_the_hub(hub, tmp_path):
    env = {"HF_ENDPOINT": hub.endpoint, "XDG_STATE_HOME": str(tmp_path / "state")}
    code, out, err = finish(tutel_convert("--fmt", "fp8", "org/model", cwd=tmp_path, env=env))
    assert (code, (tmp_path / "state/tutel-pack/latest").read_text()) == (0, str(tmp_path / "model-fp8")), err
    assert tree(tmp_path / "model-fp8", "*.safetensors") == tree(convert_checkpoint(str(tmp_path / "model"), tmp_path / "x", fmt="fp8"), "*.safetensors")
    assert "org/missing" in refusal(InputError, "org/missing", tmp_path / "y")


# Broken files


def test_truncated_missing_and_empty_shards(checkpoint, tmp_path):
    source = checkpoint()
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for data in (whole[:-1], whole + b"\0", whole[:100], b""):
        shard.write_bytes(data)
        assert shard.name in refusal(InputError, source, tmp_path / "out")
    shard.unlink()
    assert shard.name in refusal(InputError, source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def test_a_shard_that_shrinks_while_it_is_converted(checkpoint, tmp_path, monkeypatch):
    source = checkpoint()
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    job = pipeline.plan(source, pipeline.Recipe())
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(InputError, match="became shorter"):
        pipeline.run(job, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def test_a_stray_file_does_not_win(checkpoint, tmp_path):
    source = checkpoint()
    save_file({name: w * 0 for name, w in qwen3_weights(qwen3_config()).items()}, tmp_path / "model" / "model.safetensors")
    found = Artifact(convert_checkpoint(source, tmp_path / "out", fmt="bf16")).load(GATE_UP)
    assert torch.equal(found.data, experts(qwen3_weights(qwen3_config()), 0)[0])


# What is copied


def test_small_files_are_copied_and_nothing_that_runs(checkpoint, tmp_path):
    source = checkpoint()
    folder = tmp_path / "model"
    copied = {"generation_config.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "LICENSE (old).txt",
              "merges.txt", "vocab.json", "NOTICE"}  # fmt: skip
    left = {"modeling_x.py", "tokenizer.py", "tokenizer.model.py", "vocab.pkl", "pytorch_model.bin", "README.md", "tokenizer\n.json"}
    (folder / "tokenizer").mkdir()
    for name in copied | left | {"tokenizer/a.json"}:
        (folder / name).write_text(f"text of {name}")
    out = convert_checkpoint(source, tmp_path / "out")
    found = {name for name in tree(out) if not name.endswith(".safetensors")}
    assert found == copied | {"config.json", "tokenizer.json", MANIFEST}
    assert (out / "NOTICE").read_text() == "text of NOTICE"
    assert Artifact(out).verify() == []


# Where it is written


def test_an_output_that_is_there(checkpoint, tmp_path):
    source, out = checkpoint(), tmp_path / "out"
    out.mkdir()
    convert_checkpoint(source, out)  # an empty folder is no loss
    before = tree(out)
    assert "--force" in refusal(InputError, source, out, fmt="fp8")
    assert tree(out) == before
    convert_checkpoint(source, out, fmt="fp8", force=True)
    assert tree(out) != before and sorted(os.listdir(tmp_path)) == ["model", "out"]


@pytest.mark.parametrize("content", ["file", "folder", "foreign packed.json", "artifact and more", "artifact and a folder"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_an_artifact_is_never_replaced(checkpoint, tmp_path, content, force):
    source, out = checkpoint(), tmp_path / "out"
    if content == "file":
        out.write_text("mine")
    elif content.startswith("artifact"):
        convert_checkpoint(source, out)
        (out / "sub").mkdir()
        (out / ("notes.txt" if "more" in content else "sub/mine")).write_text("mine")
    else:
        out.mkdir()
        (out / ("packed.json" if "json" in content else "mine")).write_text('{"name": "a package"}')
    before = tree(tmp_path)
    assert str(out) in refusal(InputError, source, out, force=force)
    assert tree(tmp_path) == before


def test_the_temporary_name_is_not_taken_from_anybody(checkpoint, tmp_path):
    source, mine = checkpoint(), tmp_path / "out.partial"
    mine.mkdir()
    convert_checkpoint(source, tmp_path / "out")  # an empty folder is in nobody's way
    shutil.rmtree(tmp_path / "out")
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    assert "out.partial" in refusal(InputError, source, tmp_path / "out")
    assert (mine / "thesis.tex").read_text() == "mine" and not (tmp_path / "out").exists()


def test_two_conversions_do_not_share_a_folder(checkpoint, tmp_path, monkeypatch):
    source, out = checkpoint(), tmp_path / "out"
    fill = pipeline._fill
    refused = []

    def meanwhile(*args):
        monkeypatch.setattr(pipeline, "_fill", fill)
        refused.append(refusal(InputError, source, out))
        fill(*args)

    monkeypatch.setattr(pipeline, "_fill", meanwhile)
    convert_checkpoint(source, out)
    assert "Another conversion" in refused[0] and Artifact(out).verify() == [] and not (out / MARK).exists()


def test_outputs_that_cannot_be(checkpoint, tmp_path):
    source = checkpoint()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for out in (tmp_path / "file" / "out", tmp_path / "loop" / "out", tmp_path / ("n" * 300), "/proc/out", "/", "/proc"):
        refusal(InputError, source, out)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop", "model"]


def test_links_stay_links(checkpoint, tmp_path):
    source = checkpoint()
    (tmp_path / "disk").mkdir()
    (tmp_path / "to-come").symlink_to("disk/new")
    (tmp_path / "empty").symlink_to("disk")
    convert_checkpoint(source, tmp_path / "to-come")
    assert (tmp_path / "to-come").is_symlink() and Artifact(tmp_path / "disk" / "new").verify() == []
    convert_checkpoint(source, tmp_path / "to-come", force=True)
    assert (tmp_path / "to-come").is_symlink() and os.listdir(tmp_path / "disk") == ["new"]


def test_force_keeps_the_old_one_if_the_new_one_fails(checkpoint, tmp_path, monkeypatch):
    config = qwen3_config()
    weights = qwen3_weights(config)
    source, out = checkpoint(config, weights), tmp_path / "out"
    before = tree(convert_checkpoint(source, out))
    weights["model.norm.weight"][0] = torch.nan
    broken = checkpoint(config, weights, "broken")
    refusal(InputError, broken, out, force=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline, "write_manifest", full)
    refusal(ResourceError, source, out, force=True)
    assert tree(out) == before and sorted(os.listdir(tmp_path)) == ["broken", "model", "out"]


# Space, kills, interrupts: in processes of their own

ONE_MIB_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
NO_CHECK = "import tutel_pack.convert.output as p; p._check_space = lambda *_: None"
STOP_AT = """
import os, signal
import tutel_pack.artifact as a
write, left = a.FileWriter.write, [{writes}]
def stopping(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.{signal})
    write(*args)
a.FileWriter.write = stopping
"""


@pytest.fixture
def big(checkpoint):
    """A checkpoint whose artifact takes more than 1 MiB, a layer's file included."""
    return checkpoint(qwen3_config(hidden_size=256, num_hidden_layers=2, moe_intermediate_size=256))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("mounting needs root; the limit on a file's size stands for it")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(big, small_disk, tmp_path):
    for before, words in (("", "the artifact needs"), (NO_CHECK, "No space left")):
        code, out, err = forked(tmp_path, big, "-o", small_disk / "out", before=before)
        assert (code, out) == (3, "") and words in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(small_disk) == []
    assert "mount point" in refusal(InputError, big, small_disk)  # its name cannot be taken by a rename


def test_a_limit_on_file_sizes(big, tmp_path):
    code, out, err = forked(tmp_path, big, "-o", "out", before=ONE_MIB_FILES)
    assert code == 3 and "No space left" in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("writes", [1, 20, 50])
def test_kill_and_rerun(checkpoint, tmp_path, writes):
    source, out = checkpoint(), tmp_path / "out"
    whole = tree(convert_checkpoint(source, tmp_path / "whole"))
    assert forked(tmp_path, source, "-o", out, before=STOP_AT.format(writes=writes, signal="SIGKILL"))[0] == -signal.SIGKILL
    assert not out.exists() and list(tmp_path.glob("out.partial/*.safetensors"))
    (tmp_path / "out.partial" / "layers-00099.safetensors").write_text("left by a conversion of more layers")
    assert tree(convert_checkpoint(source, out)) == whole
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "whole"]


def test_kill_between_two_names(checkpoint, tmp_path):
    """A forced replacement leaves the old artifact whole until the new one is."""
    source, out = checkpoint(), tmp_path / "out"
    old, new = tree(convert_checkpoint(source, out)), tree(convert_checkpoint(source, tmp_path / "new", fmt="fp8"))
    die = "import os, pathlib, signal\npathlib.Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    assert forked(tmp_path, source, "--fmt", "fp8", "--force", "-o", out, before=die)[0] == -signal.SIGKILL
    assert tree(out) == old
    convert_checkpoint(source, out, fmt="fp8", force=True)
    assert tree(out) == new


def test_interrupt(checkpoint, tmp_path):
    code, out, err = forked(tmp_path, checkpoint(), "-o", "out", before=STOP_AT.format(writes=40, signal="SIGINT"))
    assert code == 130 and err.endswith("Interrupted.\n") and "Traceback" not in err
    assert os.listdir(tmp_path) == ["model"]
