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
from tutel_pack.quant import fp8, mxfp4, nvfp4, plain

CODECS: dict[str, ModuleType] = {"fp8": fp8, "mxfp4": mxfp4, "nvfp4": nvfp4, "bf16": plain, "f16": plain, "f32": plain}

_TILE = 1 << 16
"""Elements encoded at a time: a few float32 copies of them fit into a core's cache."""


@dataclass(frozen=True)
class Encoded:
    """A packed tensor and what packing cost.

    error, energy: float64 [E] (or [1] for a matrix), sums of (decoded − x)² and of x² over each expert.
    """

    tensor: PackedTensor
    error: Tensor
    energy: Tensor


class NonFiniteError(ValueError):
    """A weight is NaN or infinite. `index` is its place in the tensor that was to be encoded."""

    def __init__(self, index: tuple[int, ...]):
        super().__init__(f"non-finite value at {list(index)}")
        self.index = index


def scale_rule(fmt: Format, rule: str | None) -> str:
    """The rule to use for a format: its default where `rule` is None. InputError lists the known ones."""
    rules = CODECS[fmt.name].RULES
    if rule is not None and rule not in rules:
        raise InputError(f"{fmt.name} has no scale rule {rule!r}: choose one of {', '.join(rules)}.")
    return rule or rules[0]


def encode(
    x: Tensor,
    fmt: Format,
    segments: tuple[int, ...] | None = None,
    rule: str | None = None,
    global_scale: Tensor | None = None,
) -> Encoded:
    """Pack x, [N, K] or [E, N, K] of a float dtype, on its device.

    segments: row counts that add up to N; one segment if None.
    global_scale: float32 [S] or [E, S] for the formats that have one; None computes it from x, one for all segments.
    Raises NonFiniteError at the first NaN or infinity, InputError for an unknown rule.
    """
    rule = scale_rule(fmt, rule)
    segments = segments or (x.shape[-2],)
    out = PackedTensor.empty(fmt, tuple(x.shape), segments, x.device)
    if fmt.has_global:
        out.global_scale.copy_(nvfp4.global_scale(amax_of(x))[..., None] if global_scale is None else global_scale)
    if x.ndim == 3:
        losses = [_encode_matrix(x[e], out.expert(e), rule, (e,)) for e in range(len(x))]
    else:
        losses = [_encode_matrix(x, out, rule, ())]
    error, energy = torch.tensor(losses, dtype=torch.float64).view(-1, 2).unbind(1)
    return Encoded(out, error, energy)


def _encode_matrix(x: Tensor, out: PackedTensor, rule: str, where: tuple[int, ...]) -> tuple[float, float]:
    encode_tile = CODECS[out.format.name].encode_tile
    error = energy = 0.0
    step = out.block_rows if out.block_rows > 1 else _TILE // max(1, x.shape[1])
    for start, tile in out.row_tiles(step):
        rows = x[start : start + tile.shape[0]]
        amax, *sums = encode_tile(rows, tile, rule)
        if not torch.isfinite(amax).all():
            row, column = torch.nonzero(~torch.isfinite(rows))[0].tolist()
            raise NonFiniteError((*where, start + row, column))
        error, energy = error + sums[0].double().sum().item(), energy + sums[1].double().sum().item()
    return error, energy


def amax_of(x: Tensor) -> Tensor:
    """float32 largest magnitudes over the last two dimensions; 0 where these are empty."""
    if 0 in x.shape[-2:]:
        return torch.zeros(x.shape[:-2], device=x.device)
    low, high = torch.aminmax(x.flatten(-2), dim=-1)
    return torch.maximum(-low.float(), high.float())


def decode(p: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of p in its logical shape, each rounded once to `dtype`."""
    if len(p.shape) == 3:
        out = torch.empty(p.shape, dtype=dtype, device=p.data.device)
        for e in range(p.shape[0]):
            out[e] = decode(p.expert(e), dtype)
        return out
    decode_tile = CODECS[p.format.name].decode_tile
    tiles = [decode_tile(tile, dtype) for _, tile in p.row_tiles(p.shape[0])]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
