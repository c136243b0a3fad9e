"""What is cast or passed through: exact wherever it can be, however the work is cut, and never beyond float32."""

import json
import math

import numpy as np
import pytest
import torch

from tests.checkpoints import LAYOUTS, experts, forked, qwen3_config, qwen3_weights, to_layout, tree, write_checkpoint
from tests.convert.layouts_oracle import meaning
from tutel_pack.artifact import MANIFEST, Artifact, Manifest
from tutel_pack.convert import layout, pack, pipeline
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS
from tutel_pack.quant.codec import decode, encode

SIZES = {"hidden_size": 96, "moe_intermediate_size": 320, "vocab_size": 64, "num_hidden_layers": 1, "mlp_only_layers": [],
         "num_experts": 3, "num_attention_heads": 10, "num_key_value_heads": 2}  # fmt: skip
"""Segments, and q_proj, of 2½ cuts of 128 rows."""
EXPERT = 2 * 320 * 96
CUTS = (1, EXPERT // 2, 2 * EXPERT)
"""Elements of units: tiles of 128 rows; a segment; two experts and one."""
CONFIG = qwen3_config(**SIZES)
AT = "model.layers.0.mlp.experts."
GATE_UP, DOWN, Q = AT + "gate_up_proj", AT + "down_proj", "model.layers.0.self_attn.q_proj"
SEGMENTS = {GATE_UP: (320, 320), DOWN: (96,)}
SPAN = {"nvfp4": 17, "fp8": 14}
"""Powers of two over which mxfp4 is cast without loss: of an expert, and of a block of 128 × 128."""
EXACT = {"rms": 0.0, "exact": True}


def mxfp4(wide=lambda name: False, span: int = 14, pattern: str = r"_proj\.weight") -> dict[str, torch.Tensor]:
    """A checkpoint whose block exponents span this; those that `wide` names have one more in row 130, or their last."""
    weights = to_layout("mxfp4-ct", qwen3_weights(CONFIG), pattern)
    for name, w in weights.items():
        if name.endswith("weight_scale"):
            w.copy_(100 + w % (span + 1))
            w[0, 0], w[0, 1], w[min(130, len(w) - 1), 0] = 100, 100 + span, 140 if wide(name) else 100
            packed = weights[name.replace("_scale", "_packed")].view(len(w), -1, 16)
            packed[..., 0] = 0x71  # no block of zeros, and in each the smallest element and the largest
    return weights


def meant(weights: dict) -> dict[str, torch.Tensor]:
    """[E, N, K] of the experts, [N, K] of q_proj, each read by its own layout, in float32."""

    def value(name: str) -> torch.Tensor:
        if name + ".weight" in weights:
            return weights[name + ".weight"].float()
        layout_of = "nvfp4-ct" if name + ".weight_global_scale" in weights else "mxfp4-ct"
        return torch.from_numpy(meaning(layout_of, weights, name))

    names = [f"{AT}{e}.{kind}_proj" for e in range(3) for kind in ("gate", "up", "down")]
    gate_up, down = experts({name + ".weight": value(name) for name in names}, 0, 3)
    return {GATE_UP: gate_up, DOWN: down, Q + ".weight": value(Q)}


def converted(tmp_path, monkeypatch, weights: dict, fmt: str) -> Artifact:
    """An artifact, whose bytes and report are the same for units of all sizes."""
    source = write_checkpoint(tmp_path / "model", weights, CONFIG)
    whole = Artifact(convert_checkpoint(source, tmp_path / "out", fmt=fmt, rest=fmt))
    for elements in CUTS:
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", elements)
        cut = Artifact(convert_checkpoint(source, tmp_path / str(elements), fmt=fmt, rest=fmt))
        assert tree(cut.path, "*.safetensors") == tree(whole.path, "*.safetensors"), elements
        assert cut.manifest.errors.keys() == whole.manifest.errors.keys()
        for name, error in whole.manifest.errors.items():
            assert cut.manifest.errors[name] == pytest.approx(error, rel=1e-5), (elements, name)
            assert ("exact" in cut.manifest.errors[name]) == ("exact" in error)
    return whole


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int32)


# mxfp4


