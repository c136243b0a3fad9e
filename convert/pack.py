"""One unit of work: bytes of the source in, bytes of the artifact out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutel_pack.artifact import Entry, FileWriter
from tutel_pack.convert.dialects import read_rows
from tutel_pack.convert.layout import Unit
from tutel_pack.convert.source import Source
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, GLOBAL, SCALE, PackedTensor
from tutel_pack.quant.codec import NonFiniteError, amax_of, decode, encode
from tutel_pack.quant.nvfp4 import global_scale

Rows = PackedTensor | Tensor


@dataclass(frozen=True)
class Loss:
    """float64 [experts of the unit]: sums of squared errors and of squares; None for what was passed through."""

    error: Tensor
    energy: Tensor


def read_unit(source: Source, unit: Unit) -> list[Rows]:
    """The rows of a unit's pieces, as the source stores them."""
    return [read_rows(source, piece.stored, piece.first, piece.first + piece.rows) for piece in unit.pieces()]


def expert_amax(source: Source, units: list[Unit]) -> dict[int, Tensor]:
    """Largest magnitude of each expert that is cut into several units: one more pass over them, for the global scale."""
    amax: dict[int, Tensor] = {}
    for unit in units:
        if unit.segment is not None:
            for rows in read_unit(source, unit):
                found = amax_of(_values(rows))
                amax[unit.expert] = torch.maximum(amax.get(unit.expert, found), found)
    return amax


def pack_unit(unit: Unit, entry: Entry, rows: list[Rows], writer: FileWriter, rule: str | None, amax: Tensor | None) -> Loss | None:
    """Write a unit's rows in the entry's format.

    amax: of the whole expert, where the unit is only a part of it and the format has a global scale.
    InputError names the tensor and the place of a weight that is not finite.
    """
    if entry.format is None:
        _write_plain(unit, rows[0], writer)
        return None
    if all(isinstance(r, PackedTensor) and r.format == entry.format for r in rows):
        _write_pieces(unit, entry, rows, writer)
        return None
    x = torch.cat([_values(r) for r in rows])
    segments, shape = entry.segments, (unit.experts, entry.shape[-2], x.shape[1])
    if unit.segment is not None:
        segments, shape = (unit.rows,), (1, unit.rows, x.shape[1])
    scales = None if amax is None else global_scale(amax).view(1, 1)
    try:
        encoded = encode(x.view(shape), entry.format, segments, rule, scales)
    except NonFiniteError as e:
        raise InputError(_non_finite(unit, entry, e.index)) from None
    _write_packed(unit, entry, encoded.tensor, writer)
    return Loss(encoded.error, encoded.energy)


def _values(rows: Rows) -> Tensor:
    """Rows as a float tensor: narrow types stay as they are, quantized ones become float32."""
    if isinstance(rows, Tensor):
        return rows
    return decode(rows) if rows.format.block else rows.data


def _write_plain(unit: Unit, rows: Rows, writer: FileWriter) -> None:
    data = rows if isinstance(rows, Tensor) else rows.data
    writer.write(unit.target.name, (unit.first,), data)


def _write_pieces(unit: Unit, entry: Entry, rows: list[PackedTensor], writer: FileWriter) -> None:
    """Re-lay the bytes of each piece where its segment stands."""
    segments = range(len(entry.segments)) if unit.segment is None else [unit.segment]
    for i, piece in enumerate(rows):
        _write_rows(unit, entry, piece, unit.expert + i // len(segments), segments[i % len(segments)], unit.first, writer)


def _write_packed(unit: Unit, entry: Entry, packed: PackedTensor, writer: FileWriter) -> None:
    if unit.segment is not None:
        _write_rows(unit, entry, packed.expert(0), unit.expert, unit.segment, unit.first, writer)
        return
    matrix = len(entry.shape) == 2
    for suffix, part in packed.parts().items():
        if part is not None:
            writer.write(unit.target.name + suffix, () if matrix else (unit.expert,), part[0] if matrix else part)


def _write_rows(unit: Unit, entry: Entry, packed: PackedTensor, expert: int, segment: int, first: int, writer: FileWriter) -> None:
    """Write an [n, K] of one segment whose first row is `first`, counted from the segment's start."""
    rows = packed.block_rows
    before = entry.segments[:segment]
    places = {
        DATA: sum(before) + first,
        SCALE: sum(math.ceil(n / rows) for n in before) + first // rows,
        GLOBAL: segment,
    }
    lead = () if len(entry.shape) == 2 else (expert,)
    for suffix, part in packed.parts().items():
        if part is not None:
            writer.write(unit.target.name + suffix, (*lead, places[suffix]), part)


def _non_finite(unit: Unit, entry: Entry, index: tuple[int, int, int]) -> str:
    expert, row, column = index
    row += unit.first + sum(entry.segments[: unit.segment or 0])
    place = [row, column] if len(entry.shape) == 2 else [unit.expert + expert, row, column]
    return f"{unit.target.name} has a weight that is NaN or infinite at {place}: the checkpoint is damaged; download it again."
