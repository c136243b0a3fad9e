"""From targets and a recipe to entries, and from entries to units of work: all of it before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tutel_pack.artifact import Entry
from tutel_pack.convert.families import Piece, Target
from tutel_pack.errors import InputError
from tutel_pack.formats import Format
from tutel_pack.quant.recipe import Recipe
from tutel_pack.tensors import KEEP, layer_of

UNIT_ELEMENTS = 1 << 25
"""Elements of a unit: 64 MiB of BF16."""
_CUT_ROWS = 128
"""A matrix is cut at multiples of this, the largest block edge, so that no format has a block in two units."""


@dataclass(frozen=True)
class Unit:
    """A part of a target that is read, encoded and written at once: whole experts, or rows of one segment of one.

    expert, experts: the first and how many (0 and 1 for a matrix).
    segment: the one that `first … first + rows − 1` lie in, counted from its start; None for whole experts.
    """

    target: Target
    expert: int
    experts: int
    segment: int | None = None
    first: int = 0
    rows: int = 0

    def pieces(self) -> list[Piece]:
        """What to read, expert by expert and segment by segment."""
        grid = self.target.pieces[self.expert : self.expert + self.experts]
        if self.segment is None:
            return [piece for row in grid for piece in row]
        whole = grid[0][self.segment]
        return [replace(whole, first=whole.first + self.first * whole.step, rows=self.rows)]


def entry_for(target: Target, recipe: Recipe) -> Entry:
    """Where a target goes and in which format."""
    stored = {piece.stored.format for row in target.pieces for piece in row}
    dtypes = {piece.stored.dtype for row in target.pieces for piece in row}
    if target.tensor.role == KEEP:
        if len(dtypes) > 1 or len(stored) > 1:
            raise InputError(f"{target.name} mixes types in the source, which is not supported for this kind of tensor.")
        fmt = stored.pop()
        if fmt is not None and fmt.block:
            return Entry(_file(target.name), target.tensor.shape, fmt, target.tensor.shape[-2:-1])
        if not target.tensor.whole or dtypes != {torch.int64}:
            _check_type(target, dtypes)
        return Entry(_file(target.name), target.tensor.shape, dtype=dtypes.pop())
    if None in stored:
        _check_type(target, dtypes)
    # Pieces in different formats have no common one to keep.
    source = stored.pop() if len(stored) == 1 else Format("mixed", None)
    chosen = recipe.format_for(target.name, target.tensor.role, source)
    if chosen.name == "mixed":
        raise InputError(f"{target.name} mixes formats in the source: give it one with --override.")
    return Entry(_file(target.name), target.tensor.shape, chosen, target.tensor.segments or target.tensor.shape[-2:-1])


def _check_type(target: Target, dtypes: set[torch.dtype]) -> None:
    """InputError for what is neither a weight of one of the usual types nor one that a dialect has found the scales of."""
    if other := dtypes - {torch.bfloat16, torch.float16, torch.float32}:
        found = ", ".join(sorted(map(str, other)))
        raise InputError(f"{target.name} has the type {found} in the source, where BF16, F16 or F32 is needed.")


def _file(name: str) -> str:
    layer = layer_of(name)
    return "base.safetensors" if layer is None else f"layers-{layer:05d}.safetensors"


def units(target: Target, entry: Entry) -> Iterator[Unit]:
    """The units of a target, of at most UNIT_ELEMENTS where a cut allows it."""
    if entry.format is None and (len(target.tensor.shape) > 2 or sum(map(len, target.pieces)) > 1):
        yield Unit(target, 0, len(target.pieces))  # small things: convolutions, biases of experts
        return
    segments = entry.segments or target.tensor.shape[:1]
    columns = target.tensor.shape[-1] if len(target.tensor.shape) > 1 else 1
    size = sum(segments) * columns
    if size <= UNIT_ELEMENTS:
        step, total = max(1, UNIT_ELEMENTS // max(1, size)), len(target.pieces)
        for expert in range(0, total, step):
            yield Unit(target, expert, min(step, total - expert))
        return
    step = max(1, UNIT_ELEMENTS // columns // _CUT_ROWS) * _CUT_ROWS
    for expert in range(len(target.pieces)):
        for segment, rows in enumerate(segments):
            for first in range(0, rows, step):
                yield Unit(target, expert, 1, segment, first, min(step, rows - first))
