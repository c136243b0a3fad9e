"""What the codecs of small floats share: rounding a magnitude to few mantissa bits, and sums in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7F800000


def round_magnitudes_(y: Tensor, scratch: Tensor, mantissa_bits: int, smallest_normal: float) -> Tensor:
    """Round non-negative float32 in place to a small float's values, ties to even; the caller clamps to its largest.

    In a binade [P, 2P) the values are P/2^mantissa_bits apart, and below the smallest normal they stay as far apart as
    right above it: adding and subtracting a number whose last bit is that step rounds both.
    scratch: like y, overwritten.
    """
    step_to_addend = 1.5 * 2.0 ** (23 - mantissa_bits)
    torch.bitwise_and(y.view(torch.int32), _EXPONENT_BITS, out=scratch.view(torch.int32))
    scratch.clamp_(min=smallest_normal).mul_(step_to_addend)
    return y.add_(scratch).sub_(scratch)


def tree_sum_(x: Tensor) -> Tensor:
    """Sum over dim 0 (a power of two) by halving, in place: one order of additions on every machine."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half].add_(x[half:])
    return x[0]
