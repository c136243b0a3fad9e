"""One unit of work: bytes of the source in, bytes of the artifact out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutel_pack.artifact import Entry, FileWriter
from tutel_pack.convert.dialects import read_rows
from tutel_pack.convert.families import Piece
from tutel_pack.convert.layout import Unit
from tutel_pack.convert.source import Source
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, GLOBAL, SCALE, Format, PackedTensor
from tutel_pack.quant import exact
from tutel_pack.quant.codec import NonFiniteError, amax_of, decode, encode
from tutel_pack.quant.nvfp4 import global_scale

Rows = PackedTensor | Tensor

_TILE = 1 << 17
"""Elements that are decoded at a time where their values are only looked at."""
_LARGEST = 448.0
"""Of the elements of any format."""


@dataclass(frozen=True)
class Loss:
    """What it cost to pack an expert, or a part of it.

    error, energy: sums of squared errors and of squares.  exact: whether all of it was cast, so that nothing was lost.
    """

    error: float
    energy: float
    exact: bool


@dataclass(frozen=True)
class Shared:
    """What the segments of an expert share in a format with a global scale. Those that are kept have their own.

    scale: float32 [1].  cast: whether the segments are mxfp4 that this scale holds without loss.
    """

    scale: Tensor
    cast: bool


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


def shared_scales(source: Source, units: list[Unit], fmt: Format) -> dict[int, Shared]:
    """Of each expert that is cut into several units, by one more pass over them."""
    found = defaultdict(list)
    for unit in units:
        if unit.segment is not None and unit.pieces()[0].stored.format != fmt:
            found[unit.expert] += map(_extent, read_unit(source, unit))
    return {expert: _shared(extents) for expert, extents in found.items()}


def _extent(rows: Rows) -> tuple[Tensor, exact.Span | None]:
    """(largest magnitude, exponents of mxfp4)."""
    return amax_of(_values(rows)), exact.span(rows) if _is_mxfp4(rows) else None


def _shared(extents: Iterable[tuple[Tensor, exact.Span | None]]) -> Shared:
    amax, spans = zip(*extents)
    scale = None if None in spans else exact.global_scale(spans)
    if scale is not None:
        return Shared(scale, True)
    return Shared(global_scale(torch.stack(amax).amax()).view(1), False)


def pack_unit(
    unit: Unit, entry: Entry, rows: list[Rows], writer: FileWriter, rule: str | None, shared: Shared | None
) -> list[tuple[int, Loss]]:
    """Write a unit's rows in the entry's format. What is in it already keeps its bytes, mxfp4 is cast where it can be, and
    the rest is encoded; how an expert is cut into units changes nothing of that. Returns (expert, Loss) of what is not kept.

    shared: of the whole expert, where the unit is only a part of it and the format has a global scale.
    InputError names the tensor and the place of a weight that is not finite.
    """
    if entry.format is None:
        _write_plain(unit, entry, rows, writer)
        return []
    segments = range(len(entry.segments)) if unit.segment is None else [unit.segment]
    losses = []
    for i in range(unit.experts):
        places = [_Place(unit.target.name, entry, unit.expert + i, segment, unit.first) for segment in segments]
        pieces = rows[i * len(places) : (i + 1) * len(places)]
        losses += [(unit.expert + i, loss) for loss in _pack_expert(places, pieces, writer, rule, shared)]
    return losses


@dataclass(frozen=True)
class _Place:
    """Where rows belong: in a segment of an expert of a tensor, from row `first` of the segment on."""

    name: str
    entry: Entry
    expert: int
    segment: int
    first: int

    def write(self, packed: PackedTensor, writer: FileWriter) -> None:
        """Write an [n, K]."""
        rows, before = packed.block_rows, self.entry.segments[: self.segment]
        index = {
            DATA: sum(before) + self.first,
            SCALE: sum(math.ceil(n / rows) for n in before) + self.first // rows,
            GLOBAL: self.segment,
        }
        lead = () if len(self.entry.shape) == 2 else (self.expert,)
        for suffix, part in packed.parts().items():
            if part is not None:
                writer.write(self.name + suffix, (*lead, index[suffix]), part)

    def refusal(self, row: int, column: int) -> InputError:
        """Of a weight that is not finite. row: counted from the first one here."""
        place = [self.expert, sum(self.entry.segments[: self.segment]) + self.first + row, column]
        return _damaged(self.name, place[-len(self.entry.shape) :])


def _pack_expert(
    places: list[_Place], pieces: list[Rows], writer: FileWriter, rule: str | None, shared: Shared | None
) -> Iterator[Loss]:
    """Write an expert, or what a unit holds of it, segment by segment. Yields what each that is not kept has cost."""
    fmt = places[0].entry.format
    kept = [isinstance(piece, PackedTensor) and piece.format == fmt for piece in pieces]
    pieces = [piece if keep or _is_mxfp4(piece) else _values(piece) for piece, keep in zip(pieces, kept)]
    if fmt.has_global and shared is None and not all(kept):
        shared = _shared(_extent(piece) for piece, keep in zip(pieces, kept) if not keep)
    for place, piece, keep in zip(places, pieces, kept):
        if isinstance(piece, PackedTensor):
            _check_finite(place, piece)
        if keep:
            place.write(piece, writer)
            continue
        # The cast to fp8 is a matter of each row of blocks.
        tiles = piece.row_tiles(fmt.block[0]) if fmt == FORMATS["fp8"] and _is_mxfp4(piece) else [(0, piece)]
        for first, rows in tiles:
            yield _pack_rows(replace(place, first=place.first + first), rows, writer, rule, shared)


def _pack_rows(place: _Place, rows: Rows, writer: FileWriter, rule: str | None, shared: Shared | None) -> Loss:
    """Cast rows of a segment where that loses nothing, else encode them."""
    fmt = place.entry.format
    if (cast := _cast(rows, fmt, shared)) is not None:
        place.write(cast, writer)
        return Loss(0.0, _energy(rows), True)
    try:
        encoded = encode(_values(rows), fmt, None, rule, shared and shared.scale)
    except NonFiniteError as e:
        raise place.refusal(*e.index) from None
    place.write(encoded.tensor, writer)
    return Loss(encoded.error.item(), encoded.energy.item(), False)


def _cast(rows: Rows, fmt: Format, shared: Shared | None) -> PackedTensor | None:
    if shared and shared.cast:
        return exact.to_nvfp4(rows, shared.scale)
    return exact.to_fp8(rows) if fmt == FORMATS["fp8"] and _is_mxfp4(rows) else None


def _is_mxfp4(rows: Rows) -> bool:
    return isinstance(rows, PackedTensor) and rows.format == FORMATS["mxfp4"]


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
        raise _damaged(unit.target.name, [unit.first + place[0], *place[1:]])
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


def _energy(packed: PackedTensor) -> float:
    """The sum of squares of an [n, K]."""
    return sum(decode(tile).double().square().sum().item() for _, tile in packed.row_tiles(_TILE // packed.shape[1]))


def _check_finite(place: _Place, piece: PackedTensor) -> None:
    """Refuse an [n, K] whose values are not all finite in float32. They are decoded where its parts leave that open."""
    if _is_surely_finite(piece):
        return
    for start, tile in piece.row_tiles(_TILE // piece.shape[1]):
        if found := first_non_finite(decode(tile)):
            raise place.refusal(start + found[0], found[1])


def _is_surely_finite(piece: PackedTensor) -> bool:
    """Whether elements and scales are numbers, and no product of the largest is anywhere near the end of float32."""
    if any(part is not None and first_non_finite(part) for part in piece.parts().values()):
        return False
    scales = [_largest(scale) for scale in (piece.scale, piece.global_scale) if scale is not None]
    return _LARGEST * math.prod(scales) < torch.finfo(torch.float32).max / 2


def _largest(scale: Tensor) -> float:
    """The largest magnitude of scales of any dtype, or more."""
    if scale.dtype == torch.float8_e4m3fn:
        return _LARGEST
    amax = amax_of(scale).item()
    return 2.0 ** (amax - 127) if scale.dtype == torch.uint8 else amax


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


def _damaged(name: str, place: list[int]) -> InputError:
    return InputError(f"{name} has a weight that is NaN or infinite at {place}: the checkpoint is damaged; download it again.")
