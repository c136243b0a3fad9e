"""The 4-bit element e2m1 (±0, .5, 1, 1.5, 2, 3, 4, 6) and the search for the scales of its blocks.

Blocks are worked on as columns: `[B, n]` holds n blocks of B elements, so that a scale per block broadcasts along
contiguous memory and an error sum is a few slice additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from tutel_pack.quant.rounding import add_rounding_, round_, squared_sums, unit_of, without_units

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
_ROUNDING = {"mantissa_bits": 1, "smallest_normal": 1.0}


def unpack(data: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., C] -> element values [..., 2C]."""
    pairs = _pairs(dtype, data.device).index_select(0, data.flatten().int())
    return pairs.view(dtype).view(*data.shape[:-1], -1)


@cache  # made once, for every tile of every token asks for it
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte its two values, side by side in one integer of twice the width, so that one lookup moves both."""
    values = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten().to(device)


def columns(x: Tensor, block: int) -> Tensor:
    """[n, K] of any float dtype -> float32 [block, n · ceil(K/block)], rows padded with zeros to whole blocks."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    x = x.reshape(-1, block)
    return torch.empty(block, len(x), device=x.device).copy_(x.T)


class BlockSearch:
    """Least squares over candidate scales, for the columns of `x` (float32 [B, n]).

    The error of a candidate is the tree sum of (rounded(x/s)·s − x)² in float32, in the block's unit (`unit_of`); of equal
    errors the smaller scale counts. Few copies of x are held, so that they stay in a core's cache.
    """

    def __init__(self, x: Tensor):
        self.x = x
        self._y, self._scratch = torch.empty_like(x), torch.empty_like(x)
        self.amax = torch.abs(x, out=self._y).amax(0)
        self._unit = unit_of(self.amax)

    def energy(self) -> Tensor:
        """[n]: the tree sum of x². To be asked for before `encode`."""
        return without_units(squared_sums(self.x, self._unit, out=self._y), self._unit)

    def best(self, candidates: Sequence[Tensor], global_scale: Tensor | float) -> Tensor:
        """The block scale with the least error; candidates are float32 [n], in ascending order."""
        scale, *others = candidates
        error = self._error_of(scale * global_scale) if others else None
        for other_scale in others:
            other = self._error_of(other_scale * global_scale)
            # Scales ascend, so the best so far is a maximum: much faster than torch.where.
            scale = torch.maximum(scale, other_scale * (other < error))
            error = torch.minimum(error, other)
        return scale

    def encode(self, scale: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The elements under the chosen scales, int32 [B/2, n] with two codes each, and what computes their errors.
        Overwrites x."""
        negative = self.x.view(torch.int32) >> 31  # −1 where the sign bit is set
        y = torch.div(self.x.abs_(), scale, out=self._y).clamp_(max=MAX)
        step = add_rounding_(y, self._scratch, **_ROUNDING)
        # y is 1.5 · 2^22 · P + k · P/2 now: a magnitude's code is k, in the last bits, plus 2·log2(P); the exponent and
        # the bit below it are 299 + 2·log2(P).
        bits = y.view(torch.int32)
        code = (bits >> 22).add_(bits & 7).add_(negative, alpha=-8)
        pairs = torch.add(code[0::2], code[1::2], alpha=16).sub_(17 * 299)
        return pairs, lambda: without_units(self._error(y.sub_(self._scratch, alpha=step), scale), self._unit)

    def _error_of(self, scale: Tensor) -> Tensor:
        y = torch.div(self.x, scale, out=self._y).clamp_(-MAX, MAX)
        return self._error(round_(y, self._scratch, **_ROUNDING), scale)

    def _error(self, rounded: Tensor, scale: Tensor) -> Tensor:
        y = rounded.mul_(scale).sub_(self.x)
        return squared_sums(y, self._unit, out=y)
