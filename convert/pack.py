"""One unit of work: bytes of the source in, bytes of the artifact out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutel_pack.artifact import Entry, FileWriter
from tutel_pack.convert.dialects import read_rows
from tutel_pack.convert.families import Piece
from tutel_pack.convert.layout import Unit
from tutel_pack.convert.source import Source
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, GLOBAL, SCALE, PackedTensor
from tutel_pack.quant import exact
from tutel_pack.quant.codec import Encoded, NonFiniteError, amax_of, decode, encode
from tutel_pack.quant.nvfp4 import global_scale

Rows = PackedTensor | Tensor

_ENERGY_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Loss:
    """float64 [experts of the unit]: sums of squared errors and of squares; None for what was passed through."""

    error: Tensor
    energy: Tensor


def read_unit(source: Source, unit: Unit) -> list[Rows]:
    """The rows of a unit's pieces, as the source stores them. What several pieces lie in is read once."""
    read: dict[tuple, Rows] = {}
    rows = []
    for piece in unit.pieces():
        start, stop = _covering(piece)
        key = piece.stored.name, start, stop
        if key not in read:
            read[key] = read_rows(source, piece.stored, start, stop)
        rows.append(_pick(read[key], piece.first - start + piece.offset, piece.rows, piece.step))
    return rows


def _covering(piece: Piece) -> tuple[int, int]:
    """The rows of the source that a piece is read from: between its own lie those of others; of a transposed expert no
    part is cheaper to read than the whole."""
    if piece.stored.transposed:
        n = piece.stored.shape[1]
        return piece.first // n * n, piece.first // n * n + n
    return piece.first, piece.first + piece.rows * piece.step


def _pick(rows: Rows, first: int, count: int, step: int) -> Rows:
    """Every step-th of the rows, from the first. Packed ones are picked only where no rows share a scale."""
    picked = slice(first, first + count * step, step)
    if isinstance(rows, Tensor):
        return rows[picked]
    if (first, count) == (0, rows.shape[0]):
        return rows
    scale = None if rows.scale is None else rows.scale[picked]
    return PackedTensor(rows.format, (count, rows.shape[1]), (count,), rows.data[picked], scale, rows.global_scale)


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
        _write_plain(unit, entry, rows, writer)
        return None
    if any(_is_kept(r, entry) for r in rows):
        return _pack_pieces(unit, entry, rows, writer, rule)
    if unit.segment is None and _may_be_exact(rows, entry):
        return _pack_experts(unit, entry, rows, writer, rule)
    x = torch.cat([_values(r) for r in rows])
    segments, shape = entry.segments, (unit.experts, entry.shape[-2], x.shape[1])
    if unit.segment is not None:
        segments, shape = (unit.rows,), (1, unit.rows, x.shape[1])
    scales = None if amax is None else global_scale(amax).view(1, 1)
    encoded = _encode(unit, entry, x.view(shape), segments, rule, scales, 0, unit.segment or 0)
    _write_packed(unit, entry, encoded.tensor, writer)
    return Loss(encoded.error, encoded.energy)


def _is_kept(rows: Rows, entry: Entry) -> bool:
    """Whether rows are in the entry's format already, so that their bytes are only re-laid."""
    return isinstance(rows, PackedTensor) and rows.format == entry.format


def _encode(unit: Unit, entry: Entry, x: Tensor, segments, rule: str | None, scales: Tensor | None, expert: int, segment: int) -> Encoded:
    """encode x [e, n, K], which begins at that expert of the unit and at that segment of it."""
    try:
        return encode(x, entry.format, segments, rule, scales)
    except NonFiniteError as e:
        e_index, row, column = e.index
        raise InputError(_non_finite(unit, entry, expert + e_index, segment, row, column)) from None


def _values(rows: Rows) -> Tensor:
    """Rows as a float tensor: narrow types stay as they are, quantized ones become float32."""
    if isinstance(rows, Tensor):
        return rows
    return decode(rows) if rows.format.block else rows.data


def _write_plain(unit: Unit, entry: Entry, rows: list[Rows], writer: FileWriter) -> None:
    if len(rows) == 1:
        data = rows[0] if isinstance(rows[0], Tensor) else rows[0].data
    else:
        data = _joined(unit, entry.shape, rows)
    if data.numel() == math.prod(entry.shape):
        data = data.reshape(entry.shape)
    if place := first_non_finite(data):
        raise InputError(_damaged(unit, [unit.first + place[0], *place[1:]]))
    writer.write(unit.target.name, (unit.first,), data)


def _joined(unit: Unit, shape: tuple[int, ...], rows: list[Rows]) -> Tensor:
    """A convolution, [C, 1, K], from its parts, or the biases of experts, [E, N], from vectors of their segments: segment
    by segment within each expert."""
    if len(shape) == 3:
        return torch.cat([_values(r) for r in rows])
    segments = unit.target.tensor.segments or shape[-1:]
    count = len(segments)
    experts = [rows[i : i + count] for i in range(0, len(rows), count)]
    return torch.cat([torch.cat([r.view(-1, n) for r, n in zip(row, segments)], dim=1) for row in experts])


