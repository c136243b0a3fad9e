"""The unquantized formats bf16, f16 and f32: values as they are, rounded once where the source is wider."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant.rounding import Sums, unit_of, without_units

RULES = ("nearest",)


def encode_tile(x: Tensor, tile: PackedTensor, rule: str, measure: bool) -> Sums:
    """Fill `tile` from x [n, K]. Returns the Sums of its rows."""
    x, limit = x.to(torch.float32), torch.finfo(tile.data.dtype).max
    tile.data.copy_(x.clamp(-limit, limit))
    amax = x.abs().amax(1)
    if not measure:
        return amax, None, None
    unit = unit_of(amax)
    return amax, _squares(tile.data.to(torch.float32) - x, unit), _squares(x, unit)


def _squares(y: Tensor, unit: Tensor | None) -> Tensor:
    scaled = y if unit is None else y * unit[:, None]
    return without_units(scaled.square().sum(1), unit)


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """The values of a tile; a view when they are of that dtype already."""
    return tile.data.to(dtype)