@pytest.mark.parametrize("fmt", SPAN)
def test_a_cast_is_exact_however_the_work_is_cut(tmp_path, monkeypatch, fmt):
    weights = mxfp4(span=SPAN[fmt])
    artifact = converted(tmp_path, monkeypatch, weights, fmt)
    for name, wanted in meant(weights).items():
        found = artifact.load(name)
        assert found.format == FORMATS[fmt] and torch.equal(bits(decode(found)), bits(wanted)), name
        assert artifact.manifest.errors[name] == EXACT
    anew = encode(meant(weights)[GATE_UP], FORMATS["fp8"]).tensor
    assert not torch.equal(decode(anew), meant(weights)[GATE_UP])  # in fp8 the cast is needed


def test_an_expert_that_nvfp4_does_not_hold_is_encoded_however_the_work_is_cut(tmp_path, monkeypatch):
    """One block of one segment decides for the expert, and not for its neighbours."""
    weights = mxfp4(lambda name: ".experts.1.up" in name or ".experts.2.down" in name or "q_proj" in name)
    artifact = converted(tmp_path, monkeypatch, weights, "nvfp4")
    wanted = meant(weights)
    for name, lossy in ((GATE_UP, 1), (DOWN, 2)):
        found, encoded = artifact.load(name), encode(wanted[name], FORMATS["nvfp4"], SEGMENTS[name]).tensor
        for e in range(3):
            assert torch.equal(bits(decode(found)[e]), bits(decode(encoded)[e] if e == lossy else wanted[name][e])), e
            assert torch.equal(found.global_scale[e], encoded.global_scale[e]) == (e == lossy)
        error = artifact.manifest.errors[name]
        assert "exact" not in error and error["worst_expert"] == lossy
        true = (decode(found).double() - wanted[name]).square().sum((1, 2)) / wanted[name].double().square().sum((1, 2))
        assert error["worst_rms"] == pytest.approx(math.sqrt(true[lossy]), rel=1e-4) and error["worst_rms"] > 0
    q = encode(wanted[Q + ".weight"], FORMATS["nvfp4"]).tensor
    assert torch.equal(decode(artifact.load(Q + ".weight")), decode(q))


def test_fp8_casts_the_rows_of_blocks_that_it_holds(tmp_path, monkeypatch):
    """Of gate 1 and q_proj the second row of blocks is encoded, of down 2 all, and everything else is exact."""
    weights = mxfp4(lambda name: ".experts.1.gate" in name or ".experts.2.down" in name or "q_proj" in name)
    artifact = converted(tmp_path, monkeypatch, weights, "fp8")
    lossy = {GATE_UP: (1, slice(128, 256)), DOWN: (2, slice(0, 96)), Q + ".weight": (slice(128, 256),)}
    for name, wanted in meant(weights).items():
        found = decode(artifact.load(name))
        expected, encoded = wanted.clone(), decode(encode(wanted, FORMATS["fp8"], SEGMENTS.get(name)).tensor)
        expected[lossy[name]] = encoded[lossy[name]]
        assert torch.equal(bits(found), bits(expected))
        assert not torch.equal(found, wanted) and not torch.equal(found, encoded)
        error = artifact.manifest.errors[name]
        true = (found.double() - wanted).norm() / wanted.double().norm()
        assert "exact" not in error and error["rms"] == pytest.approx(true.item(), rel=1e-4)
        assert error.get("worst_expert") == (lossy[name][0] if wanted.ndim == 3 else None)


@pytest.mark.parametrize("fmt", SPAN)
def test_gate_in_mxfp4_beside_up_in_bf16(tmp_path, monkeypatch, fmt):
    weights = mxfp4(pattern=r"(gate_proj|q_proj)\.weight")
    wanted, artifact = meant(weights)[GATE_UP], converted(tmp_path, monkeypatch, weights, fmt)
    encoded = decode(encode(wanted, FORMATS[fmt], (320, 320)).tensor)
    if fmt == "fp8":
        encoded[:, :320] = wanted[:, :320]
    assert torch.equal(decode(artifact.load(GATE_UP)), encoded)
    assert "exact" not in artifact.manifest.errors[GATE_UP] and artifact.manifest.errors[Q + ".weight"] == EXACT


