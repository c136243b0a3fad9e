"""Encode and decode packed tensors: pure torch, the ground truth for every other implementation.

A format's numbers live in one module of this folder with RULES (its scale rules, the default first), `encode_tile` and
`decode_tile`; CODECS lists them. Here tensors are walked in tiles that stay in the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import Format, PackedTensor
from tutel_pack.quant import fp8, int4, mxfp4, nvfp4, plain

CODECS: dict[str, ModuleType] = {
    "fp8": fp8, "mxfp4": mxfp4, "nvfp4": nvfp4, "int4": int4, "bf16": plain, "f16": plain, "f32": plain,
}  # fmt: skip

_TILE = 1 << 17
"""Elements worked on at a time: what is computed from them stays in a core's cache. Operations are so short that
threads inside them cost more than they bring: set torch's threads to 1 and work on several tensors at once instead."""

_DEVICE_TILE = 1 << 24
"""The same on accelerators, where a launch costs more than a pass through memory."""


@dataclass(frozen=True)
class Encoded:
    """A packed tensor and what packing cost.

    error, energy: float64 [E] (or [1] for a matrix), sums of (decoded − x)² and of x² over each expert; None where they
        were not to be measured.
    """

    tensor: PackedTensor
    error: Tensor | None
    energy: Tensor | None


class NonFiniteError(ValueError):
    """A weight is NaN or infinite. `index` is its place in the tensor that was to be encoded."""

    def __init__(self, index: tuple[int, ...]):
        super().__init__(f"non-finite value at {list(index)}")
        self.index = index


def scale_rule(fmt: Format, rule: str | None) -> str:
    """The rule to use for a format: its default where `rule` is None. InputError lists the known ones, and for a format
    that nothing is encoded to."""
    rules = CODECS[fmt.name].RULES
    if not rules:
        raise InputError(f"Nothing can be packed to {fmt.name}: it is kept where the source has it; choose fp8, mxfp4 or nvfp4.")
    if rule is not None and rule not in rules:
        raise InputError(f"{fmt.name} has no scale rule {rule!r}: choose one of {', '.join(rules)}.")
    return rule or rules[0]


def encode(
    x: Tensor,
    fmt: Format,
    segments: tuple[int, ...] | None = None,
    rule: str | None = None,
    global_scale: Tensor | None = None,
    measure: bool = True,
) -> Encoded:
    """Pack x, [N, K] or [E, N, K] of a float dtype, on its device.

    segments: row counts that add up to N; one segment if None.
    global_scale: float32 [S] or [E, S] for the formats that have one; None computes it from x, one for all segments.
    measure: account for what packing costs; without it fp8 takes about half the time.
    Raises NonFiniteError at the first NaN or infinity, InputError for an unknown rule.
    """
    rule = scale_rule(fmt, rule)
    segments = segments or (x.shape[-2],)
    out = PackedTensor.empty(fmt, tuple(x.shape), segments, x.device)
    if fmt.has_global:
        out.global_scale.copy_(nvfp4.global_scale(amax_of(x))[..., None] if global_scale is None else global_scale)
    if x.ndim == 3:
        losses = [_encode_matrix(x[e], out.expert(e), rule, measure, (e,)) for e in range(len(x))]
    else:
        losses = [_encode_matrix(x, out, rule, measure, ())]
    if not measure:
        return Encoded(out, None, None)
    error, energy = torch.tensor(losses, dtype=torch.float64).view(-1, 2).unbind(1)
    return Encoded(out, error, energy)


def _encode_matrix(x: Tensor, out: PackedTensor, rule: str, measure: bool, where: tuple[int, ...]) -> tuple[float, float]:
    encode_tile = CODECS[out.format.name].encode_tile
    error = energy = 0.0
    for start, tile in out.row_tiles(_tile_rows(out)):
        rows = x[start : start + tile.shape[0]]
        amax, *sums = encode_tile(rows, tile, rule, measure)
        if not torch.isfinite(amax).all():
            row, column = torch.nonzero(~torch.isfinite(rows))[0].tolist()
            raise NonFiniteError((*where, start + row, column))
        if measure:
            error, energy = error + sums[0].double().sum().item(), energy + sums[1].double().sum().item()
    return error, energy


def _tile_rows(p: PackedTensor) -> int:
    """Rows of an [N, K] to work on at a time; `row_tiles` makes them whole blocks."""
    elements = _TILE if p.data.device.type == "cpu" else _DEVICE_TILE
    return elements // max(1, p.shape[1])


def amax_of(x: Tensor) -> Tensor:
    """float32 largest magnitudes over the last two dimensions; 0 where these are empty."""
    if x.ndim == 3:
        return torch.tensor([amax_of(matrix) for matrix in x], dtype=torch.float32, device=x.device)
    # Without a dimension to reduce over, aminmax is ten times faster.
    low, high = torch.aminmax(x) if x.numel() else torch.zeros(2, device=x.device)
    return torch.maximum(-low.float(), high.float())


def decode(p: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of p in its logical shape, each rounded once to `dtype`; may share memory with p."""
    decode_tile = CODECS[p.format.name].decode_tile
    if p.format.block is None:
        return decode_tile(p, dtype)
    out = torch.empty(p.shape, dtype=dtype, device=p.data.device)
    matrices = [(out[e], p.expert(e)) for e in range(p.shape[0])] if out.ndim == 3 else [(out, p)]
    for values, matrix in matrices:
        for start, tile in matrix.row_tiles(_tile_rows(matrix)):
            values[start : start + tile.shape[0]] = decode_tile(tile, dtype)
    return out
