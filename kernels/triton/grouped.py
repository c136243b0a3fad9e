"""The product of packed weights and tokens, grouped by expert or not, with what follows it.

Weights are the left operand, so that tiles of few tokens keep the matrix units' shape: an accumulator is [BN, BM], BN
rows of a weight by BM tokens. Where `GATED`, 8 gate rows and the 8 up rows that belong to them alternate.

Letters: m tokens of a tile, n rows of a tile, k columns, q lanes of a quad. Strides are in words (decode.py) for packed
weights, in elements otherwise; those of words are counted in units of ALIGN words, which tells the compiler how wide it
may load.

A program makes one tile and ends. Decoding would gain nothing by programs that go on to the next one; prefilling might,
by the time that a tile's first loads take: bench/NOTES.md has the estimate, and why it is not done on its strength.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tutel_pack.kernels.triton.decode import FP8_FACTOR, UNDO_OFFSET, decode, multiplier
from tutel_pack.kernels.triton.decode_amd import decode_by_amd
from tutel_pack.kernels.triton.scaled import scaled_product

SUPERTILE = tl.constexpr(8)
"""Tiles of tokens that pass a tile of weights while it is in the cache."""

MOSTLY_FULL = tl.constexpr(64)
"""Tokens of a tile whose loads have no mask."""


@triton.jit
def _activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr):
    """See spec.Swiglu (LIMIT None) and spec.ClampedSwiglu."""
    if LIMIT is None:
        return gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(ALPHA * gate) * (up + SHIFT)


@triton.jit
def _weight_rows(tile, half, BN: tl.constexpr, GATED: tl.constexpr):
    """The rows of the weight that a tile's rows 0 … BN − 1 are: [BN]. half: where the up rows begin."""
    r = tl.arange(0, BN)
    if GATED:
        return tile * (BN // 2) + r // 16 * 8 + r % 8 + tl.where(r % 16 < 8, 0, half)
    else:
        return tile * BN + r


@triton.jit
def _loaded_rows(tile, half, BN: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr):
    """The same in the order in which a block of threads loads them: 8 rows to a warp, where a matrix product wants the
    rows r and r + 8 in one thread. `_in_fragment_order` brings them in place without moving anything."""
    r = tl.arange(0, BN)
    place = r // (16 * WARPS) * (16 * WARPS) + r // 8 % WARPS * 16 + r // (8 * WARPS) % 2 * 8 + r % 8
    if GATED:
        return tile * (BN // 2) + place // 16 * 8 + place % 8 + tl.where(place % 16 < 8, 0, half)
    else:
        return tile * BN + place


@triton.jit
def _in_fragment_order(w, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Decoded words [BN, 16, 2, H] of `_loaded_rows` -> [BN, K], columns in the order of `_columns_in_fragment_order`:
    every thread holds what the matrix instruction wants from it."""
    BN: tl.constexpr = w.shape[0]
    H: tl.constexpr = w.shape[3]
    w = w.reshape(BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, H // RUN, RUN)
    return tl.permute(w, (0, 2, 1, 3, 5, 7, 4, 8, 6)).reshape(BN, 32 * H)


@triton.jit
def _columns_in_fragment_order(x, H: tl.constexpr, RUN: tl.constexpr):
    """x [BM, 32·H]: columns by quad lane, word of it, c and h become columns by word, h, lane and c; of h what is below
    RUN comes after the lane, for a thread wants 2·RUN columns that are side by side."""
    BM: tl.constexpr = x.shape[0]
    x = x.reshape(BM, 4, 4, 2, H // RUN, RUN)
    return tl.permute(x, (0, 2, 4, 1, 5, 3)).reshape(BM, 32 * H)


@triton.jit
def _scale_rows(rows, first, BLOCK_N: tl.constexpr):
    """Rows of the grid of block scales, which begins anew with the second segment, at row `first`."""
    if BLOCK_N == 1:
        return rows
    else:
        return tl.where(rows < first, rows // BLOCK_N, tl.cdiv(first, BLOCK_N) + (rows - first) // BLOCK_N)


@triton.jit
def _place(pid, tiles_m, tiles_n):
    """(tile of tokens, tile of weights) of a program: a few tiles of tokens by all of weights, then the next few."""
    supertile = pid // (SUPERTILE * tiles_n)
    height = tl.minimum(tiles_m - supertile * SUPERTILE, SUPERTILE)
    within = pid % (SUPERTILE * tiles_n)
    return supertile * SUPERTILE + within % height, within // height


@triton.jit
def _load_scales(scale, columns, count, FMT: tl.constexpr):
    """Block scales as integers of their bits. Outside any will do, for weights are zeros there; those of blocks of 16,
    which are many, are better masked: otherwise they take more registers on sm_80, and shared memory on gfx942."""
    if FMT == "nvfp4":
        return tl.load(scale + columns, mask=columns < count, other=0)
    else:
        return tl.load(scale + tl.minimum(columns, count - 1))


@triton.jit
def _fp8_factor(bits, E8M0: tl.constexpr):
    """Block scales of fp8 -> float32: as they are, or from e8m0, whose 0 is 2^-127, a subnormal."""
    if E8M0:
        b = bits.to(tl.int32)
        return tl.where(b == 0, 1 << 22, b << 23).to(tl.float32, bitcast=True)
    else:
        return bits


@triton.jit
def _part_of_k(K, BK: tl.constexpr, SPLIT: tl.constexpr):
    """(first, last) steps along K of this program."""
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLIT)
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, steps)


@triton.jit
def _load_columns(rows, column, columns, EVEN_K: tl.constexpr):
    """Of rows that pointers [·, 1] say; zeros outside. Where there is no outside there is no mask, which would take
    registers on NVIDIA's chips and jumps on AMD's."""
    if EVEN_K:
        return tl.load(rows + column[None, :])
    else:
        return tl.load(rows + column[None, :], mask=(column < columns)[None, :], other=0)


@triton.jit
def _load_x(x, k, K, valid, EVEN_K: tl.constexpr):
    """Columns k of tokens, [BM, BK]. Tiles of few tokens, which may be nearly empty, read no others."""
    if valid.shape[0] >= MOSTLY_FULL:
        return _load_columns(x, k, K, EVEN_K)
    else:
        mask = valid[:, None] if EVEN_K else valid[:, None] & (k < K)[None, :]
        return tl.load(x + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_once(pointers, THREADS: tl.constexpr):
    """[BM], of which a thread loads one. Of fewer than there are threads, each would load for itself all those that its
    sums need: as many addresses, in registers."""
    if pointers.shape[0] >= THREADS:
        return tl.load(pointers)
    else:
        copies = tl.zeros((pointers.shape[0], THREADS // pointers.shape[0]), tl.int32)
        return tl.max(tl.load(pointers[:, None] + copies), axis=1)


@triton.jit
def _cut(x, DOT: tl.constexpr):
    """float32 -> (its sign, its exponent and the first 8 of its 24 bits, as DOT has them; what is left, exactly)."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    if DOT == tl.bfloat16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - high
    else:
        return high, x - high


@triton.jit
def _product(weight, tokens, acc, DOT: tl.constexpr, PARTS: tl.constexpr):
    """acc + weight · tokensᵀ. PARTS = 3: of float32 tokens, as three bfloat16 that add up to them, the smallest first.
    These are summed apart and added to acc, for matrix units cut off what they add, if by less than float32's last
    bit."""
    if PARTS == 1:
        return tl.dot(weight, tokens.to(DOT).T, acc, input_precision="ieee")
    else:
        high, rest = _cut(tokens, DOT)
        middle, rest = _cut(rest, DOT)
        low, _ = _cut(rest, DOT)
        part = tl.dot(weight, low.T, input_precision="ieee")
        part = tl.dot(weight, middle.T, part, input_precision="ieee")
        return acc + tl.dot(weight, high.T, part, input_precision="ieee")


@triton.jit
def _plain_product(
    x, w, rows, valid, K, w_row, DOT: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BN, BM] of elements as they are. x: pointers to rows [BM, 1]; w: to the expert."""
    w += rows.to(tl.int64)[:, None] * w_row
    begin, end = _part_of_k(K, BK, SPLIT)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(begin, end):
        k = step * BK + tl.arange(0, BK)
        weight = _load_columns(w, k, K, EVEN_K).to(DOT)
        acc = _product(weight, _load_x(x, k, K, valid, EVEN_K), acc, DOT, PARTS)
    return acc


@triton.jit
def _decoded(
    words, bits, FMT: tl.constexpr, DOT: tl.constexpr, WAY: tl.constexpr, FRAGMENT: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Words [BN, ·] and stored scales of their blocks -> DOT [BN, BK], columns in order or in that of fragments. Scales
    of fp8 are not applied."""
    BN: tl.constexpr = words.shape[0]
    if WAY == "native":
        return words.to(tl.float8e4nv, bitcast=True).to(DOT)
    elif WAY == "fnuz" or WAY == "table" or WAY == "conversion":
        return decode_by_amd(words, bits, FMT, DOT, WAY)
    else:
        factor = tl.full((BN, 1), FP8_FACTOR, tl.float32) if FMT == "fp8" else multiplier(bits, FMT)
        weight = decode(words, factor, FMT, DOT, WAY == "pairs", FRAGMENT)
        if FRAGMENT:
            return _in_fragment_order(weight, FRAGMENT, WARPS)
        else:
            return weight.reshape(BN, weight.shape[1] * weight.shape[2] * weight.shape[3])


@triton.jit
def _packed_product(
    x, w, scale, rows, scale_rows, valid, K, w_row, w_words, scale_row,
    FMT: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr, WAY: tl.constexpr, FRAGMENT: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, E8M0: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """[BN, BM] of packed weights. x: pointers to rows [BM, 1]; w, scale: to the expert.

    Scales are loaded a step ahead: they are too narrow for the compiler to do it by itself.
    """
    H: tl.constexpr = 2 if FMT == "fp8" else 4
    W: tl.constexpr = BK if WAY == "native" else BK // (2 * H)
    BLOCKS: tl.constexpr = 1 if FMT == "fp8" else BK // BLOCK_K
    w += rows.to(tl.int64)[:, None] * (w_row * ALIGN)
    if FMT == "fp8":
        scale += scale_rows.to(tl.int64) * scale_row
        blocks = tl.arange(0, 1)
    else:
        scale += scale_rows.to(tl.int64)[:, None] * scale_row
        blocks = tl.arange(0, BLOCKS)[None, :]
    count = tl.cdiv(K, BLOCK_K)
    begin, end = _part_of_k(K, BK, SPLIT)
    if FMT == "fp8":
        ahead = _load_scales(scale, begin * BK // BLOCK_K + blocks, count, FMT)
    else:
        ahead = _load_scales(scale, begin * BLOCKS + blocks, count, FMT)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(begin, end):
        words = _load_columns(w, step * W + tl.arange(0, W), w_words * ALIGN, EVEN_K)
        tokens = _load_x(x, step * BK + tl.arange(0, BK), K, valid, EVEN_K)
        bits = ahead
        if FMT == "fp8":
            ahead = _load_scales(scale, (step + 1) * BK // BLOCK_K + blocks, count, FMT)
        else:
            ahead = _load_scales(scale, (step + 1) * BLOCKS + blocks, count, FMT)
        weight = _decoded(words, bits, FMT, DOT, WAY, FRAGMENT, WARPS)
        if FRAGMENT:
            tokens = _columns_in_fragment_order(tokens, H, FRAGMENT)
        if FMT == "fp8":
            of_step = _product(weight, tokens, tl.zeros((BN, BM), tl.float32), DOT, PARTS)
            acc += of_step * _fp8_factor(bits, E8M0)[:, None]
        else:
            acc = _product(weight, tokens, acc, DOT, PARTS)
    return acc


@triton.jit
def _store(
    acc, rows, tile_n, expert, pair, out_rows, valid, N, bias, weights, out, out_row,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The end of a sum: bias, activation, factor of the row; rounded once."""
    if bias is not None:
        acc += tl.load(bias + expert * N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(acc.reshape(BN // 16, 2, 8, BM), (0, 2, 3, 1)).reshape(BN // 2, BM, 2)
        gate, up = tl.split(halves)
        acc = _activate(gate, up, LIMIT, ALPHA, SHIFT)
        columns = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        inside = columns < N // 2
    else:
        columns = rows
        inside = rows < N
    if weights is not None:
        acc *= _load_once(weights + pair, THREADS)[None, :]
    place = out_rows.to(tl.int64)[None, :] * out_row + columns[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["tiles_m", "pairs", "out_split"])
def grouped_matmul(
    x, w, scale, factors, bias, weights, out, x_scale, x_factors,
    order, tile_expert, tile_first, tile_last,
    tiles_m, pairs, x_per_row, N, K, first, segments,
    w_expert, w_row, w_words, scale_expert, scale_row, out_row, out_split, x_row, x_scale_row,
    FMT: tl.constexpr, ACT: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    WAY: tl.constexpr, FRAGMENT: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, E8M0: tl.constexpr,
    GROUPED: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    WARPS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """out[row] = epilogue(w[expert] · x[row]); an element's sum is that of one program, or of SPLIT.

    x [·, K]; where there is ACT, x, x_scale and x_factors are those of activations.Activations, with rows of x_row
        bytes and x_scale_row scales.
    w: words [E, N, ·] of FMT; elements if that is "plain"; bytes if ACT or if WAY is "native".
    WAY: of decoding, see matmul.way_of.
    scale [E, ·, ·]: bits of the block scales, of BLOCK_N × BLOCK_K elements each; for fp8 float32, or bytes if E8M0.
    factors float32 [E, segments]: global scales.
    first: rows of the first segment.  bias [E, N], float32 weights [pairs]: of output rows; either may be None.
    GROUPED: int32 order [pairs] lists the pairs of a token and an expert by expert; a tile has the entries tile_first …
        tile_last − 1, at least one and BM of them at most, and tile_expert, −1 for a tile that is not used. Otherwise
        there is one expert, and `pairs` rows are cut into tiles.
    GATHER: x is by token, that of pair p is p // x_per_row; otherwise it is by entry of `order`.
    SCATTER: out is by pair; otherwise by entry.
    GATED: out has N/2 columns, the activation of gate and up rows.
    FRAGMENT: RUN of `_columns_in_fragment_order`, 0 for columns in their own order.
    SPLIT > 1: out is float32 [SPLIT, rows, N], each the sum over a part of K; `finish` does the rest.
    """
    tile_m, tile_n = _place(tl.program_id(0), tiles_m, tl.cdiv(N, BN))
    if GROUPED:
        expert = tl.load(tile_expert + tile_m).to(tl.int64)
        if expert < 0:
            return
        entries, end = tl.load(tile_first + tile_m) + tl.arange(0, BM), tl.load(tile_last + tile_m)
    else:
        expert = tl.full((), 0, tl.int64)
        entries, end = tile_m * BM + tl.arange(0, BM), pairs
    valid = entries < end
    if GATHER:
        pair = tl.load(order + entries, mask=valid, other=0)
        token = (pair // x_per_row).to(tl.int64)
    else:
        token = entries.to(tl.int64)
    rows = _weight_rows(tile_n, N // 2, BN, GATED)
    w += expert * w_expert * ALIGN
    if ACT is not None:
        acc = scaled_product(
            x + token[:, None] * x_row, x_scale + token[:, None] * x_scale_row, w, scale + expert * scale_expert,
            rows, _scale_rows(rows, first, BLOCK_N), valid, N, K, w_row, w_words, scale_row,
            ACT, BLOCK_K, BM, BN, BK, SPLIT, EVEN_K, THREADS,
        )  # fmt: skip
        if x_factors is not None:
            acc *= _load_once(x_factors + tl.where(valid, token, 0), THREADS)[None, :]
    else:
        # Tokens and rows outside are read from where others are, and not stored.
        if not GATHER:
            token = tl.minimum(entries, end - 1).to(tl.int64)
        x += token[:, None] * K
        loaded = tl.minimum(_loaded_rows(tile_n, N // 2, BN, GATED, WARPS) if FRAGMENT else rows, N - 1)
        if FMT == "plain":
            acc = _plain_product(x, w, loaded, valid, K, w_row, DOT, PARTS, BM, BN, BK, SPLIT, EVEN_K)
        else:
            scale_rows = _scale_rows(tl.minimum(rows, N - 1), first, BLOCK_N) if FMT == "fp8" else loaded
            acc = _packed_product(
                x, w, scale + expert * scale_expert, loaded, scale_rows, valid, K, w_row, w_words, scale_row,
                FMT, DOT, PARTS, WAY, FRAGMENT, ALIGN, BLOCK_K, E8M0, BM, BN, BK, SPLIT, EVEN_K, WARPS,
            )  # fmt: skip
    if FMT == "nvfp4":
        factor = tl.load(factors + expert * segments + tl.where(rows < first, 0, 1), mask=rows < N, other=0.0)
        acc *= factor[:, None]
    if ACT is None and WAY == "fnuz":
        acc *= 2.0
    elif ACT is None and (FMT == "mxfp4" or FMT == "nvfp4"):
        if WAY == "pairs" or (WAY == "float32" and DOT != tl.float16):
            acc *= UNDO_OFFSET
    if not GATHER:  # no sooner: it takes registers
        pair = tl.minimum(entries, end - 1)
        if SCATTER:
            pair = _load_once(order + pair, THREADS)
    out_rows = pair if SCATTER else entries
    if SPLIT > 1:
        out += tl.program_id(1).to(tl.int64) * out_split
        place = out_rows.to(tl.int64)[None, :] * out_row + rows[:, None]
        tl.store(out + place, acc, mask=(rows < N)[:, None] & valid[None, :])
    else:
        _store(
            acc, rows, tile_n, expert, pair, out_rows, valid, N, bias, weights, out, out_row,
            GATED, LIMIT, ALPHA, SHIFT, BM, BN, THREADS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["part_stride"])
def finish(
    parts, ids, order, bias, weights, out, N, experts, part_stride,
    SORTED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, N or N/2] from float32 parts [SPLIT, rows, N], added up in their order; bias, weights and activation
    as of `grouped_matmul`. ids [pairs]: of experts, None where there is one; rows without an expert are left alone.
    SORTED: rows are entries of `order`; otherwise pairs."""
    row = tl.program_id(0)
    pair = tl.load(order + row) if SORTED else row
    expert = tl.full((), 0, tl.int64)
    if ids is not None:
        expert = tl.load(ids + pair).to(tl.int64)
        if (expert < 0) | (expert >= experts):
            return
    width = N // 2 if GATED else N
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = parts + row.to(tl.int64) * N + column
    total = _total(at, part_stride, inside, SPLIT, BLOCK)
    if bias is not None:
        total += tl.load(bias + expert * N + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _total(at + width, part_stride, inside, SPLIT, BLOCK)
        if bias is not None:
            up += tl.load(bias + expert * N + width + column, mask=inside, other=0.0).to(tl.float32)
        total = _activate(total, up, LIMIT, ALPHA, SHIFT)
    if weights is not None:
        total *= tl.load(weights + pair)
    tl.store(out + row.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _total(at, part_stride, inside, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(SPLIT):
        total += tl.load(at + part * part_stride, mask=inside, other=0.0)
    return total
