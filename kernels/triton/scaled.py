"""The product of packed weights with quantized activations, by instructions that multiply both as they are stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scales_of_step(x_scale, step, steps, valid, G: tl.constexpr):
    """[BM] of a step, out of G that are loaded together. Where there are as many as threads, each is loaded once and
    goes through shared memory; of fewer, every thread would load for itself all those that its sums need."""
    steps_here = step // G * G + tl.arange(0, G)[None, :]
    scales = tl.load(x_scale + steps_here, mask=valid[:, None] & (steps_here < steps), other=0.0)
    return tl.sum(tl.where(steps_here == step, scales, 0.0), axis=1)


@triton.jit
def scaled_product(
    x, x_scale, w, scale, rows, scale_rows, valid, N, K, w_row, w_bytes, scale_row,
    ACT: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """[BN, BM]. x, x_scale: pointers to rows [BM, 1] of activations.Activations, whose rows are whole steps; w, scale:
    to the expert, bytes and scales as they are stored.

    Scales of mxfp8 and nvfp4 belong to the instruction, those of fp8 to the sums of its blocks.
    """
    GROUP: tl.constexpr = 32 if ACT == "mxfp8" else 16
    W: tl.constexpr = BK if ACT == "fp8" else BK // 2
    X: tl.constexpr = BK // 2 if ACT == "nvfp4" else BK
    inside = (rows < N)[:, None]
    w += rows.to(tl.int64)[:, None] * w_row
    scale += scale_rows.to(tl.int64)[:, None] * scale_row
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLIT)
    begin = tl.program_id(1) * share
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(begin, tl.minimum(begin + share, steps)):
        byte = step * W + tl.arange(0, W)
        mask = inside if EVEN_K else inside & (byte < w_bytes)[None, :]
        weight = tl.load(w + byte[None, :], mask=mask, other=0)
        tokens = tl.load(x + (step * X + tl.arange(0, X))[None, :], mask=valid[:, None], other=0)
        if ACT == "fp8":
            own = tl.load(scale + step * BK // BLOCK_K, mask=inside, other=0.0)
            other = _scales_of_step(x_scale, step, steps, valid, max(1, THREADS // BM))
            part = tl.dot(weight.to(tl.float8e4nv, bitcast=True), tokens.to(tl.float8e4nv, bitcast=True).T)
            acc += part * (own * other[None, :])
        else:
            group = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
            mask = inside if EVEN_K else inside & (group < tl.cdiv(K, GROUP))[None, :]
            own = tl.load(scale + group[None, :], mask=mask, other=0)
            other = tl.load(x_scale + group[None, :], mask=valid[:, None], other=0)
            if ACT == "mxfp8":
                tokens = tokens.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot_scaled(weight, own, "e2m1", tokens.T, other, "e4m3", acc)
            else:
                own, other = own.to(tl.float8e4nv, bitcast=True), other.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot_scaled(weight, own, "e2m1", tokens.T, other, "e2m1", acc)
    return acc
