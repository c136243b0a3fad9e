"""fp8: float8 e4m3fn elements in blocks, usually 128 × 128, with one float32 scale each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant.mxfp4 import e8m0
from tutel_pack.quant.rounding import Sums, e4m3_values, round_, squared_sums, tree_sum_, unit_of, without_units

RULES = ("amax", "lsq")
"""amax: amax/448.  lsq: the best of 12 scales amax/448 · 2^(j/12), one period of e4m3's binades."""

_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-6
_TINY = torch.finfo(torch.float32).tiny
_CANDIDATES = 12
_STRIP = 1 << 17
"""Elements searched at a time, see codec.py."""


def encode_tile(x: Tensor, tile: PackedTensor, rule: str, measure: bool) -> Sums:
    """Fill `tile` from x [n, K]. Returns the Sums of its blocks."""
    rows, columns = tile.format.block
    step = max(1, _STRIP // (rows * columns))
    sums = []
    for row in range(tile.scale.shape[0]):
        for first in range(0, tile.scale.shape[1], step):
            place = slice(row * rows, (row + 1) * rows), slice(first * columns, (first + step) * columns)
            strip_scale = tile.scale[row, first : first + step]
            sums.append(_encode_strip(x[place], tile.data[place], strip_scale, (rows, columns), rule, measure))
    amaxes, errors, energies = zip(*sums)
    amax = torch.cat(amaxes)
    if not measure:
        return amax, None, None
    error, energy = _over_columns(torch.cat([*errors, *energies]), columns).chunk(2)
    return amax, without_units(error, unit := unit_of(amax)), without_units(energy, unit)


def _over_columns(sums: Tensor, columns: int) -> Tensor:
    """[blocks · columns] -> [blocks], tree sums."""
    return tree_sum_(sums.view(-1, columns).T.contiguous())


def _encode_strip(
    x: Tensor, data: Tensor, scale: Tensor, block: tuple[int, int], rule: str, measure: bool
) -> Sums:
    """Fill data [n, k] and scale [blocks] from some neighbours of a row of blocks. Error and energy are of columns, and in
    the units of their blocks."""
    search = _BlockSearch(x, block)
    candidates = [(search.amax / _MAX).clamp(min=_TINY)]
    candidates += [candidates[0] * 2.0 ** (j / _CANDIDATES) for j in range(1, _CANDIDATES if rule == "lsq" else 1)]
    scale.copy_(search.best(candidates))
    energy = search.energy() if measure else None
    error = search.encode(scale, data)
    return search.amax, error() if measure else None, energy


class _BlockSearch:
    """Least squares over candidate scales, for a row of blocks: x [n, k] float, padded with zeros to whole blocks.

    The error of a candidate is the tree sum of (rounded(x/s)·s − x)² in float32, in the block's unit, over the
    rows of a block and then over its columns; of equal errors the smaller scale counts.
    """

    def __init__(self, x: Tensor, block: tuple[int, int]):
        rows, self._columns = block
        n, k = x.shape
        padded = (rows, k + -k % self._columns)
        self._x = (torch.empty if padded == (n, k) else torch.zeros)(padded, device=x.device)
        self._x[:n, :k].copy_(x)
        self._y, self._scratch = torch.empty_like(self._x), torch.empty_like(self._x)
        self.amax = torch.abs(self._x, out=self._y).amax(0).view(-1, self._columns).amax(1)
        unit = unit_of(self.amax)
        self._unit = None if unit is None else unit.repeat_interleave(self._columns)

    def best(self, scales: list[Tensor]) -> Tensor:
        """The scale with the least error, of float32 [blocks] in ascending order."""
        best, *others = scales
        error = self._error_of(best) if others else None
        for scale in others:
            other = self._error_of(scale)
            best, error = torch.where(other < error, scale, best), torch.minimum(error, other)
        return best

    def _error_of(self, scale: Tensor) -> Tensor:
        return _over_columns(self._error(self._divided(scale), scale), self._columns)

    def energy(self) -> Tensor:
        """float32 [k], padding included: sums of x² over the rows."""
        return squared_sums(self._x, self._unit, out=self._y)

    def encode(self, scale: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Fill out [n, k] with the elements under the chosen scales. Returns what computes their errors, like `energy`."""
        y = self._divided(scale)
        out.copy_(y[: out.shape[0], : out.shape[1]])
        return lambda: self._error(y, scale)

    def _divided(self, scale: Tensor) -> Tensor:
        # What a cast does above 448 differs between builds of torch: clamp first.
        return torch.div(self._x, scale.repeat_interleave(self._columns), out=self._y).clamp_(-_MAX, _MAX)

    def _error(self, y: Tensor, scale: Tensor) -> Tensor:
        round_(y, self._scratch, mantissa_bits=3, smallest_normal=_SMALLEST_NORMAL)
        y.mul_(scale.repeat_interleave(self._columns)).sub_(self._x)
        return squared_sums(y, self._unit, out=y)


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """[n, K] values of a tile, of any block geometry and with float32 or e8m0 scales."""
    rows, columns = tile.format.block
    n, k = tile.shape
    scale = e8m0(tile.scale) if tile.format.scale_dtype == torch.uint8 else tile.scale
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(columns, dim=1)[:, :k]
    if len(scale) > 1 and rows > 1:
        scale = scale.repeat_interleave(rows, dim=0)[:n]
    return widen(tile.data).mul_(scale).to(dtype)


def widen(data: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, exact; by a table, several times faster than torch's own cast on a CPU."""
    return e4m3_values(data.device).index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)
