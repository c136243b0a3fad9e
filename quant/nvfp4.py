"""nvfp4: e2m1 in blocks of 16 along K, one e4m3 scale each, and one float32 global scale per expert and row segment."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant import e2m1
from tutel_pack.quant.rounding import Sums, e4m3_values

RULES = ("lsq", "amax")
"""lsq: the best of the e4m3 codes −3 … +7 around amax/6.  amax: the code nearest to amax/6 (ModelOpt's rule)."""

BLOCK = 16
_SCALE_MAX = 448.0
_SCALE_MIN = 2.0**-9
_TINY = torch.finfo(torch.float32).tiny


def global_scale(amax: Tensor) -> Tensor:
    """float32 global scale under which the largest block scale is e4m3's largest: amax / (6 · 448); 1 for all zeros."""
    amax = amax.to(torch.float32)
    return torch.where(amax > 0, (amax / (e2m1.MAX * _SCALE_MAX)).clamp(min=_TINY), 1.0)


def encode_tile(x: Tensor, tile: PackedTensor, rule: str, measure: bool) -> Sums:
    """Fill `tile`, whose global scale is set, from x [n, K]. Returns the Sums of its blocks."""
    search = e2m1.BlockSearch(e2m1.columns(x, BLOCK))
    energy = search.energy() if measure else None
    wanted = search.amax / (e2m1.MAX * tile.global_scale)
    nearest = wanted.clamp(_SCALE_MIN, _SCALE_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    steps = torch.arange(-3, 8) if rule == "lsq" else torch.zeros(1, dtype=torch.int64)
    codes = (nearest + steps[:, None].to(nearest)).clamp_(1, 126)
    candidates = e4m3_values(x.device).index_select(0, codes.flatten()).view(codes.shape)
    scale = search.best(candidates.unbind(), tile.global_scale)
    pairs, error = search.encode(scale * tile.global_scale)
    tile.data.view(-1, BLOCK // 2).copy_(pairs.T)
    tile.scale.copy_(scale.view(tile.scale.shape).to(torch.float8_e4m3fn))
    return search.amax, error() if measure else None, energy


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """[n, K] values of a tile: element × (block scale × global scale), ModelOpt's order."""
    n, k = tile.shape
    values = e2m1.unpack(tile.data, torch.float32).view(n, -1, BLOCK)
    scale = tile.scale.to(torch.float32) * tile.global_scale
    return values.mul_(scale.unsqueeze(-1)).view(n, -1)[:, :k].to(dtype)
