"""Attention of one new token per sequence to what a paged cache has of it.

The positions of a sequence are cut into as many parts as there are programs along the third axis of the grid; `merge`
joins them, in an order that is always the same. A program has the query heads of a tile, all of the same key head.

Letters: h query heads of a tile, n positions of a step, d dimensions of a value, e dimensions of a key beyond those.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _range(low, high, BN: tl.constexpr):
    """(first, last) of the positions low … high − 1, or of as many picks, that this program attends to: whole steps, of
    which the first may begin before low."""
    low = low // BN * BN
    share = tl.cdiv(tl.cdiv(high - low, BN), tl.num_programs(2)) * BN
    begin = low + tl.program_id(2) * share
    return begin, tl.minimum(begin + share, high)


@triton.jit
def _places(blocks, n, start, inside, key_block, key_row, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """(offset, offsets from it) of the positions n [BN] in a pool. ONE: they begin with `start` and share a block."""
    if ONE:
        return tl.load(blocks + start // BLOCK) * key_block + start % BLOCK * key_row, (n - start) * key_row
    else:
        block = tl.load(blocks + n // BLOCK, mask=inside, other=0)
        return 0, block * key_block + (n % BLOCK).to(tl.int64) * key_row


@triton.jit
def _at(pool, home, rows, columns, FLAT: tl.constexpr):
    """Pointers [rows, columns]. FLAT: by one offset each from a place that all share, not by one from a row's place."""
    if FLAT:
        return pool + home + (rows[:, None] + columns[None, :])
    else:
        return pool + home + rows[:, None] + columns[None, :]


@triton.jit
def _add_sink(best, total, sinks, head, mine):
    """(sum of powers with one more logit, if there is one; factor of what was added up before)."""
    if sinks is None:
        return total, 1.0
    else:
        sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
        larger = tl.maximum(best, sink)
        factor = tl.exp2(best - larger)
        return total * factor + tl.exp2(sink - larger), factor


@triton.jit
def attend(
    q, q_shared, keys, values, starts, lengths, blocks, first_block, picks, sinks, out, parts, stats,
    scale, heads, group, top_k,
    q_row, q_head, shared_row, shared_head, key_block, key_head, key_row: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, WINDOW: tl.constexpr,
    PARTED: tl.constexpr, DOT: tl.constexpr, TILES: tl.constexpr, FLAT: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out [T, heads, D] of the sequences that have one new token, or what `merge` makes it of.

    q [T, heads, D]; q_shared [T, heads, E], None where E is 0.  keys [·, BLOCK, ·, D + E]: a pool; values of D, None if
        they are the first D dimensions of the keys.  Strides in elements: of a token and a head of the queries, of a
        block, a head and a position of the pools; the last is a constant so that offsets in a step are no registers.
    starts int64 [S + 1], lengths int64 [S], as of ops.Layout.  blocks int64: all tables, one after another, that of a
        sequence from first_block int64 [S] on.
    picks int64 [S, top_k]: positions to attend to; None for all, or for the last WINDOW.
    sinks [heads] or None.  scale: of the logits, times log₂ e, for powers are those of two.
    group: query heads of a key head, in TILES tiles of BH.
    PARTED: parts float32 [S, heads, programs, D] have sums of values, stats float32 [S, heads, programs, 2] the largest
        logit and the sum of powers under them; otherwise there is one program.
    ONE: the positions of a step are all in one block, as picks are not.
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
    low = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    begin, end = _range(low, length if picks is None else top_k, BN)
    keys += kv.to(tl.int64) * key_head
    if values is not None:
        values += kv.to(tl.int64) * key_head
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        inside = (n - low).to(tl.uint32) < (end - low).to(tl.uint32)  # and not before low
        if picks is not None:
            n = tl.load(picks + sequence * top_k + n, mask=inside, other=0).to(tl.int32)
            inside &= n < length
        home, rows = _places(blocks, n, start, inside, key_block, key_row, BLOCK, ONE)
        wanted = inside[:, None] if D == BD else inside[:, None] & (d < D)[None, :]
        key = tl.load(_at(keys, home, rows, d, FLAT), mask=wanted, other=0.0).to(DOT)
        logits = tl.dot(query, key.T, input_precision="ieee")
        if E > 0:
            partly = inside[:, None] if E == BE else inside[:, None] & (e < E)[None, :]
            rest = tl.load(_at(keys, home, rows, D + e, FLAT), mask=partly, other=0.0).to(DOT)
            logits = tl.dot(extra, rest.T, logits, input_precision="ieee")
        logits = tl.where(inside[None, :], logits * scale, -float("inf"))
        larger = tl.maximum(best, tl.max(logits, axis=1))
        if picks is not None:  # of which a step may see none
            larger = tl.maximum(larger, -1e38)
        kept = tl.exp2(best - larger)
        share = tl.exp2(logits - larger[:, None])
        total = total * kept + tl.sum(share, axis=1)
        if values is None:
            value = key
        else:
            value = tl.load(_at(values, home, rows, d, FLAT), mask=wanted, other=0.0).to(DOT)
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


@triton.jit(do_not_specialize=["count"])
def merge(
    parts, stats, starts, sinks, out, heads, count, D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """BD columns of out [T, heads, D] from the `count` parts that `attend` left, BP of them at a time: part i goes to
    sum i % BP, which has a largest logit of its own, and these sums are added up at the end."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - token != 1:
        return
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    best = tl.full((BP,), -1e38, tl.float32)  # finite, for a part may have no positions
    total = tl.zeros((BP,), tl.float32)
    acc = tl.zeros((BP, BD), tl.float32)
    for start in range(0, count, BP):
        i = start + tl.arange(0, BP)
        inside, part = i < count, (sequence * heads + head) * count + i
        logit = tl.load(stats + part * 2, mask=inside, other=-float("inf"))
        added = tl.load(stats + part * 2 + 1, mask=inside, other=0.0)
        sums = tl.load(parts + part[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        larger = tl.maximum(best, logit)
        kept, share = tl.exp2(best - larger), tl.exp2(logit - larger)
        total = total * kept + added * share
        acc = acc * kept[:, None] + sums * share[:, None]
        best = larger
    largest = tl.max(best, axis=0)
    share = tl.exp2(best - largest)
    total, factor = _add_sink(largest, tl.sum(total * share, axis=0), sinks, head, head < heads)
    joined = tl.sum(acc * share[:, None], axis=0) * (factor / total)
    tl.store(out + (token * heads + head) * D + d, joined.to(out.dtype.element_ty), mask=d < D)
