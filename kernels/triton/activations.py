"""Activations in few bits, for products that multiply them so: one scale for each block along K of a token.

mxfp8: e4m3 in blocks of 32 under powers of two, the smallest that clip nothing.  nvfp4: e2m1 in blocks of 16 under e4m3
scales, all of a token under one float32.  fp8: e4m3 in blocks of 128 under float32 scales. What is not finite stays so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutel_pack.kernels.triton.launch import Launch

BLOCKS = {"mxfp8": 32, "nvfp4": 16, "fp8": 128}
"""Columns under one scale."""

STEP = 128
"""Rows are filled up with zeros to a multiple of it."""

_COLUMNS = 1024
"""Of a program."""

_LARGEST = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_ROUNDER = tl.constexpr(1.5 * 2.0**20)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Activations:
    """data uint8 [rows, ·]: e4m3, or two e2m1 to a byte, the even one in the low bits.  scale [rows, ·]: uint8 of e8m0
    or e4m3, or float32.  factors: float32 [rows], or None."""

    act: str
    data: Tensor
    scale: Tensor
    factors: Tensor | None


@triton.jit
def _round_e4m3(y):
    """float32 y -> the nearest value of e4m3, ties to even, as float32: casts differ in what they do with ties and with
    what is too large. Adding a number whose last bit is a step of the binade rounds to one."""
    y = tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST)
    binade = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(binade, _SMALLEST_NORMAL) * _ROUNDER
    return (y + shift) - shift


@triton.jit
def _e4m3(y, finite):
    """Bits of the nearest e4m3, of NaN where not finite."""
    return tl.where(finite, _round_e4m3(y).to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)


@triton.jit
def _e2m1(y):
    """Codes of the nearest e2m1, int32; ties go to the one whose last bit is 0."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | tl.where(y < 0, 8, 0)


@triton.jit
def _largest(x):
    """Magnitudes of float32 x, of which those of NaN are infinite, too."""
    a = tl.abs(x)
    return tl.where(a < float("inf"), a, float("inf"))


@triton.jit
def _row_factor(x, K, BLOCK: tl.constexpr):
    """The scale of a row's scales: under it the largest one is e4m3's largest. NaN if the row is not finite."""
    best = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, _largest(tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)))
    best = tl.max(best)
    factor = tl.where(best > 0, tl.maximum(tl.div_rn(best, 6.0 * _LARGEST), _TINY), 1.0)
    return tl.where(best < float("inf"), factor, float("nan"))


@triton.jit
def quantize(
    x, data, scale, factors, K, x_row, data_row, scale_row, ACT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [rows, K] -> data, scale and factors as of Activations; BLOCK columns in blocks of GROUP."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += row * x_row
    k = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32).reshape(BLOCK // GROUP, GROUP)
    amax = tl.max(_largest(values), axis=1)
    group = chunk * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    scale += row * scale_row + group
    inside = group < scale_row
    if ACT == "nvfp4":
        factor = _row_factor(x, K, BLOCK)
        if chunk == 0:
            tl.store(factors + row, factor)
        own = _round_e4m3(tl.maximum(tl.div_rn(amax, 6.0 * factor), 0.001953125))
        tl.store(scale, own.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)
        codes = _e2m1(tl.div_rn(values, (own * factor)[:, None] + tl.zeros_like(values)))
        even, odd = tl.split(codes.reshape(BLOCK // 2, 2))
        byte = chunk * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        tl.store(data + row * data_row + byte, (even | (odd << 4)).to(tl.uint8), mask=byte < data_row)
    else:
        if ACT == "mxfp8":
            bits = amax.to(tl.int32, bitcast=True)
            code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
            code = tl.minimum(tl.maximum(code, 1), 253)
            tl.store(scale, code.to(tl.uint8), mask=inside)
            scaled = values * ((254 - code) << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            own = tl.maximum(tl.div_rn(amax, tl.full((BLOCK // GROUP,), _LARGEST, tl.float32)), _TINY)
            own = tl.where(amax < float("inf"), own, 1.0)
            tl.store(scale, own, mask=inside)
            scaled = tl.div_rn(values, own[:, None] + tl.zeros_like(values))
        finite = (_largest(values) < float("inf")).reshape(BLOCK)
        bytes_ = _e4m3(scaled.reshape(BLOCK), finite)
        tl.store(data + row * data_row + k, bytes_, mask=k < data_row)


def quantizing(x: Tensor, act: str) -> tuple[Activations, Launch]:
    """Of x [rows, K], strided by row, and what fills it in."""
    (rows, k), group = x.shape, BLOCKS[act]
    width = -(-k // STEP) * STEP
    data = torch.empty(rows, width // 2 if act == "nvfp4" else width, dtype=torch.uint8, device=x.device)
    kind = torch.float32 if act == "fp8" else torch.uint8
    scale = torch.empty(rows, width // group, dtype=kind, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device) if act == "nvfp4" else None
    arguments = dict(
        x=x, data=data, scale=scale, factors=factors, K=k, x_row=x.stride(0), data_row=data.shape[1],
        scale_row=scale.shape[1], ACT=act, GROUP=group, BLOCK=_COLUMNS,
    )  # fmt: skip
    return Activations(act, data, scale, factors), Launch(quantize, (rows, -(-width // _COLUMNS)), arguments)
