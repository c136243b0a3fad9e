"""fp8: float8 e4m3fn elements in blocks, usually 128 × 128, with one float32 scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant.rounding import round_magnitudes_, tree_sum_

RULES = ("amax", "lsq")
"""amax: amax/448.  lsq: the best of 12 scales amax/448 · 2^(j/12), one period of e4m3's binades."""

_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-6
_TINY = torch.finfo(torch.float32).tiny
_CANDIDATES = 12
_STRIP = 1 << 17
"""Elements searched at a time, see codec.py."""


def encode_tile(x: Tensor, tile: PackedTensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `tile`, one row of blocks, from x [n, K]. Returns float32 (amax, error, energy) of its blocks."""
    rows, columns = tile.format.block
    step = max(1, _STRIP // (rows * columns))
    strips = [_encode_strip(x, tile, b, min(b + step, tile.scale.shape[1]), rule) for b in range(0, tile.scale.shape[1], step)]
    return tuple(torch.cat(parts) for parts in zip(*strips))


def _encode_strip(x: Tensor, tile: PackedTensor, first: int, last: int, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = tile.format.block
    x = x[:, first * columns : last * columns]
    search = _BlockSearch(x, tile.format.block)
    scale = best = (search.amax / _MAX).clamp(min=_TINY)
    error = search.error(scale)
    for j in range(1, _CANDIDATES if rule == "lsq" else 1):
        other_scale = scale * 2.0 ** (j / _CANDIDATES)
        other = search.error(other_scale)
        best, error = torch.where(other < error, other_scale, best), torch.minimum(error, other)
    tile.data[:, first * columns : last * columns] = search.encode(best)[: x.shape[0], : x.shape[1]]
    tile.scale[0, first:last] = best
    return search.amax, error, search.energy()


class _BlockSearch:
    """Errors of candidate scales for a row of blocks: x [n, k] float, padded with zeros to whole blocks."""

    def __init__(self, x: Tensor, block: tuple[int, int]):
        rows, self._columns = block
        n, k = x.shape
        padded = (rows, k + -k % self._columns)
        self._x = (torch.empty if padded == (n, k) else torch.zeros)(padded, device=x.device)
        self._x[:n, :k].copy_(x)
        self._magnitude = self._x.abs()
        self._y, self._scratch = torch.empty_like(self._x), torch.empty_like(self._x)
        self.amax = self._magnitude.amax(0).view(-1, self._columns).amax(1)

    def error(self, scale: Tensor) -> Tensor:
        """float32 [blocks]: sums of (rounded(|x|/s)·s − |x|)² with one scale a block."""
        scale = scale.repeat_interleave(self._columns)
        y = torch.div(self._magnitude, scale, out=self._y).clamp_(max=_MAX)
        round_magnitudes_(y, self._scratch, mantissa_bits=3, smallest_normal=_SMALLEST_NORMAL)
        return self._block_sums(y.mul_(scale).sub_(self._magnitude))

    def energy(self) -> Tensor:
        """float32 [blocks]: sums of x²."""
        return self._block_sums(self._y.copy_(self._x))

    def encode(self, scale: Tensor) -> Tensor:
        """The elements under the chosen scales, padding included."""
        y = torch.div(self._x, scale.repeat_interleave(self._columns), out=self._y)
        # What a cast does above 448 differs between builds of torch: clamp first.
        return y.clamp_(-_MAX, _MAX).to(torch.float8_e4m3fn)

    def _block_sums(self, y: Tensor) -> Tensor:
        """Tree sums of squares over each block, rows first; y is overwritten."""
        return tree_sum_(tree_sum_(torch.mul(y, y, out=y)).view(-1, self._columns).T.contiguous()).clone()


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """[n, K] values of a tile."""
    rows, columns = tile.format.block
    n, k = tile.shape
    scale = tile.scale.repeat_interleave(columns, dim=1)[:, :k].repeat_interleave(rows, dim=0)[:n]
    return widen(tile.data).mul_(scale).to(dtype)


def widen(data: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, exact; several times faster than torch's own cast on a CPU."""
    if data.device.type != "cpu":
        return data.to(torch.float32)
    # The same bits one place to the right are a float16 of 2^-8 times the value, but for NaN.
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    values = bits.view(torch.float16).to(torch.float32).mul_(256.0)
    return values.masked_fill_(values.abs() == 480.0, torch.nan)
