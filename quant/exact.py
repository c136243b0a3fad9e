"""Casts from mxfp4 that lose nothing: its scales are powers of two, which the wider formats hold if they do not lie too far apart."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import DATA, FORMATS, GLOBAL, SCALE, Format, PackedTensor
from tutel_pack.quant import e2m1
from tutel_pack.quant.mxfp4 import BLOCK

_BIAS = 127
_ROWS, _COLUMNS = FORMATS["fp8"].block
_LOWEST, _HIGHEST = -118, 125
"""Of the largest exponent: 6 · 2^125 is finite in float32, and the scales made from 2^−118 are normal numbers."""
_DEAD = 1 << 10
"""Beyond any exponent: of blocks of zeros, for which every scale is right."""


def cast(pieces: list[PackedTensor], fmt: Format) -> list[PackedTensor] | None:
    """The segments of one expert, mxfp4 [n, K] each, in another format with the same values bit for bit.

    None where that cannot be. nvfp4 takes block exponents k down to kmax − 17, with one global scale for all segments;
    fp8 in blocks of 128 × 128 down to kmax − 14 within a block. (ModelOpt's conditions, quantization/utils/numeric_utils.py.)
    """
    if any(p.format != FORMATS["mxfp4"] for p in pieces) or fmt not in (FORMATS["nvfp4"], FORMATS["fp8"]):
        return None
    return _to_nvfp4(pieces) if fmt.has_global else _to_fp8(pieces)


def _exponents(p: PackedTensor) -> tuple[Tensor, Tensor]:
    """(int32 exponents [n, K/32], whether a block holds anything but zeros)."""
    blocks = p.data.reshape(*p.scale.shape, BLOCK // 2)
    return p.scale.to(torch.int32) - _BIAS, (blocks & 0x77 != 0).any(-1)


def _to_nvfp4(pieces: list[PackedTensor]) -> list[PackedTensor] | None:
    found = [_exponents(p) for p in pieces]
    used = torch.cat([k[live] for k, live in found])
    highest = int(used.max()) if len(used) else 0
    if len(used) and not (_LOWEST <= highest <= _HIGHEST and highest - int(used.min()) <= 17):
        return None
    cast = []
    for p, (k, _) in zip(pieces, found):
        n, width = p.shape
        grid = FORMATS["nvfp4"].grid((n,), width)
        # A block of 32 becomes two of 16; blocks of zeros may have any scale.
        scale = _power(k - highest + 8, -9, 8).repeat_interleave(2, dim=1)[:, : grid[1]].to(torch.float8_e4m3fn)
        parts = {DATA: p.data[:, : grid[1] * 8], SCALE: scale, GLOBAL: torch.tensor([2.0 ** (highest - 8)])}
        cast.append(PackedTensor.from_parts(FORMATS["nvfp4"], p.shape, p.segments, parts))
    return cast


def _power(exponent: Tensor, low: int, high: int) -> Tensor:
    """float32 2^exponent of int32 exponents, which are clamped first."""
    return ((exponent.clamp(low, high) + _BIAS) << 23).view(torch.float32)


def _to_fp8(pieces: list[PackedTensor]) -> list[PackedTensor] | None:
    cast = [_piece_to_fp8(p) for p in pieces]
    return None if any(p is None for p in cast) else cast


def _piece_to_fp8(p: PackedTensor) -> PackedTensor | None:
    tiles = []
    for _, tile in p.row_tiles(_ROWS):
        if (found := _tile_to_fp8(tile)) is None:
            return None
        tiles.append(found)
    data, scale = (torch.cat(parts) for parts in zip(*tiles))
    return PackedTensor.from_parts(FORMATS["fp8"], p.shape, p.segments, {DATA: data, SCALE: scale})


def _tile_to_fp8(p: PackedTensor) -> tuple[Tensor, Tensor] | None:
    """(data, scale) of one row of blocks."""
    k, live = _exponents(p)
    highest = _over_blocks(k.masked_fill(~live, -_DEAD), -_DEAD).amax((1, 3))
    lowest = _over_blocks(k.masked_fill(~live, _DEAD), _DEAD).amin((1, 3))
    used = highest > -_DEAD
    fits = (highest - lowest <= 14) & (highest >= _LOWEST) & (highest <= _HIGHEST)
    if not fits[used].all():
        return None
    highest = torch.where(used, highest, 0)
    of_block = highest.repeat_interleave(_ROWS, 0)[: len(k)].repeat_interleave(_COLUMNS // BLOCK, 1)[:, : k.shape[1]]
    values = e2m1.unpack(p.data, torch.float32).view(*k.shape, BLOCK) * _power(k - of_block + 6, -8, 6).unsqueeze(-1)
    data = values.view(len(k), -1)[:, : p.shape[1]].to(torch.float8_e4m3fn)
    return data, _power(highest - 6, _LOWEST - 6, _HIGHEST - 6)


def _over_blocks(k: Tensor, filler: int) -> Tensor:
    """[n, K/32] -> [block rows, 128, block columns, 4] of the fp8 grid, filled up at ragged edges."""
    per_block = _COLUMNS // BLOCK
    padded = torch.nn.functional.pad(k, (0, -k.shape[1] % per_block, 0, -k.shape[0] % _ROWS), value=filler)
    return padded.view(padded.shape[0] // _ROWS, _ROWS, padded.shape[1] // per_block, per_block)
