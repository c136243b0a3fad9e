"""What the codecs of small floats share: rounding to few mantissa bits, and sums of squares in a fixed order."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

Sums = tuple[Tensor, Tensor | None, Tensor | None]
"""What `encode_tile` returns: float32 amax, error and energy, one or several numbers each that together cover the tile;
error and energy may be float64, and are None where they are not to be measured."""

_EXPONENT_BITS = 0x7F800000
_SMALL, _LARGE = 2.0**-50, 2.0**50
"""Between them no sum of squares overflows, and none that counts vanishes."""


def add_rounding_(y: Tensor, scratch: Tensor, mantissa_bits: int, smallest_normal: float) -> float:
    """Add scratch · step to float32 y in place; returns step. `y.sub_(scratch, alpha=step)` then leaves y rounded to a
    small float's values, ties to even; the caller clamps to its largest. A −0, or what rounds to it, becomes +0.

    In a binade [P, 2P) the values are P/2^mantissa_bits apart, and below the smallest normal they stay as far apart as
    right above it: adding and subtracting a number whose last bit is that far from the next rounds both.
    scratch: like y, becomes P. Its products with the step are exact, so a fused multiply-add changes nothing.
    """
    step = 1.5 * 2.0 ** (23 - mantissa_bits)
    torch.bitwise_and(y.view(torch.int32), _EXPONENT_BITS, out=scratch.view(torch.int32))
    y.add_(scratch.clamp_(min=smallest_normal), alpha=step)
    return step


def round_(y: Tensor, scratch: Tensor, mantissa_bits: int, smallest_normal: float) -> Tensor:
    """Round float32 y in place, see `add_rounding_`."""
    step = add_rounding_(y, scratch, mantissa_bits, smallest_normal)
    return y.sub_(scratch, alpha=step)


@cache
def e4m3_values(device: torch.device) -> Tensor:
    """float32 [256]: the value of every e4m3 code."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def tree_sum_(x: Tensor) -> Tensor:
    """Sum over dim 0 (a power of two) by halving, in place: one order of additions on every machine."""
    while x.shape[0] > 1:
        low, high = x.chunk(2)
        x = low.add_(high)
    return x[0]


def unit_of(amax: Tensor) -> Tensor | None:
    """float32, like amax: the powers of two by which blocks' numbers are multiplied before they are squared, 1 where their
    squares are fine without. None where all are, as those of usual weights."""
    unusual = (amax < _SMALL) & (amax > 0) | (amax > _LARGE)
    if not unusual.any():
        return None
    near_one = (254 - (amax.view(torch.int32) >> 23)).clamp_(min=1) << 23
    return torch.where(unusual, near_one.view(torch.float32), 1.0)


def squared_sums(y: Tensor, unit: Tensor | None, out: Tensor) -> Tensor:
    """The tree sums of (y · unit)² over dim 0. out: like y, is overwritten, and may be y."""
    y = y if unit is None else torch.mul(y, unit, out=out)
    return tree_sum_(torch.mul(y, y, out=out)).clone()


def without_units(squares: Tensor, unit: Tensor | None) -> Tensor:
    """Sums of squares of what was multiplied by `unit`, as they would be without it; float64 where there is a unit."""
    return squares if unit is None else squares.double() / unit.double().square()