def _pack_pieces(unit: Unit, entry: Entry, rows: list[Rows], writer: FileWriter, rule: str | None) -> Loss | None:
    """Re-lay the bytes of each piece where its segment stands. A piece in another format is encoded by itself."""
    segments = range(len(entry.segments)) if unit.segment is None else [unit.segment]
    error, energy = torch.zeros(2, unit.experts, dtype=torch.float64)
    for i, piece in enumerate(rows):
        expert, segment = i // len(segments), segments[i % len(segments)]
        if _is_kept(piece, entry):
            _check_finite(unit, entry, expert, segment, piece)
        else:
            encoded = _encode(unit, entry, _values(piece)[None], None, rule, None, expert, segment)
            error[expert], energy[expert] = error[expert] + encoded.error[0], energy[expert] + encoded.energy[0]
            piece = encoded.tensor.expert(0)
        _write_rows(unit, entry, piece, unit.expert + expert, segment, unit.first, writer)
    return None if all(_is_kept(r, entry) for r in rows) else Loss(error, energy)


def _may_be_exact(rows: list[Rows], entry: Entry) -> bool:
    """Whether rows are such that exact.cast may find them in the entry's format."""
    return entry.format.name in ("nvfp4", "fp8") and all(isinstance(r, PackedTensor) and r.format.name == "mxfp4" for r in rows)


def _pack_experts(unit: Unit, entry: Entry, rows: list[Rows], writer: FileWriter, rule: str | None) -> Loss:
    """Expert by expert: cast without loss where that can be, else decoded and encoded."""
    error, energy = torch.zeros(2, unit.experts, dtype=torch.float64)
    count = len(entry.segments)
    for expert in range(unit.experts):
        pieces = rows[expert * count : (expert + 1) * count]
        for segment, piece in enumerate(pieces):
            _check_finite(unit, entry, expert, segment, piece)
        if cast := exact.cast(pieces, entry.format):
            energy[expert] = sum(map(_energy, pieces))
        else:
            x = torch.cat([_values(piece) for piece in pieces])[None]
            encoded = _encode(unit, entry, x, entry.segments, rule, None, expert, 0)
            error[expert], energy[expert] = encoded.error[0], encoded.energy[0]
            cast = _split(encoded.tensor.expert(0))
        for segment, piece in enumerate(cast):
            _write_rows(unit, entry, piece, unit.expert + expert, segment, 0, writer)
    return Loss(error, energy)


def _energy(packed: PackedTensor) -> float:
    """The sum of squares of an [n, K], a few rows at a time."""
    rows = max(1, _ENERGY_ELEMENTS // packed.shape[1])
    return sum(decode(tile).double().square().sum().item() for _, tile in packed.row_tiles(rows))


def _split(packed: PackedTensor) -> list[PackedTensor]:
    """The segments of an [n, K] as matrices of their own."""
    return [tile for _, tile in packed.row_tiles(packed.shape[0] + packed.block_rows)]


def _check_finite(unit: Unit, entry: Entry, expert: int, segment: int, piece: PackedTensor) -> None:
    block = piece.format.block or (1, 1)
    if place := first_non_finite(piece.data):
        raise InputError(_non_finite(unit, entry, expert, segment, *place))
    if piece.scale is not None and (place := _first_bad_scale(piece.scale)):
        raise InputError(_non_finite(unit, entry, expert, segment, *(i * b for i, b in zip(place, block))))
    if piece.global_scale is not None and first_non_finite(piece.global_scale):
        raise InputError(_non_finite(unit, entry, expert, segment, 0, 0))


def _first_bad_scale(scale: Tensor) -> tuple[int, ...] | None:
    """Place of the first block scale that is no number; bytes are e8m0, whose NaN is 255."""
    if scale.dtype != torch.uint8:
        return first_non_finite(scale)
    return tuple((scale == 255).nonzero()[0].tolist()) if scale.numel() and scale.max() == 255 else None


def first_non_finite(t: Tensor) -> tuple[int, ...] | None:
    """Place of the first NaN or infinity of a float tensor, None if there is none."""
    if not t.numel():
        return None
    if t.dtype == torch.float8_e4m3fn:  # few operations take it, and its only NaNs are 0x7F and 0xFF
        t = t.view(torch.uint8) & 0x7F
        return tuple((t == 0x7F).nonzero()[0].tolist()) if t.max() == 0x7F else None
    if not t.is_floating_point() or all(torch.isfinite(end) for end in torch.aminmax(t)):
        return None
    return tuple((~torch.isfinite(t)).nonzero()[0].tolist())


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


def _non_finite(unit: Unit, entry: Entry, expert: int, segment: int, row: int, column: int) -> str:
    """expert: counted from the unit's first; row: from the unit's first row, or the segment's start."""
    row += unit.first + sum(entry.segments[:segment])
    return _damaged(unit, [unit.expert + expert, row, column][0 if len(entry.shape) == 3 else 1 :])


def _damaged(unit: Unit, place: list[int]) -> str:
    return f"{unit.target.name} has a weight that is NaN or infinite at {place}: the checkpoint is damaged; download it again."
