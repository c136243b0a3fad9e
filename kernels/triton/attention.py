"""From the attention operations to launches of `attend`, and which sequences are torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from tutel_pack.kernels.ops import FlatLayout, Layout
from tutel_pack.kernels.triton import attend
from tutel_pack.kernels.triton.chips import Chip
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.matmul import dot_type

_STEP = {"cuda": 72 << 10, "hip": 32 << 10, "interpreter": 72 << 10}
"""Bytes of keys and values that a step reads: 64 and 16 positions of DeepSeek's latents, of which more spill
registers."""

_PICKED = 36 << 10
"""The same of positions that were picked, which have an address each."""

_POSITIONS = 64
"""Of a step, at most: as many as a block of the engine's cache has, for then a step reads from one place."""

_SUMS = 16 << 10
"""Elements of a tile's accumulator: query heads times dimensions of a value. Twice as many do not fit the registers."""

_STEPS_OF_A_PART = 4

_PARTS, _COLUMNS = 64, 64
"""That a program joins at a time: most sequences have no more parts, and a head's columns go to several programs."""


@dataclass(frozen=True)
class Tile:
    """heads: query heads of a program.  positions: of a step."""

    heads: int
    positions: int
    warps: int
    stages: int


def tile_for(chip: Chip, group: int, d: int, row_bytes: int, picked: bool) -> Tile:
    """group: query heads of a key head.  d: dimensions of a value, a power of two.  row_bytes: that a position has."""
    heads, positions = max(16, min(triton.next_power_of_2(group), _SUMS // d)), _POSITIONS
    step = min(_STEP[chip.vendor], _PICKED) if picked else _STEP[chip.vendor]
    room = min(step, chip.shared - heads * row_bytes)  # queries are in shared memory, too
    while positions > 16 and positions * row_bytes > room:
        positions //= 2
    return Tile(heads, positions, 8 if chip.vendor == "cuda" and heads * d == _SUMS else 4, 2)


def parts_for(chip: Chip, programs: int, positions: int, tile: Tile) -> int:
    """Into how many parts `positions` are cut so that every unit of the chip has work, of a few steps at least."""
    wanted, steps = -(-2 * chip.units // programs), -(-positions // tile.positions)
    return max(1, min(wanted, steps // _STEPS_OF_A_PART))


@dataclass(frozen=True)
class Queries:
    """q [T, heads, D], and q_shared [T, heads, E] for the dimensions of a key that are none of its value; each may be
    strided, but for its last dimension."""

    q: Tensor
    q_shared: Tensor | None = None

    def arguments(self) -> dict:
        rest = self.q_shared
        (row, head, _), (shared_row, shared_head, _) = self.q.stride(), (0, 0, 0) if rest is None else rest.stride()
        return {
            "q": self.q, "q_shared": rest, "q_row": row, "q_head": head, "shared_row": shared_row,
            "shared_head": shared_head, "D": self.q.shape[2], "E": 0 if rest is None else rest.shape[2],
        }  # fmt: skip


def attending(
    chip: Chip, queries: Queries, keys: Tensor, values: Tensor | None, layout: FlatLayout, out: Tensor, scale: float,
    window: int | None = None, sinks: Tensor | None = None, picks: Tensor | None = None,
    tile: Tile | None = None, parts: int | None = None,
) -> list[Launch]:  # fmt: skip
    """What fills out [T, heads, D] for the sequences that have one new token.

    keys, values: [blocks, B, kv_heads, ·], laid out alike; no values if they are the first D dimensions of the keys.
    picks int64 [S, top_k]. tile, parts: other ones than the rules choose.
    """
    (_, heads, d), (_, block, kv_heads, width) = out.shape, keys.shape
    if keys.stride(3) != 1 or (values is not None and values.stride() != keys.stride()):
        raise ValueError("pools of keys and values must be laid out alike, the last dimension without gaps")
    sequences, group = len(layout.lengths), heads // kv_heads
    row_bytes = (width + (0 if values is None else d)) * keys.element_size()
    bd = max(16, triton.next_power_of_2(d))
    tile = tile or tile_for(chip, group, bd, row_bytes, picks is not None)
    tiles = -(-group // tile.heads)
    positions = picks.shape[1] if picks is not None else min(window or layout.most * block, layout.most * block)
    parts = parts or parts_for(chip, sequences * kv_heads * tiles, positions, tile)
    partial = torch.empty(sequences, heads, parts, d, dtype=torch.float32, device=out.device) if parts > 1 else None
    stats = torch.empty(sequences, heads, parts, 2, dtype=torch.float32, device=out.device) if parts > 1 else None
    own = queries.arguments()
    arguments = dict(
        **own, keys=keys, values=values, starts=layout.starts, lengths=layout.lengths, blocks=layout.blocks,
        first_block=layout.first_block, picks=picks, sinks=sinks if parts == 1 else None,
        out=out, parts=partial, stats=stats,
        scale=scale * math.log2(math.e), heads=heads, group=group, top_k=0 if picks is None else picks.shape[1],
        key_block=keys.stride(0), key_row=keys.stride(1), key_head=keys.stride(2),
        BLOCK=block, ONE=picks is None and block % tile.positions == 0, WINDOW=window, PARTED=parts > 1,
        DOT=dot_type(chip, out.dtype), TILES=tiles, FLAT=values is None or chip.vendor != "cuda",
        BH=tile.heads, BN=tile.positions, BD=bd, BE=max(16, triton.next_power_of_2(own["E"])),
    )  # fmt: skip
    launches = [Launch(attend.attend, (sequences, kv_heads * tiles, parts), arguments, tile.warps, tile.stages)]
    if parts > 1:
        launches.append(joining(partial, stats, layout.starts, sinks, out))
    return launches


def joining(parts: Tensor, stats: Tensor, starts: Tensor, sinks: Tensor | None, out: Tensor) -> Launch:
    """Of parts [S, heads, count, D] and their stats [S, heads, count, 2]."""
    sequences, heads, count, d = parts.shape
    arguments = dict(
        parts=parts, stats=stats, starts=starts, sinks=sinks, out=out, heads=heads, count=count,
        D=d, BP=_PARTS, BD=_COLUMNS,
    )  # fmt: skip
    return Launch(attend.merge, (sequences, heads, -(-d // _COLUMNS)), arguments)


def stack_picks(picks: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """int64 [S, top_k] of sequences with one new token; one without picks has no more than top_k positions."""
    chosen = [p for p in picks if p is not None]
    if not chosen:
        return None
    everything = torch.arange(chosen[0].shape[1], device=device)
    return torch.stack([everything if p is None else p[0] for p in picks])


Run = Callable[[Sequence[Tensor], Layout, Sequence[int]], Tensor]
"""Attention of queries, in one tensor or in parts, by a Layout of some of a batch's sequences, which are named."""


def by_length(queries: Sequence[Tensor], layout: Layout, decode: Run, prefill: Run) -> Tensor:
    """decode takes the sequences with one new token, prefill those with several."""
    counts = [stop - start for start, stop in zip(layout.starts, layout.starts[1:])]
    if max(counts) == 1:
        return decode(queries, layout, range(len(counts)))
    if 1 not in counts:
        return prefill(queries, layout, range(len(counts)))
    out, q = None, queries[0]
    for run, chosen in ((decode, lambda count: count == 1), (prefill, lambda count: count > 1)):
        which = [s for s, count in enumerate(counts) if chosen(count)]
        rows = torch.cat([torch.arange(layout.starts[s], layout.starts[s + 1]) for s in which]).to(q.device)
        part = run([q[rows] for q in queries], _only(layout, which), which)
        out = q.new_empty(len(q), *part.shape[1:]) if out is None else out
        out.index_copy_(0, rows, part)
    return out


def _only(layout: Layout, sequences: Sequence[int]) -> Layout:
    """What attention needs of a Layout with some of the sequences."""
    starts = [0]
    for s in sequences:
        starts.append(starts[-1] + layout.starts[s + 1] - layout.starts[s])
    lengths, tables = ([of[s] for s in sequences] for of in (layout.lengths, layout.tables))
    return replace(layout, starts=starts, lengths=lengths, tables=tables)
