"""mxfp4 (OCP MX): e2m1 in blocks of 32 along K, one e8m0 scale byte each, byte b meaning 2^(b−127)."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.quant import e2m1
from tutel_pack.quant.rounding import Sums

RULES = ("lsq", "floor", "even", "ceil")
"""lsq: the better of floor and floor + 1.  floor: OCP's, floor(log2 amax) − 2.  even: as if amax were first rounded to
one mantissa bit.  ceil: the smallest scale that clips nothing, ceil(log2(amax/6))."""

BLOCK = 32
_LARGEST_CODE = 252
"""Of a scale in use: twice as much, and its elements 4 and 6 would be beyond float32."""


def encode_tile(x: Tensor, tile: PackedTensor, rule: str, measure: bool) -> Sums:
    """Fill `tile` from x [n, K]. Returns the Sums of its blocks."""
    search = e2m1.BlockSearch(e2m1.columns(x, BLOCK))
    energy = search.energy() if measure else None
    first = _exponent(search.amax, rule)
    codes = [first, first + 1] if rule == "lsq" else [first]
    scale = search.best([e8m0(c.clamp(0, _LARGEST_CODE)) for c in codes], 1.0)
    pairs, error = search.encode(scale)
    tile.data.view(-1, BLOCK // 2).copy_(pairs.T)
    tile.scale.copy_((scale.view(torch.int32) >> 23).view(tile.scale.shape))
    return search.amax, error() if measure else None, energy


def _exponent(amax: Tensor, rule: str) -> Tensor:
    """int32 biased exponents of the block scales, from the bits of amax: a rounded log2 would be off by one."""
    bits = amax.view(torch.int32)
    mantissa_limit = {"lsq": None, "floor": None, "even": 0x600000, "ceil": 0x400001}[rule]
    exponent = (bits >> 23) - 2
    if mantissa_limit is not None:
        exponent += (bits & 0x7FFFFF) >= mantissa_limit
    return exponent


def e8m0(code: Tensor) -> Tensor:
    """float32 2^(code − 127) of integer codes; NaN for 255."""
    code = code.to(torch.int32)
    # 0 means 2^-127, which float32 has as a subnormal, and 255 NaN: both set the first bit of the mantissa.
    return ((code << 23) | ((code % 255 == 0).to(torch.int32) << 22)).view(torch.float32)


def decode_tile(tile: PackedTensor, dtype: torch.dtype) -> Tensor:
    """[n, K] values of a tile."""
    n, k = tile.shape
    exact = dtype if dtype == torch.bfloat16 else torch.float32  # float16 lacks the range of the scales
    values = e2m1.unpack(tile.data, exact).view(n, -1, BLOCK)
    return values.mul_(e8m0(tile.scale).to(exact).unsqueeze(-1)).view(n, -1)[:, :k].to(dtype)