def test_gate_that_is_kept_beside_up_that_is_not(tmp_path, monkeypatch):
    """In nvfp4 each has a global scale of its own; where nothing is kept they share one. Experts differ in that."""
    plain = qwen3_weights(CONFIG)
    weights = to_layout("nvfp4-ct", plain, r"experts\.[12]\.gate_proj\.weight")
    weights = to_layout("mxfp4-ct", weights, r"experts\.2\.up_proj\.weight")
    weights[AT + "2.up_proj.weight_scale"].fill_(120)
    wanted, artifact = meant(weights)[GATE_UP], converted(tmp_path, monkeypatch, weights, "nvfp4")
    found, values = artifact.load(GATE_UP), decode(artifact.load(GATE_UP))
    for e in (1, 2):
        assert torch.equal(found.data[e, :320], weights[f"{AT}{e}.gate_proj.weight_packed"])
    assert torch.equal(bits(values[2]), bits(wanted[2]))  # kept and cast
    alone = encode(wanted[1, 320:], FORMATS["nvfp4"]).tensor
    assert torch.equal(values[1, 320:], decode(alone)) and torch.equal(found.global_scale[1, 1:], alone.global_scale)
    together = encode(wanted[0], FORMATS["nvfp4"], (320, 320)).tensor
    assert torch.equal(values[0], decode(together)) and torch.equal(found.global_scale[0], together.global_scale)
    assert artifact.manifest.errors[GATE_UP].keys() == {"rms", "worst_expert", "worst_rms"}


def test_experts_of_zeros(tmp_path, monkeypatch):
    weights = mxfp4()
    for name in weights:
        if name.endswith("_packed"):
            weights[name].fill_(0x80)  # zeros of both signs
    artifact = converted(tmp_path, monkeypatch, weights, "nvfp4")
    found = artifact.load(GATE_UP)
    assert not decode(found).any() and found.scale.float().isfinite().all() and (found.global_scale == 1).all()
    assert artifact.manifest.errors[GATE_UP] == EXACT


def test_what_is_not_cut_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "read_unit", lambda *args: pytest.fail("a pass too many"))
    source = write_checkpoint(tmp_path / "model", mxfp4(), CONFIG)
    convert_checkpoint(source, tmp_path / "a", fmt="nvfp4", rest="nvfp4")
    monkeypatch.setattr(layout, "UNIT_ELEMENTS", 1)
    convert_checkpoint(source, tmp_path / "b", fmt="fp8", rest="fp8")  # every row of blocks decides for itself


# What is told


def test_no_measured_error_is_not_exact(tmp_path):
    """Weights that every format happens to hold are encoded like others, and this is what is told."""
    plain = qwen3_weights(CONFIG)
    for name in plain:
        if "_proj" in name or "lm_head" in name:
            plain[name].fill_(1)
    source = write_checkpoint(tmp_path / "plain", plain, CONFIG)
    code, out, _ = forked(tmp_path, source, "--fmt", "mxfp4", "-o", tmp_path / "mxfp4")
    assert code == 0 and "without loss" not in out and "mxfp4 0.00%" in out
    for fmt in ("mxfp4", "nvfp4", "fp8"):
        errors = Artifact(convert_checkpoint(source, tmp_path / fmt, fmt=fmt, force=True)).manifest.errors
        assert errors[GATE_UP]["rms"] < 1e-6 and not any("exact" in error for error in errors.values())
    # Nor is bf16, which holds all that mxfp4 does, but in what was measured.
    source = write_checkpoint(tmp_path / "packed", mxfp4(), CONFIG)
    errors = Artifact(convert_checkpoint(source, tmp_path / "bf16", fmt="bf16")).manifest.errors
    assert errors[GATE_UP] == {"rms": 0.0, "worst_expert": 0, "worst_rms": 0.0}


def test_the_command_counts_what_was_cast(tmp_path):
    source = write_checkpoint(tmp_path / "model", mxfp4(lambda name: ".experts.1.down" in name), CONFIG)
    code, out, _ = forked(tmp_path, source, "--fmt", "fp8", "--rest", "bf16", "-o", tmp_path / "out")
    assert code == 0 and "Cast from another format without loss: 1 tensors" in out and "fp8 " in out
    code, out, _ = forked(tmp_path, "inspect", tmp_path / "out")
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith("  ")}
    assert code == 0 and rows[GATE_UP] == "exact" and rows[DOWN].endswith("%")


@pytest.mark.parametrize("error", [
    {"rms": 0.1, "exact": True}, {"exact": True}, {"rms": 0.0, "exact": 1}, {"rms": 0.0, "exact": False}, {"rms": 0.0, "exact": "yes"},
    {"rms": "0", "exact": True}, {"rms": True}, [], None,
])  # fmt: skip
def test_reports_that_contradict_themselves(tmp_path, error):
    source = write_checkpoint(tmp_path / "model", mxfp4(), CONFIG)
    data = json.loads((convert_checkpoint(source, tmp_path / "out", fmt="fp8") / MANIFEST).read_text())
    assert Manifest.from_json(data).errors[GATE_UP] == EXACT
    data["errors"][GATE_UP] = error
    with pytest.raises(InputError, match="damaged"):
        Manifest.from_json(data)


