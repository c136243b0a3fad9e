"""int4: signed 4 bit in blocks of 32 along K, one bfloat16 scale each. Sources are passed through; nothing is encoded to it."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor

RULES = ()
"""None: no scale is ever chosen here."""

BLOCK = 32


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """[n, K] values of a tile: element × scale in float32, where the product is exact, rounded once to `dtype`."""
    n, k = tile.shape
    values = unpack(tile.data).view(n, -1, BLOCK)
    return values.mul_(tile.scale.to(torch.float32).unsqueeze(-1)).view(n, -1)[:, :k].to(dtype)


def unpack(data: Tensor) -> Tensor:
    """uint8 [..., C] -> float32 element values [..., 2C], the low nibble first, in two's complement."""
    byte = torch.arange(256)
    nibbles = torch.stack([byte & 15, byte >> 4], dim=1)
    # A pair of values moves as one integer of twice the width.
    pairs = ((nibbles ^ 8) - 8).to(torch.float32).view(torch.int64).flatten().to(data.device)
    return pairs.index_select(0, data.flatten().int()).view(torch.float32).view(*data.shape[:-1], -1)
