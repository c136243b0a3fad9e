"""The geometry of the packed formats: shapes of parts, sizes, where tiles may be cut."""

from __future__ import annotations

import math

import pytest
import torch
from tests.quant.data import PACKED, SHAPES

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor, get_format


@pytest.mark.parametrize("shape, segments", SHAPES)
def test_parts(shape, segments):
    """Sizes from the law: K in whole blocks for sub-byte elements, a block row ends with its segment."""
    segments = segments or (shape[-2],)
    *lead, n, k = shape
    for fmt, element_bits, (rows, columns) in (("fp8", 8, (128, 128)), ("mxfp4", 4, (1, 32)), ("nvfp4", 4, (1, 16))):
        parts = FORMATS[fmt].parts(shape, segments)
        stored = k if fmt == "fp8" else math.ceil(k / columns) * columns
        grid = sum(math.ceil(s / rows) for s in segments), math.ceil(k / columns)
        assert parts[""][1] == (*lead, n, stored * element_bits // 8)
        assert parts["_scale"][1] == (*lead, *grid)
        assert parts.get("_scale_2") == ((torch.float32, (*lead, len(segments))) if fmt == "nvfp4" else None)
        scale_bytes = {"fp8": 4, "mxfp4": 1, "nvfp4": 1}[fmt]
        globals_bytes = 4 * len(segments) if fmt == "nvfp4" else 0
        matrix_bytes = n * stored * element_bits // 8 + scale_bytes * math.prod(grid) + globals_bytes
        assert FORMATS[fmt].nbytes(shape, segments) == math.prod(lead) * matrix_bytes
        assert PackedTensor.empty(FORMATS[fmt], shape, segments).nbytes == math.prod(lead) * matrix_bytes


@pytest.mark.parametrize("rows", [1, 7, 64, 128, 200, 10_000])
@pytest.mark.parametrize(
    "segments",
    [
        pytest.param((300,), id="ragged"),
        pytest.param((170, 130), id="second-starts-inside-a-block"),
        pytest.param((1, 128, 129), id="one-row-one-block-one-more"),
        pytest.param((0, 5), id="empty-segment"),
    ],
)
@pytest.mark.parametrize("fmt", PACKED)
def test_row_tiles_cover_every_row_once_on_block_edges(fmt, segments, rows):
    p = PackedTensor.empty(FORMATS[fmt], (sum(segments), 48), segments)
    p.data.view(torch.uint8).zero_()
    p.scale.view(torch.uint8).zero_()
    if p.global_scale is not None:
        p.global_scale.copy_(torch.arange(len(segments)))
    starts = [sum(segments[:s]) for s in range(len(segments))]
    next_row, scale_rows = 0, 0
    for start, tile in p.row_tiles(rows):
        segment = max(s for s in range(len(segments)) if starts[s] <= start and segments[s])
        assert start == next_row and tile.shape[0] <= max(rows, p.block_rows)
        assert (start - starts[segment]) % p.block_rows == 0
        assert tile.global_scale is None or tile.global_scale.item() == segment
        tile.data.view(torch.uint8).add_(1)  # views of p: every byte is met once
        tile.scale.view(torch.uint8).add_(1)
        next_row, scale_rows = start + tile.shape[0], scale_rows + len(tile.scale)
    assert next_row == p.shape[0] and scale_rows == len(p.scale)
    assert (p.data.view(torch.uint8) == 1).all() and (p.scale.view(torch.uint8) == 1).all()


def test_experts_are_views():
    p = PackedTensor.empty(FORMATS["nvfp4"], (3, 4, 40), (2, 2))
    p.global_scale.fill_(1.0)
    p.expert(1).global_scale.fill_(5.0)
    assert p.global_scale.tolist() == [[1, 1], [5, 5], [1, 1]]
    assert p.expert(2).data.data_ptr() == p.data[2].data_ptr()
    assert PackedTensor.from_parts(p.format, p.shape, p.segments, p.parts()).parts().keys() == p.parts().keys()


def test_loud_about_parts_that_do_not_fit():
    p = PackedTensor.empty(FORMATS["nvfp4"], (4, 40), (4,))
    for suffix, part in (
        ("", p.data[:, 1:]),
        ("_scale", p.scale.view(torch.uint8)),
        ("_scale", None),
        ("_scale_2", p.global_scale.double()),
        ("_scale_2", p.global_scale[0]),
    ):
        with pytest.raises(InputError, match="needs its part"):
            PackedTensor.from_parts(p.format, p.shape, p.segments, {**p.parts(), suffix: part})
    with pytest.raises(InputError, match="needs its part 'data' as torch.uint8"):
        PackedTensor.from_parts(p.format, (4, 50), p.segments, p.parts())
    with pytest.raises(AssertionError, match="do not add up"):
        PackedTensor.from_parts(p.format, p.shape, (3,), p.parts())


def test_unknown_format():
    with pytest.raises(InputError, match="Unknown format 'fp4': choose one of fp8, mxfp4, nvfp4"):
        get_format("fp4")