# Products beyond float32


def set_at(weights: dict, name: str, values: dict) -> None:
    """Put bytes, or numbers, at places of tensors of a weight: suffix -> (index, value)."""
    for suffix, (index, value) in values.items():
        t = weights[f"{AT}1.up_proj.{suffix}"]
        t = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        t[index] = value


TOO_LARGE = [
    ("fp8-block-scale_inv", {"weight_scale_inv": ((1, 0), 1e38), "weight": ((200, 9), 0x7E)}, [1, 520, 9]),
    ("fp8-block-e8m0", {"scale": ((1, 0), 247), "weight": ((200, 9), 0xFE)}, [1, 520, 9]),
    ("fp8-channel", {"weight_scale": ((200, 0), 1e36), "weight": ((200, 9), 0x7E)}, [1, 520, 9]),
    ("mxfp8", {"weight_scale_inv": ((200, 1), 247), "weight": ((200, 41), 0x7E)}, [1, 520, 41]),
    ("mxfp4-ct", {"weight_scale": ((200, 2), 253), "weight_packed": ((200, 36), 0x70)}, [1, 520, 73]),
    ("mxfp4-v4", {"scale": ((200, 2), 254), "weight": ((200, 36), 0x16)}, [1, 520, 72]),
    ("nvfp4-modelopt", {"weight_scale_2": ((), 2e35), "weight_scale": ((200, 2), 0x7E), "weight": ((200, 20), 0x71)}, [1, 520, 41]),
    ("int4-ct", {"weight_scale": ((200, 2), 1e38), "weight_packed": ((200, 8), 0x88888880 - 2**32)}, [1, 520, 64]),
]


@pytest.mark.parametrize("unit", [None, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("layout_of, values, place", TOO_LARGE, ids=[case[0] for case in TOO_LARGE])
def test_finite_parts_whose_product_is_not(tmp_path, monkeypatch, layout_of, values, place, unit):
    """Passed through, such a weight would make every product infinite. Encoding refuses it in the same words."""
    if unit:
        monkeypatch.setattr(layout, "UNIT_ELEMENTS", unit)
    config = qwen3_config(quantization_config=LAYOUTS[layout_of][0], **SIZES)
    weights = to_layout(layout_of, qwen3_weights(config))
    quiet(weights, f"{AT}1.up_proj.")
    set_at(weights, layout_of, values)
    truth = meaning(layout_of, weights, AT + "1.up_proj")
    assert np.argwhere(~np.isfinite(truth)).tolist() == [[place[1] - 320, place[2]]]
    source = write_checkpoint(tmp_path / "model", weights, config)
    for fmt in ("source", "bf16", "nvfp4" if layout_of.startswith("mxfp4") else "mxfp4"):
        with pytest.raises(InputError) as caught:
            convert_checkpoint(source, tmp_path / "out", fmt=fmt)
        assert f"{GATE_UP} has a weight that is NaN or infinite at {place}: the checkpoint is" in str(caught.value), fmt


def quiet(weights: dict, base: str) -> None:
    """All elements of a weight 0, and of int4 too, so that no scale is too large for them."""
    for name, w in weights.items():
        if name.startswith(base) and name.removeprefix(base) in ("weight", "weight_packed"):
            w.view(torch.uint8).fill_(0x88 if w.dtype == torch.int32 else 0)


@pytest.mark.parametrize("layout_of, element, byte, value", [
    ("mxfp4-ct", 0x33, 254, 1.5 * 2.0**127), ("mxfp4-ct", 0x77, 252, 6 * 2.0**125), ("mxfp8", 0x7E, 246, 448 * 2.0**119),
])  # fmt: skip
def test_large_scales_are_kept_where_the_elements_allow_it(tmp_path, layout_of, element, byte, value):
    weights = to_layout(layout_of, qwen3_weights(CONFIG))
    data, scale = ("weight_packed", "weight_scale") if layout_of == "mxfp4-ct" else ("weight", "weight_scale_inv")
    weights[f"{AT}1.up_proj.{data}"].view(torch.uint8).fill_(element)
    weights[f"{AT}1.up_proj.{scale}"].fill_(byte)
    source = write_checkpoint(tmp_path / "model", weights, CONFIG)
    artifact = Artifact(convert_checkpoint(source, tmp_path / "out", fmt="source"))
    assert (decode(artifact.load(GATE_UP))[1, 320:] == value).all() and artifact.manifest.errors == {}
