"""The unquantized formats bf16, f16 and f32: values as they are, rounded once where the source is wider."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant.rounding import Sums

RULES = ("nearest",)


def encode_tile(x: Tensor, tile: PackedTensor, rule: str, measure: bool) -> Sums:
    """Fill `tile` from x [n, K]. Returns the Sums of its rows."""
    x, limit = x.to(torch.float32), torch.finfo(tile.data.dtype).max
    tile.data.copy_(x.clamp(-limit, limit))
    amax = x.abs().amax(1)
    if not measure:
        return amax, None, None
    return amax, (tile.data.to(torch.float32) - x).square_().sum(1), x.square().sum(1)


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """The values of a tile; a view when they are of that dtype already."""
    return tile.data.to(dtype)
