"""Whole tensors against the oracle: shapes, segments, dtypes, layouts, dead and tiny blocks, pieces, bad input."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.quant.data import FORMAT_RULES, PACKED, SHAPES, weights
from tests.quant.oracle import check_decoded, check_encoded, codes_of, decode_matrix, nvfp4_global, scales_of

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import CODECS, NonFiniteError, amax_of, decode, encode, scale_rule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_legal(p: PackedTensor) -> None:
    """No NaN, infinity, zero or negative number among the scales, and no NaN among the elements."""
    scale = p.scale.view(torch.uint8) if p.scale.dtype == torch.float8_e4m3fn else p.scale
    if p.format.name == "mxfp4":
        assert scale.max() < 255
    elif p.format.name == "nvfp4":
        assert scale.min() > 0 and scale.max() < 0x7F
    else:
        assert scale.isfinite().all() and scale.min() > 0
        assert not (p.data.view(torch.uint8) & 0x7F == 0x7F).any()
    assert p.global_scale is None or (p.global_scale.isfinite().all() and p.global_scale.min() > 0)


def assert_same(a: PackedTensor, b: PackedTensor) -> None:
    """Equal part for part, byte for byte."""
    for suffix, part in a.parts().items():
        other = b.parts()[suffix]
        assert part is other or torch.equal(part.view(torch.uint8), other.view(torch.uint8)), suffix


@pytest.mark.parametrize("shape, segments", SHAPES)
@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_every_bit(fmt, rule, shape, segments):
    x = weights(shape)
    p = encode(x, FORMATS[fmt], segments, rule).tensor
    assert p.segments == (segments or (shape[-2],))
    check_encoded(p, x, rule)
    check_legal(p)
    check_decoded(decode(p), p)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_every_bit_of_half_precision_input(fmt, rule, dtype):
    x = weights((2, 40, 200), dtype)
    check_encoded(encode(x, FORMATS[fmt], rule=rule).tensor, x, rule)


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_formats_round_once(fmt, dtype):
    x = torch.cat([weights((5, 7), dtype), torch.full((1, 7), torch.finfo(dtype).max, dtype=dtype)])
    p = encode(x, FORMATS[fmt]).tensor
    want = FORMATS[fmt].dtype
    limit = torch.finfo(want).max
    assert torch.equal(p.data, x.double().clamp(-limit, limit).to(want))
    assert torch.equal(decode(p), p.data.float())


@pytest.mark.parametrize("fmt", PACKED)
def test_layout_of_the_input_does_not_matter(fmt):
    x = weights((2, 48, 160))
    want = encode(x, FORMATS[fmt]).tensor
    wide = torch.empty(2, 48, 320)
    wide[..., ::2] = x
    for view in (x.mT.contiguous().mT, wide[..., ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not view.is_contiguous()
        assert_same(encode(view, FORMATS[fmt]).tensor, want)


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_dead_blocks_and_experts(fmt, rule):
    """Zero blocks beside ones, a zero expert, zero rows, and a tensor of zeros decode to zeros under legal scales."""
    x = torch.ones(3, 129, 160)
    x[0, :128, :128] = x[0, 128, 32:64] = x[1] = x[2, 5] = 0.0
    p = encode(x, FORMATS[fmt], rule=rule).tensor
    check_legal(p)
    values = decode(p)
    assert torch.equal(values == 0, x == 0)
    torch.testing.assert_close(values, x, rtol=1e-6 if fmt != "mxfp4" else 0, atol=0)
    assert not codes_of(p.expert(1)).any()
    zeros = encode(torch.zeros(2, 3, 17), FORMATS[fmt], rule=rule)
    check_legal(zeros.tensor)
    assert not decode(zeros.tensor).any() and not zeros.error.any() and not zeros.energy.any()


@pytest.mark.parametrize("rule", CODECS["nvfp4"].RULES)
def test_tiny_blocks_keep_a_scale(rule):
    """Beside 1.0 the smallest block scale is 2^-9/2688: 1e-6 survives, 1e-7 is nearest to zero, no scale is zero."""
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16:32], x[0, 32:48] = 1.0, 1e-6, 1e-7
    p = encode(x, FORMATS["nvfp4"], rule=rule).tensor
    check_legal(p)
    values = decode(p)[0]
    torch.testing.assert_close(values[16:32], x[0, 16:32], rtol=0.1, atol=0)
    assert values[0] == 1.0 and (values[32:] <= 2e-7).all()


def test_padding_decodes_to_zero():
    for fmt in ("mxfp4", "nvfp4"):
        p = encode(weights((5, 33)) - 1, FORMATS[fmt]).tensor
        assert not codes_of(p)[:, 33:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", [*PACKED, "bf16"])
@pytest.mark.parametrize(
    "shape, index",
    [
        pytest.param((5, 7), (0, 0), id="first"),
        pytest.param((5, 7), (4, 6), id="last-beside-padding"),
        pytest.param((130, 33), (129, 32), id="alone-in-a-block-of-padding"),
        pytest.param((300, 500), (299, 3), id="not-in-the-first-tile"),
        pytest.param((3, 5, 33), (0, 0, 0), id="first-expert"),
        pytest.param((3, 5, 33), (2, 3, 32), id="last-expert"),
    ],
)
def test_non_finite_input_is_named(fmt, shape, index, value):
    x = weights(shape, torch.bfloat16)
    x[index] = value
    with pytest.raises(NonFiniteError) as caught:
        encode(x, FORMATS[fmt])
    assert caught.value.index == index
    x[(*index[:-2], -1, -1)] = value
    with pytest.raises(NonFiniteError) as caught:
        encode(x, FORMATS[fmt])
    assert caught.value.index == index  # still the first


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_losses_are_those_of_the_decoded_values(fmt, rule):
    x = weights((3, 70, 200), torch.bfloat16)
    x[1] = 0.0
    result = encode(x, FORMATS[fmt], rule=rule)
    assert result.error.dtype == result.energy.dtype == torch.float64
    for e in range(3):
        values = decode_matrix(result.tensor.expert(e))
        exact = x[e].double().numpy()
        assert result.error[e].item() == pytest.approx(np.square(values - exact).sum(), rel=1e-5, abs=0)
        assert result.energy[e].item() == pytest.approx(np.square(exact).sum(), rel=1e-5, abs=0)
    alone = encode(x[2], FORMATS[fmt], rule=rule)
    assert alone.error.tolist() == [result.error[2].item()]


SHIFTS = [-90, -70, -50, 50, 70, 90]
"""Powers of two: where squares vanish in float32, where they begin to, and where they overflow."""


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("fmt, rule", [*FORMAT_RULES, ("bf16", None)])
def test_losses_of_very_small_and_large_weights(fmt, rule, shift):
    x = torch.ldexp(weights((2, 140, 200)), torch.tensor(shift))
    x[1, :70] = torch.ldexp(x[1, :70], torch.tensor(-shift))  # usual ones beside them
    result = encode(x, FORMATS[fmt], rule=rule)
    for e in range(2):
        values = decode(result.tensor.expert(e)).double().numpy()
        exact = x[e].double().numpy()
        assert result.error[e].item() == pytest.approx(np.square(values - exact).sum(), rel=1e-5, abs=0)
        assert result.energy[e].item() == pytest.approx(np.square(exact).sum(), rel=1e-5, abs=0)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_powers_of_two_change_only_scales(fmt, rule, shift):
    """Every element and every choice is that of weights of usual size."""
    x = weights((140, 200))
    shifted = torch.ldexp(x, torch.tensor(shift))
    assert torch.equal(torch.ldexp(shifted, torch.tensor(-shift)), x)  # nothing of it was lost
    usual, found = encode(x, FORMATS[fmt], rule=rule), encode(shifted, FORMATS[fmt], rule=rule)
    assert torch.equal(found.tensor.data.view(torch.uint8), usual.tensor.data.view(torch.uint8))
    if fmt == "mxfp4":
        live = decode(usual.tensor).view(140, -1, 8).ne(0).any(-1)  # of a block of zeros the scale is the least, and stays
        live = torch.nn.functional.pad(live, (0, 3)).view(140, -1, 4).any(-1)
        assert torch.equal(found.tensor.scale[live].int(), usual.tensor.scale[live].int() + shift)
    elif fmt == "nvfp4":
        assert torch.equal(found.tensor.scale.view(torch.uint8), usual.tensor.scale.view(torch.uint8))
        assert torch.equal(found.tensor.global_scale, torch.ldexp(usual.tensor.global_scale, torch.tensor(shift)))
    else:
        assert torch.equal(found.tensor.scale, torch.ldexp(usual.tensor.scale, torch.tensor(shift)))
    assert found.error.item() == pytest.approx(usual.error.item() * 4.0**shift, rel=1e-5, abs=0)


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
@pytest.mark.parametrize("segments", [(300,), (170, 130)], ids=["one-segment", "two-that-end-inside-fp8-blocks"])
def test_pieces_equal_the_whole_whatever_the_threads(fmt, rule, segments):
    """Big enough for several tiles, and for torch to divide its work. Global scales are given to the pieces."""
    x = weights((2, 300, 500), torch.bfloat16)
    torch.set_num_threads(2)
    whole = encode(x, FORMATS[fmt], segments, rule)
    torch.set_num_threads(1)
    again = encode(x, FORMATS[fmt], segments, rule)
    assert_same(whole.tensor, again.tensor)
    assert torch.equal(whole.error, again.error) and torch.equal(whole.energy, again.energy)

    globals_ = whole.tensor.global_scale
    experts = [encode(x[e : e + 1], FORMATS[fmt], segments, rule) for e in range(2)]
    for suffix, part in whole.tensor.parts().items():
        if part is not None:
            pieces = torch.cat([e.tensor.parts()[suffix].view(torch.uint8) for e in experts])
            assert torch.equal(pieces, part.view(torch.uint8)), suffix
    assert torch.equal(torch.cat([e.error for e in experts]), whole.error)

    error, target = 0.0, whole.tensor.expert(1)
    for start, tile in target.row_tiles(128):
        segment = int(start >= segments[0])
        scale = None if globals_ is None else globals_[1, segment : segment + 1]
        piece = encode(x[1, start : start + tile.shape[0]], FORMATS[fmt], rule=rule, global_scale=scale)
        assert_same(piece.tensor, tile)
        error += piece.error.item()
    assert error == pytest.approx(whole.error[1].item(), rel=1e-12)


def test_global_scale_is_one_for_all_segments_of_an_expert_unless_given():
    x = weights((2, 6, 40))
    x[1] *= 8
    p = encode(x, FORMATS["nvfp4"], (2, 4)).tensor
    want = [[nvfp4_global(x[e].abs().max().item())] * 2 for e in range(2)]
    assert p.global_scale.tolist() == want
    given = torch.tensor([[1e-4, 2e-4], [3e-4, 4e-4]])
    p = encode(x, FORMATS["nvfp4"], (2, 4), global_scale=given).tensor
    assert torch.equal(p.global_scale, given)
    check_encoded(p, x, "lsq")


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of(dtype):
    x = weights((3, 5, 7), dtype)
    x[1, 2, 3] = -9.0
    want = torch.tensor([m.abs().max().item() for m in x])
    assert torch.equal(amax_of(x), want) and torch.equal(amax_of(x[1]), want[1])
    assert amax_of(torch.zeros(2, 0, 7)).tolist() == [0, 0] and amax_of(torch.zeros(0, 4)).item() == 0
    x[2, 4, 6] = float("nan")
    assert amax_of(x).isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("fmt", [*PACKED, "bf16"])
@pytest.mark.parametrize("shape", [(0, 40), (0, 4, 40)], ids=["no-rows", "no-experts"])
def test_nothing_packs_to_nothing(fmt, shape):
    result = encode(torch.zeros(shape), FORMATS[fmt])
    assert decode(result.tensor).shape == shape and not result.error.any()


def test_unknown_rule():
    assert scale_rule(FORMATS["mxfp4"], None) == scale_rule(FORMATS["nvfp4"], None) == "lsq"
    assert scale_rule(FORMATS["fp8"], None) == "amax"
    with pytest.raises(InputError, match="mxfp4 has no scale rule 'amax': choose one of lsq, floor, even, ceil"):
        encode(torch.ones(1, 1), FORMATS["mxfp4"], rule="amax")


PEAK = """
import torch
torch.set_num_threads(1)
from tutel_pack.formats import FORMATS
from tutel_pack.quant.codec import decode, encode

def peak(call):
    base = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    result = call()
    return result, status("VmHWM") - base

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

x = torch.empty(2, 2048, 4096, dtype=torch.bfloat16).uniform_(-1, 1)
for fmt in ("mxfp4", "nvfp4", "fp8"):
    decode(encode(x[:, :128, :256], FORMATS[fmt]).tensor, torch.bfloat16)
    result, used = peak(lambda: encode(x, FORMATS[fmt]))
    print(fmt, "encode", used - result.tensor.nbytes)
    values, used = peak(lambda: decode(result.tensor, torch.bfloat16))
    print(fmt, "decode", used - values.nbytes)
    del result, values
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_temporaries_do_not_grow_with_the_tensor():
    """32 MiB of BF16: beside the result, encoding and decoding take less than 12 MiB."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    for line in run.stdout.splitlines():
        assert int(line.split()[-1]) < 12 << 20, run.stdout

