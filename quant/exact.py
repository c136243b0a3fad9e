"""Casts from mxfp4 that lose nothing: its scales are powers of two, which the wider formats hold if they do not lie too far apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tutel_pack.formats import DATA, FORMATS, GLOBAL, SCALE, PackedTensor
from tutel_pack.quant import e2m1
from tutel_pack.quant.mxfp4 import BLOCK

Span = tuple[int, int]
"""The lowest and the highest exponent of the block scales in use; of nothing but zeros the highest is the lower."""

_BIAS = 127
_ROWS, _COLUMNS = FORMATS["fp8"].block
_LOWEST, _HIGHEST = -118, 125
"""Of the largest exponent: 6 · 2^125 is finite in float32, and the scales made from 2^−118 are normal numbers."""
_DEAD = 1 << 10
"""Beyond any exponent: of blocks of zeros, for which every scale is right."""


def span(p: PackedTensor) -> Span:
    """The Span of an mxfp4 [n, K]."""
    k, live = _exponents(p)
    used = k[live]
    return (int(used.min()), int(used.max())) if len(used) else (_DEAD, -_DEAD)


def global_scale(spans: Iterable[Span]) -> Tensor | None:
    """float32 [1]: the nvfp4 global scale with which mxfp4 of these spans can be cast. None where there is none.

    It takes block exponents k down to kmax − 17. (ModelOpt's condition, quantization/utils/numeric_utils.py.)
    """
    lows, highs = zip(*spans)
    lowest, highest = min(lows), max(highs)
    if highest < lowest:
        return torch.ones(1)
    possible = _LOWEST <= highest <= _HIGHEST and highest - lowest <= 17
    return torch.tensor([2.0 ** (highest - 8)]) if possible else None


def to_nvfp4(p: PackedTensor, scale: Tensor) -> PackedTensor:
    """mxfp4 [n, K] as nvfp4 with the same values bit for bit. scale: a `global_scale` of spans that hold p's."""
    fmt, (n, width) = FORMATS["nvfp4"], p.shape
    grid = fmt.grid((n,), width)
    # A block of 32 becomes two of 16; blocks of zeros may have any scale.
    k = _exponents(p)[0] - (int(scale.view(torch.int32)) >> 23) + _BIAS
    blocks = _power(k, -9, 8).repeat_interleave(2, dim=1)[:, : grid[1]].to(torch.float8_e4m3fn)
    parts = {DATA: p.data[:, : grid[1] * 8], SCALE: blocks, GLOBAL: scale}
    return PackedTensor.from_parts(fmt, p.shape, p.segments, parts)


def to_fp8(p: PackedTensor) -> PackedTensor | None:
    """mxfp4 [n, K] as fp8 with the same values bit for bit. None where a block of 128 × 128 cannot hold them.

    It takes exponents down to kmax − 14. (ModelOpt's condition, quantization/utils/numeric_utils.py.)
    """
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
    parts = {DATA: data, SCALE: _power(highest - 6, _LOWEST - 6, _HIGHEST - 6)}
    return PackedTensor.from_parts(FORMATS["fp8"], p.shape, p.segments, parts)


def _exponents(p: PackedTensor) -> tuple[Tensor, Tensor]:
    """(int32 exponents [n, K/32], whether a block holds anything but zeros)."""
    blocks = p.data.reshape(*p.scale.shape, BLOCK // 2)
    return p.scale.to(torch.int32) - _BIAS, (blocks & 0x77 != 0).any(-1)


def _power(exponent: Tensor, low: int, high: int) -> Tensor:
    """float32 2^exponent of int32 exponents, which are clamped first."""
    return ((exponent.clamp(low, high) + _BIAS) << 23).view(torch.float32)


def _over_blocks(k: Tensor, filler: int) -> Tensor:
    """[n, K/32] -> [block rows, 128, block columns, 4] of the fp8 grid, filled up at ragged edges."""
    per_block = _COLUMNS // BLOCK
    padded = torch.nn.functional.pad(k, (0, -k.shape[1] % per_block, 0, -k.shape[0] % _ROWS), value=filler)
    return padded.view(padded.shape[0] // _ROWS, _ROWS, padded.shape[1] // per_block, per_block)
