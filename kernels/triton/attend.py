"""Attention of one new token per sequence to what a paged cache has of it.

The positions of a sequence are cut into as many parts as there are programs along the third axis of the grid; `merge`
joins them in their order. A program has the query heads of a tile, all of the same key head.

Letters: h query heads of a tile, n positions of a step, d dimensions of a value, e dimensions of a key beyond those.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _range(length, top_k, WINDOW: tl.constexpr, PICKED: tl.constexpr, BN: tl.constexpr):
    """(first, last) of the positions, or of the picks, that this program attends to."""
    low, high = 0, length
    if WINDOW is not None:
        low = tl.maximum(length - WINDOW, 0)
    if PICKED:
        high = top_k
    share = tl.cdiv(tl.cdiv(high - low, BN), tl.num_programs(2)) * BN
    begin = low + tl.program_id(2) * share
    return begin, tl.minimum(begin + share, high)


@triton.jit
def _add_sink(best, total, sinks, head, mine):
    """(sum of exponentials with one more logit, if there is one; factor of what was added up before)."""
    if sinks is None:
        return total, 1.0
    else:
        sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
        larger = tl.maximum(best, sink)
        factor = tl.exp(best - larger)
        return total * factor + tl.exp(sink - larger), factor


@triton.jit
def attend(
    q, q_shared, keys, values, starts, lengths, blocks, first_block, picks, sinks, out, parts, stats,
    scale, heads, group, top_k,
    q_row, q_head, shared_row, shared_head, key_block, key_row, key_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PARTED: tl.constexpr,
    DOT: tl.constexpr, TILES: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out [T, heads, D] of the sequences that have one new token, or what `merge` makes it of.

    q [T, heads, D]; q_shared [T, heads, E], None where E is 0.  keys [·, BLOCK, ·, D + E]: a pool; values of D, None if
        they are the first D dimensions of the keys.  Strides in elements: of a token and a head of the queries, of a
        block, a position and a head of the pools.
    starts int64 [S + 1], lengths int64 [S], as of ops.Layout.  blocks int64: all tables, one after another, that of a
        sequence from first_block int64 [S] on.
    picks int64 [S, top_k]: positions to attend to; None for all, or for the last WINDOW.
    sinks [heads] or None.  scale: of the logits.  group: query heads of a key head, in TILES tiles of BH.
    PARTED: parts float32 [S, heads, programs, D] have sums of values, stats float32 [S, heads, programs, 2] the largest
        logit and the sum of exponentials under them; otherwise there is one program.
    BD, BE: powers of two that D and E fit into.
    """
    sequence = tl.program_id(0).to(tl.int64)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - token != 1:
        return
    length = tl.load(lengths + sequence).to(tl.int32)
    blocks += tl.load(first_block + sequence)
    kv = tl.program_id(1) // TILES
    member = tl.program_id(1) % TILES * BH + tl.arange(0, BH)
    mine = member < group
    head = (kv * group + member).to(tl.int64)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    whole = mine[:, None] & (d < D)[None, :]
    query = tl.load(q + token * q_row + head[:, None] * q_head + d[None, :], mask=whole, other=0.0).to(DOT)
    if E > 0:
        at = q_shared + token * shared_row + head[:, None] * shared_head + e[None, :]
        extra = tl.load(at, mask=mine[:, None] & (e < E)[None, :], other=0.0).to(DOT)
    best = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    begin, end = _range(length, top_k, WINDOW, picks is not None, BN)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        inside = n < end
        if picks is not None:
            n = tl.load(picks + sequence * top_k + n, mask=inside, other=0).to(tl.int32)
            inside &= n < length
        block = tl.load(blocks + n // BLOCK, mask=inside, other=0)
        row = (block * key_block + (n % BLOCK).to(tl.int64) * key_row + kv.to(tl.int64) * key_head)[:, None]
        wanted = inside[:, None] & (d < D)[None, :]
        key = tl.load(keys + row + d[None, :], mask=wanted, other=0.0).to(DOT)
        logits = tl.dot(query, key.T, input_precision="ieee")
        if E > 0:
            rest = tl.load(keys + row + D + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0).to(DOT)
            logits = tl.dot(extra, rest.T, logits, input_precision="ieee")
        logits = tl.where(inside[None, :], logits * scale, -float("inf"))
        larger = tl.maximum(best, tl.max(logits, axis=1))
        shift = tl.where(larger == -float("inf"), 0.0, larger)  # nothing seen yet
        kept = tl.exp(best - shift)
        share = tl.exp(logits - shift[:, None])
        total = total * kept + tl.sum(share, axis=1)
        if values is None:
            value = key
        else:
            value = tl.load(values + row + d[None, :], mask=wanted, other=0.0).to(DOT)
        acc = tl.dot(share.to(DOT), value, acc * kept[:, None], input_precision="ieee")
        best = larger
    if PARTED:
        part = (sequence * heads + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts + part[:, None] * D + d[None, :], acc, mask=whole)
        tl.store(stats + part * 2, best, mask=mine)
        tl.store(stats + part * 2 + 1, total, mask=mine)
    else:
        total, factor = _add_sink(best, total, sinks, head, mine)
        acc *= (factor / total)[:, None]
        at = out + (token * heads + head)[:, None] * D + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=whole)


@triton.jit
def merge(parts, stats, starts, sinks, out, heads, count, D: tl.constexpr, BD: tl.constexpr):
    """out [T, heads, D] from the `count` parts that `attend` left, added up in their order."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - token != 1:
        return
    d = tl.arange(0, BD)
    first = (sequence * heads + head) * count
    best = tl.load(stats + first * 2)
    for i in range(1, count):
        best = tl.maximum(best, tl.load(stats + (first + i) * 2))
    total = 0.0
    acc = tl.zeros((BD,), tl.float32)
    for i in range(0, count):
        factor = tl.exp(tl.load(stats + (first + i) * 2) - best)
        total += tl.load(stats + (first + i) * 2 + 1) * factor
        acc += tl.load(parts + (first + i) * D + d, mask=d < D, other=0.0) * factor
    total, factor = _add_sink(best, total, sinks, head, head < heads)
    acc *= factor / total
    tl.store(out + (token * heads + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)
