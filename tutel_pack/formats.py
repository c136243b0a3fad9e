"""The value law and the block geometry of the packed formats.

    value = element × block scale × global scale

Scales always multiply. A logical matrix is [N, K] (N rows of outputs, K contiguous inputs), a layer's experts are
[E, N, K]. Rows may fall into segments (gate rows, then up rows): the block grid and the global scale restart at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutel_pack.errors import InputError

DATA, SCALE, GLOBAL = "", "_scale", "_scale_2"
"""What is appended to a tensor's name for its parts in a safetensors file (the names ModelOpt uses, and its law)."""

_TALLEST = 128
"""Rows of the blocks that are encoded."""


@dataclass(frozen=True)
class Format:
    """How one packed tensor is stored.

    name: what users type.
    dtype: of a stored data item; one item holds `per_item` elements, the even k in the low bits.
    block: (rows, columns) that share one block scale, or None where there are no scales.
    scale_dtype: of a block scale. uint8 is e8m0: byte b means 2^(b−127), and 255 NaN.
    has_global: one float32 per expert and row segment on top of the block scales.
    """

    name: str
    dtype: torch.dtype
    per_item: int = 1
    block: tuple[int, int] | None = None
    scale_dtype: torch.dtype | None = None
    has_global: bool = False

    def with_block(self, block: tuple[int, int]) -> Format:
        """The same format with a source's own block geometry."""
        return replace(self, block=block)

    def with_scale(self, block: tuple[int, int], scale_dtype: torch.dtype) -> Format:
        """The same format with a source's own block geometry and type of block scales."""
        return replace(self, block=block, scale_dtype=scale_dtype)

    def padded(self, k: int) -> int:
        """Elements stored for a row of k: sub-byte rows are padded to whole blocks with zeros."""
        return k if self.per_item == 1 else math.ceil(k / self.block[1]) * self.block[1]

    def grid(self, segments: tuple[int, ...], k: int) -> tuple[int, int]:
        """(rows, columns) of the block-scale grid; every segment starts a block row of its own."""
        rows, columns = self.block
        return sum(math.ceil(n / rows) for n in segments), math.ceil(k / columns)

    def parts(self, shape: tuple[int, ...], segments: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The stored tensors of a logical [N, K] or [E, N, K]: suffix -> (dtype, shape)."""
        *lead, n, k = shape
        assert sum(segments) == n, f"segments {segments} do not add up to {n} rows"
        parts = {DATA: (self.dtype, (*lead, n, self.padded(k) // self.per_item))}
        if self.block:
            parts[SCALE] = (self.scale_dtype, (*lead, *self.grid(segments, k)))
        if self.has_global:
            parts[GLOBAL] = (torch.float32, (*lead, len(segments)))
        return parts

    def nbytes(self, shape: tuple[int, ...], segments: tuple[int, ...]) -> int:
        """Bytes of all parts of a logical tensor."""
        return sum(math.prod(s) * d.itemsize for d, s in self.parts(shape, segments).values())


FORMATS = {
    f.name: f
    for f in (
        Format("fp8", torch.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32),
        Format("mxfp4", torch.uint8, per_item=2, block=(1, 32), scale_dtype=torch.uint8),
        Format("nvfp4", torch.uint8, per_item=2, block=(1, 16), scale_dtype=torch.float8_e4m3fn, has_global=True),
        Format("int4", torch.uint8, per_item=2, block=(1, 32), scale_dtype=torch.bfloat16),
        Format("bf16", torch.bfloat16),
        Format("f16", torch.float16),
        Format("f32", torch.float32),
    )
}


def get_format(name: str) -> Format:
    """The format of that name. InputError lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise InputError(f"Unknown format {name!r}: choose one of {', '.join(FORMATS)}.") from None


@dataclass(frozen=True)
class PackedTensor:
    """A logical [N, K] or [E, N, K] tensor in its packed form.

    shape: the logical shape.  segments: row counts that add up to N.
    data, scale, global_scale: as `format.parts(shape, segments)` says; scale and global_scale are None where the
    format has none. Slicing methods return views.
    """

    format: Format
    shape: tuple[int, ...]
    segments: tuple[int, ...]
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self):
        for suffix, (dtype, shape) in self.format.parts(self.shape, self.segments).items():
            part = self.parts()[suffix]
            if part is None or part.dtype != dtype or tuple(part.shape) != shape:
                found = "nothing" if part is None else f"{part.dtype} {tuple(part.shape)}"
                raise InputError(
                    f"A {self.format.name} tensor of shape {self.shape} needs its part {suffix or 'data'!r} as "
                    f"{dtype} {shape}, not {found}."
                )

    @classmethod
    def empty(cls, fmt: Format, shape: tuple[int, ...], segments: tuple[int, ...], device="cpu") -> PackedTensor:
        """Uninitialised storage."""
        parts = {s: torch.empty(p, dtype=d, device=device) for s, (d, p) in fmt.parts(shape, segments).items()}
        return cls.from_parts(fmt, shape, segments, parts)

    @classmethod
    def from_parts(cls, fmt: Format, shape, segments, parts: dict[str, Tensor]) -> PackedTensor:
        """The inverse of `parts()`."""
        return cls(fmt, tuple(shape), tuple(segments), parts[DATA], parts.get(SCALE), parts.get(GLOBAL))

    def parts(self) -> dict[str, Tensor | None]:
        """Suffix -> stored tensor, None where the format has no such part."""
        return {DATA: self.data, SCALE: self.scale, GLOBAL: self.global_scale}

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts().values() if p is not None)

    def to(self, device) -> PackedTensor:
        """The same tensor on another device."""
        parts = {s: p.to(device) for s, p in self.parts().items() if p is not None}
        return self.from_parts(self.format, self.shape, self.segments, parts)

    def expert(self, e: int) -> PackedTensor:
        """Expert e of [E, N, K] as an [N, K] view."""
        parts = {s: p[e] for s, p in self.parts().items() if p is not None}
        return self.from_parts(self.format, self.shape[1:], self.segments, parts)

    def row_tiles(self, rows: int) -> Iterator[tuple[int, PackedTensor]]:
        """(first row, view) of tiles of an [N, K] of about `rows` rows, cut on block edges and at segments.

        Blocks taller than 128 rows, which only whole-tensor scales have, are cut inside too: a part of a block is a
        block of fewer rows, as at a ragged edge.
        """
        step = max(1, rows // self.block_rows) * self.block_rows
        if rows < self.block_rows > _TALLEST:
            step = max(1, rows)
        n = grid = 0
        for s, count in enumerate(self.segments):
            for edge in range(0, count, max(step, self.block_rows)):
                end = min(edge + max(step, self.block_rows), count)
                for start in range(edge, end, step):
                    stop = min(start + step, end)
                    yield n + start, self._tile(s, n + start, n + stop, grid + start // self.block_rows)
            n, grid = n + count, grid + math.ceil(count / self.block_rows)

    @property
    def block_rows(self) -> int:
        return self.format.block[0] if self.format.block else 1

    def _tile(self, segment: int, start: int, stop: int, grid: int) -> PackedTensor:
        parts = {DATA: self.data[start:stop]}
        if self.scale is not None:
            parts[SCALE] = self.scale[grid : grid + math.ceil((stop - start) / self.block_rows)]
        if self.global_scale is not None:
            parts[GLOBAL] = self.global_scale[segment : segment + 1]
        return self.from_parts(self.format, (stop - start, self.shape[1]), (stop - start,), parts)
