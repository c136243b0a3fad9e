"""What is done to rows one by one: norms and rotations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutel_pack.kernels.triton.launch import Launch

_ELEMENTS = 2048
"""Of a program, at least, where rows are short."""


@triton.jit
def inverse_root(x):
    """1 / √x of float32, both rounded; as operators they are approximate on NVIDIA's chips."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, added, total, weight, out, rows, x_row, added_row, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """x [rows, D], weight [D] -> out [rows, D]; of x + added, which goes to total, unless they are None. BD: a power of
    two that D fits into."""
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (row < rows) & (d < D)
    y = tl.load(x + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        y += tl.load(added + row * added_row + d, mask=inside, other=0.0).to(tl.float32)
        y = y.to(total.dtype.element_ty)
        tl.store(total + row * D + d, y, mask=inside)
        y = y.to(tl.float32)
    y *= inverse_root(tl.sum(y * y, axis=1) / D + eps)[:, None]
    y *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=inside)


def norming(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, added: Tensor | None = None, total: Tensor | None = None
) -> Launch:
    """Of x [rows, D], strided by row, into out [rows, D]; or of x + added, which goes into total [rows, D]."""
    rows, d = x.shape
    bd = triton.next_power_of_2(d)
    br = max(1, _ELEMENTS // bd)
    arguments = dict(
        x=x, added=added, total=total, weight=weight, out=out, rows=rows, x_row=x.stride(0),
        added_row=0 if added is None else added.stride(0), D=d, eps=float(eps), BR=br, BD=bd,
    )  # fmt: skip
    return Launch(_rms_norm, (-(-rows // br),), arguments, warps=min(8, max(4, bd // 1024)))


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x, cos, sin, out, rows, heads, x_row, x_head, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """x [T, heads, D] -> out, pairs turned by cos and sin float32 [T, HALF]; rows: T · heads, BR of them at a time.
    BH, BD: powers of two that HALF and what D has beyond the pairs fit into."""
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    inside = row < rows
    token = row // heads
    x += token * x_row + row % heads * x_head
    out += row * D
    j = tl.arange(0, BH)[None, :]
    pair = inside & (j < HALF)
    first, second = (2 * j, 2 * j + 1) if INTERLEAVED else (j, j + HALF)
    a = tl.load(x + first, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=pair, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + j, mask=pair, other=0.0)
    s = tl.load(sin + token * HALF + j, mask=pair, other=0.0)
    tl.store(out + first, (a * c - b * s).to(out.dtype.element_ty), mask=pair)
    tl.store(out + second, (b * c + a * s).to(out.dtype.element_ty), mask=pair)
    if D > 2 * HALF:
        d = 2 * HALF + tl.arange(0, BD)[None, :]
        rest = inside & (d < D)
        tl.store(out + d, tl.load(x + d, mask=rest, other=0.0), mask=rest)


def rotating(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool, out: Tensor) -> Launch:
    """Of x [T, heads, D], strided but for its last dimension, into out, contiguous."""
    (tokens, heads, d), half = x.shape, rotation[0].shape[1]
    bd = triton.next_power_of_2(d)
    br = max(1, _ELEMENTS // bd)
    cos, sin = rotation
    arguments = dict(
        x=x, cos=cos, sin=sin, out=out, rows=tokens * heads, heads=heads, x_row=x.stride(0), x_head=x.stride(1),
        D=d, HALF=half, INTERLEAVED=interleaved, BR=br, BH=triton.next_power_of_2(half),
        BD=triton.next_power_of_2(max(1, d - 2 * half)),
    )  # fmt: skip
    return Launch(_rotate, (-(-tokens * heads // br),), arguments)
