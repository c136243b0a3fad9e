"""The 4-bit element e2m1 (±0, .5, 1, 1.5, 2, 3, 4, 6) and the search for the scales of its blocks.

Blocks are worked on as columns: `[B, n]` holds n blocks of B elements, so that a scale per block broadcasts along
contiguous memory and an error sum is a few slice additions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tutel_pack.quant.rounding import round_magnitudes_, tree_sum_

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0


def round_(y: Tensor, scratch: Tensor) -> Tensor:
    """Round non-negative float32 in place to the nearest e2m1 magnitude, ties to even, above 6 to 6."""
    return round_magnitudes_(y.clamp_(max=MAX), scratch, mantissa_bits=1, smallest_normal=1.0)


def codes(rounded: Tensor, negative: Tensor) -> Tensor:
    """uint8 codes of rounded magnitudes (overwritten); the sign is bit 3."""
    # Twice the values are 0 1 2 3 4 6 8 12; the part above 4 counts half, the part above 8 a quarter.
    twice = rounded.mul_(2.0)
    code = twice.clamp(max=4.0).add_(twice.sub(4.0).clamp_(0.0, 4.0), alpha=0.5).add_(twice.sub_(8.0).clamp_(min=0.0), alpha=0.25)
    return code.to(torch.uint8).add_(negative, alpha=8)


def pack(code: Tensor) -> Tensor:
    """[B, n] codes of n blocks -> [n, B/2] bytes, the even element in the low nibble."""
    return (code[0::2] | (code[1::2] << 4)).T.contiguous()


def unpack(data: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., C] -> element values [..., 2C]."""
    pairs = _pairs(dtype, data.device).index_select(0, data.flatten().int())
    return pairs.view(dtype).view(*data.shape[:-1], -1)


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

    The error of a candidate is the tree sum of (rounded(|x|/s)·s − |x|)² in float32; of equal errors the smaller scale
    counts.
    """

    def __init__(self, x: Tensor):
        self.x, self.magnitude = x, x.abs()
        self.amax = self.magnitude.amax(0)
        self._y, self._scratch = torch.empty_like(x), torch.empty_like(x)

    def best(self, candidates: Iterable[Tensor], global_scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """(block scale, error) of each block's best candidate; candidates are float32 [n], in ascending order."""
        candidates = iter(candidates)
        scale = next(candidates)
        error = self._error(scale * global_scale)
        for other_scale in candidates:
            other = self._error(other_scale * global_scale)
            # Scales ascend, so the best so far is a maximum: much faster than torch.where.
            scale = torch.maximum(scale, other_scale * (other < error))
            error = torch.minimum(error, other)
        return scale, error

    def encode(self, scale: Tensor) -> Tensor:
        """uint8 [n, B/2] packed elements under the chosen scales."""
        return pack(codes(self._rounded(scale), torch.signbit(self.x)))

    def energy(self) -> Tensor:
        """float32 [n]: the tree sum of x²."""
        return tree_sum_(torch.mul(self.x, self.x, out=self._y)).clone()

    def _error(self, scale: Tensor) -> Tensor:
        y = self._rounded(scale)
        y.mul_(scale).sub_(self.magnitude)
        return tree_sum_(torch.mul(y, y, out=y)).clone()

    def _rounded(self, scale: Tensor) -> Tensor:
        return round_(torch.div(self.magnitude, scale, out=self._y), self._scratch)
