"""Formats that come only from sources: int4, and fp8 in other geometries and with e8m0 scales; and casts that lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.quant.oracle import E4M3, E8M0, decode_matrix

from tutel_pack.artifact import Entry
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant import exact
from tutel_pack.quant.codec import decode, encode


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def filled(fmt, shape, segments, generator) -> PackedTensor:
    """Random bytes of every kind, scales included."""
    p = PackedTensor.empty(fmt, shape, segments)
    codes = torch.randint(0, 256, p.data.shape, generator=generator, dtype=torch.uint8)
    if fmt.name == "fp8":
        codes = codes.masked_fill(codes & 127 == 127, 0)
    p.data.view(torch.uint8).copy_(codes)
    if p.scale.dtype == torch.uint8:
        p.scale.copy_(torch.randint(0, 240, p.scale.shape, generator=generator))
        p.scale.view(-1)[0] = 0
    else:
        p.scale.copy_(torch.rand(p.scale.shape, generator=generator) + 0.5)
    return p


# int4


@pytest.mark.parametrize("shape, segments", [((3, 33), (3,)), ((2, 70, 96), (40, 30)), ((1, 1), (1,)), ((5, 2880), (5,))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_decodes_by_its_law(generator, shape, segments, dtype):
    p = filled(FORMATS["int4"], shape, segments, generator)
    data = p.data.numpy().astype(int)
    codes = np.stack([data % 16, data // 16], -1).reshape(*data.shape[:-1], -1)
    elements = np.where(codes > 7, codes - 16, codes)[..., : shape[-1]]
    scale = p.scale.double().numpy().repeat(32, -1)[..., : shape[-1]]
    assert torch.equal(decode(p, dtype), torch.from_numpy(elements * scale).to(dtype))  # exact in float32, so rounded once
    assert elements.min() < 0 or shape == (1, 1)


def test_every_int4_code():
    p = PackedTensor.empty(FORMATS["int4"], (1, 32), (1,))
    p.data.copy_(torch.arange(16, dtype=torch.uint8) * 17)
    p.scale.fill_(1.0)
    assert decode(p)[0, ::2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]
    p.data.fill_(0x21)
    assert decode(p)[0, :2].tolist() == [1, 2]  # the low nibble is the even column


def test_nothing_is_encoded_to_int4():
    with pytest.raises(InputError, match="Nothing can be packed to int4: it is kept where the source has it"):
        encode(torch.ones(2, 32), FORMATS["int4"])


# fp8 as sources have it

GEOMETRIES = [
    pytest.param((1, 300), torch.float32, id="per-row"),
    pytest.param((576, 300), torch.float32, id="whole-tensor"),
    pytest.param((1, 32), torch.uint8, id="mxfp8"),
    pytest.param((32, 32), torch.uint8, id="32x32-e8m0"),
    pytest.param((128, 128), torch.uint8, id="128x128-e8m0"),
    pytest.param((128, 128), torch.float32, id="ours"),
]


@pytest.mark.parametrize("segments", [(576,), (300, 276)], ids=str)
@pytest.mark.parametrize("block, scale_dtype", GEOMETRIES)
def test_fp8_decodes_in_any_geometry(generator, block, scale_dtype, segments):
    p = filled(FORMATS["fp8"].with_scale(block, scale_dtype), (576, 300), segments, generator)
    values = E8M0[p.scale.numpy()] if scale_dtype == torch.uint8 else p.scale.double().numpy()
    starts = [0, segments[0]]
    expected = np.empty((576, 300))
    for row in range(576):
        s = int(row >= segments[0])
        grid = sum(-(-n // block[0]) for n in segments[:s]) + (row - starts[s]) // block[0]
        expected[row] = E4M3[p.data[row].view(torch.uint8).numpy()] * values[grid].repeat(block[1])[:300]
    assert torch.equal(decode(p), torch.from_numpy(expected.astype(np.float32)))
    # Tiles of any height give the same, each of them within its limit.
    for rows in (1, 50, 128, 1000):
        found = torch.cat([decode(tile) for _, tile in p.row_tiles(rows)])
        assert torch.equal(found, decode(p))
        assert max(len(tile.data) for _, tile in p.row_tiles(rows)) <= max(rows, min(block[0], 128))


@pytest.mark.parametrize("block, scale_dtype", GEOMETRIES)
def test_an_entry_tells_the_geometry(block, scale_dtype):
    fmt = FORMATS["fp8"].with_scale(block, scale_dtype)
    entry = Entry("f", (576, 300), fmt, (576,))
    data = entry.to_json()
    assert data["block"] == list(block) and data["scale_dtype"] == {torch.uint8: "U8", torch.float32: "F32"}[scale_dtype]
    assert Entry.from_json(data) == entry
    int4 = Entry("f", (4, 64), FORMATS["int4"], (4,))
    assert Entry.from_json(int4.to_json()) == int4


@pytest.mark.parametrize("changes", [
    {"scale_dtype": "F64"}, {"scale_dtype": "BF16"}, {"scale_dtype": "X"}, {"scale_dtype": 1}, {"block": [1, 301]}, {"block": [577, 1]},
    {"block": [0, 1]}, {"format": "mxfp4"}, {"format": "int4"}, {"format": "nvfp4"}, {"block": None},
])  # fmt: skip
def test_entries_that_no_format_has(changes):
    good = Entry("f", (576, 300), FORMATS["fp8"].with_scale((1, 300), torch.uint8), (576,)).to_json()
    with pytest.raises((InputError, ValueError, KeyError, TypeError)):
        Entry.from_json(good | changes)


# Casts without loss


def mx(exponents: torch.Tensor, generator, width: int | None = None) -> PackedTensor:
    """mxfp4 whose block exponents are these, with random elements, of which none makes a block of zeros."""
    n, blocks = exponents.shape
    p = PackedTensor.empty(FORMATS["mxfp4"], (n, width or blocks * 32), (n,))
    p.data.copy_(torch.randint(0, 256, p.data.shape, generator=generator))
    p.data.view(n, blocks, 16)[..., 0] = 0x71  # the smallest element and the largest
    p.scale.copy_(exponents + 127)
    return p


def spread_of(n: int, blocks: int, low: int, high: int, generator) -> torch.Tensor:
    exponents = torch.randint(low, high + 1, (n, blocks), generator=generator)
    exponents[0, 0], exponents[-1, -1] = low, high
    return exponents


def same(found: list[PackedTensor], pieces: list[PackedTensor]) -> bool:
    return all(torch.equal(decode(f).view(torch.int32), decode(p).view(torch.int32)) for f, p in zip(found, pieces, strict=True))


def cast(pieces: list[PackedTensor], fmt: str) -> list[PackedTensor] | None:
    """The segments of one expert in another format; None if one of them cannot be cast."""
    if fmt == "fp8":
        found = [exact.to_fp8(p) for p in pieces]
        return None if None in found else found
    scale = exact.global_scale(exact.span(p) for p in pieces)
    return None if scale is None else [exact.to_nvfp4(p, scale) for p in pieces]


@pytest.mark.parametrize("fmt, span", [("nvfp4", 17), ("fp8", 14)])
@pytest.mark.parametrize("top", [-100, -4, 100])
@pytest.mark.parametrize("n, blocks", [(5, 3), (130, 6)])
def test_casts_are_exact_as_far_as_the_exponents_allow(generator, fmt, span, top, n, blocks):
    gate, up = (mx(spread_of(n, blocks, top - span, top, generator), generator) for _ in range(2))
    found = cast([gate, up], fmt)
    assert [p.format for p in found] == [FORMATS[fmt]] * 2 and same(found, [gate, up])
    if fmt == "nvfp4":
        assert found[0].global_scale == found[1].global_scale == 2.0 ** (top - 8)
    for p in found:  # by the oracle too
        assert torch.equal(torch.from_numpy(decode_matrix(p)).float(), decode(p))


@pytest.mark.parametrize("fmt, span", [("nvfp4", 18), ("fp8", 15)])
def test_one_step_further_is_no_cast(generator, fmt, span):
    p = mx(spread_of(5, 3, -span, 0, generator), generator)
    assert cast([p], fmt) is None


def test_segments_share_one_range_in_nvfp4_and_have_their_own_in_fp8(generator):
    gate, up = mx(torch.full((4, 4), 0), generator), mx(torch.full((4, 4), -18), generator)
    assert cast([gate, up], "nvfp4") is None
    assert same(cast([gate, up], "fp8"), [gate, up])


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_blocks_of_zeros_have_no_say(generator, fmt):
    p = mx(torch.zeros(3, 4, dtype=torch.int64), generator)
    p.data.view(3, 4, 16)[0, 1] = 0
    p.data.view(3, 4, 16)[0, 2] = 0x88  # zeros with a sign
    p.scale[0, 1], p.scale[0, 2] = 0, 254
    found = cast([p], fmt)
    assert same(found, [p]) and found[0].scale.float().isfinite().all()
    p.data.zero_()
    found = cast([p], fmt)
    assert same(found, [p]) and found[0].scale.float().isfinite().all()


def test_ragged_widths_are_cast_too(generator):
    p = mx(spread_of(3, 2, -5, 0, generator), generator, width=40)
    p.data[:, 20:] = 0
    for fmt in ("nvfp4", "fp8"):
        assert same(cast([p], fmt), [p])


@pytest.mark.parametrize("exponent", [-127, -119, 126, 127])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_scales_at_the_ends_of_float32_are_left_to_the_codec(generator, fmt, exponent):
    assert cast([mx(torch.full((2, 2), exponent), generator)], fmt) is None


def test_casting_beats_encoding(generator):
    """What the cast is for: encoding the same values anew loses some."""
    p = mx(spread_of(128, 4, -14, 0, generator), generator)
    assert not torch.equal(decode(encode(decode(p), FORMATS["fp8"]).tensor), decode(p))
