"""Before and after the grouped products: pairs of a token and an expert sorted by expert, and summed by token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "tiles"])
def sort_pairs(
    ids, order, tile_expert, tile_first, tile_last, pairs, experts, tiles,
    BM: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each expert and one for what has none; each writes what is its own, none waits for another.

    ids [pairs], int64; those outside 0 … experts − 1 have no expert.  order int32 [pairs]: all pairs, by expert, those
    without one last; pairs of one expert keep their order.  tile_*: int32 [tiles], see `grouped.grouped_matmul`.
    BUCKETS: a power of two above `experts`.
    """
    mine = tl.program_id(0)
    counts = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        bucket, inside = _buckets(ids, start, pairs, experts, BLOCK)
        counts += tl.histogram(bucket, BUCKETS, mask=inside)
    each = tl.arange(0, BUCKETS)
    count = tl.sum(tl.where(each == mine, counts, 0))
    first = tl.sum(tl.where(each < mine, counts, 0))
    tiles_of = tl.where(each < experts, tl.cdiv(counts, BM), 0)
    tile = tl.sum(tl.where(each < mine, tiles_of, 0))
    used = tl.where(mine < experts, tl.cdiv(count, BM), tiles - tile)
    for start in range(0, used, 32):
        i = start + tl.arange(0, 32)
        tl.store(tile_expert + tile + i, tl.where(mine < experts, mine, -1) + 0 * i, mask=i < used)
        tl.store(tile_first + tile + i, first + i * BM, mask=i < used)
        tl.store(tile_last + tile + i, first + count + 0 * i, mask=i < used)
    for start in range(0, pairs, BLOCK):
        bucket, inside = _buckets(ids, start, pairs, experts, BLOCK)
        match = (inside & (bucket == mine)).to(tl.int32)
        place = first + tl.cumsum(match, 0) - 1
        tl.store(order + place, start + tl.arange(0, BLOCK), mask=match > 0)
        first += tl.sum(match)


@triton.jit
def _buckets(ids, start, pairs, experts, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32), i < pairs


@triton.jit
def sum_pieces(pieces, ids, out, H, top_k, experts, BLOCK: tl.constexpr):
    """out [T, H] = Σ over the top_k pieces [T·top_k, H] of a token that have an expert, in their order, in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(top_k):
        pair = token * top_k + j
        expert = tl.load(ids + pair)
        width = tl.where((expert >= 0) & (expert < experts), H, 0)
        total += tl.load(pieces + pair * H + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
