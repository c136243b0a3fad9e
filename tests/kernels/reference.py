"""What kernels must compute: loops in float64 over weights decoded here from their bits; and how far off is too far."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from tutel_pack.formats import FORMATS, Format, PackedTensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED = ["fp8", "mxfp4", "nvfp4"]
ALL_FORMATS = [*QUANTIZED, "bf16"]

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding to the dtype."""

TILE = 16
"""Columns of an output that are judged together."""


def tolerance(dtype: torch.dtype, k: int) -> float:
    """Of the root-mean-square error of a tile, relative to the tile's root mean square.

    A rounding is off by at most u, by u/√3 in the mean square. Zero-mean errors of many weights add up in a product as
    its terms do, so each rounding on the way (of weights, of a product, of an activation) adds (u/√3)². The longest
    way, moe, has 8: gate and up weights and products, swiglu, down weights and product, the total: √8·u/√3 = 1.6 u.
    A tile may be as small as 16 values, whose mean square is 1.5 times the expected one now and then, and silu
    stretches some errors: 4 u. The float32 sums of two products of length k add √k · 2⁻²⁴ each.
    """
    return 4 * UNIT[dtype] + 2 * math.sqrt(k) * 2.0**-24


def worst_tile(got: torch.Tensor, expected: np.ndarray, groups: list[np.ndarray] | None = None) -> float:
    """The largest relative error (see `tolerance`) of any tile of columns over any group of rows.

    groups: row indices, such as the tokens of each expert; one group of all rows if None. Where nothing but zeros is
    expected, anything else is infinitely wrong, and so is NaN anywhere.
    """
    got = got.double().numpy()
    assert got.shape == expected.shape
    worst = 0.0
    for rows in [np.arange(len(got))] if groups is None else groups:
        for start in range(0, expected.shape[1] if len(rows) else 0, TILE):
            tile = expected[rows, start : start + TILE]
            error, size = np.square(got[rows, start : start + TILE] - tile).mean(), np.square(tile).mean()
            if math.isnan(error) or error > size == 0:
                return math.inf
            worst = max(worst, math.sqrt(error / size) if size else 0.0)
    return worst


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


ON_A_CPU = ("cpu", "torch")
"""Backends that work on a CPU. Triton's needs its interpreter there, and has test files of its own."""
WITH_TILES = ("amx", "avx512_bf16")
"""Native instruction sets that multiply many vectors at once, in bfloat16."""
E4M3 = np.array([e4m3(b) for b in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INT4 = np.array([0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1], dtype=np.float64)


def decode64(p: PackedTensor) -> np.ndarray:
    """The float64 values of a packed [N, K] or [E, N, K]."""
    if len(p.shape) == 3:
        return np.stack([decode64(p.expert(e)) for e in range(p.shape[0])])
    n, k = p.shape
    elements = _elements(p)[:, :k]
    if p.format.block is None:
        return elements
    out, scales = np.empty((n, k)), _scales(p)
    rows, columns = p.format.block
    row = grid = 0
    for segment, count in enumerate(p.segments):
        factor = 1.0 if p.global_scale is None else float(p.global_scale[segment])
        for i in range(count):
            for start in range(0, k, columns):
                block = slice(start, start + columns)
                out[row + i, block] = elements[row + i, block] * scales[grid + i // rows, start // columns] * factor
        row, grid = row + count, grid + math.ceil(count / rows)
    return out


def _elements(p: PackedTensor) -> np.ndarray:
    if p.format.name == "fp8":
        return E4M3[p.data.view(torch.uint8).numpy()]
    if p.format.per_item == 2:
        bytes_, values = p.data.numpy(), INT4 if p.format.name == "int4" else E2M1
        out = np.empty((bytes_.shape[0], 2 * bytes_.shape[1]))
        out[:, 0::2], out[:, 1::2] = values[bytes_ & 15], values[bytes_ >> 4]
        return out
    return p.data.double().numpy()


def _scales(p: PackedTensor) -> np.ndarray:
    if p.format.scale_dtype == torch.uint8:
        return 2.0 ** (p.scale.numpy().astype(np.float64) - 127)
    return E4M3[p.scale.view(torch.uint8).numpy()] if p.format.name == "nvfp4" else p.scale.double().numpy()


def random_packed(
    fmt: str | Format, shape: tuple[int, ...], segments: tuple[int, ...] | None = None, seed: int = 0
) -> PackedTensor:
    """Random bytes, of every finite code, under scales that differ from block to block; values are around K^−½."""
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    segments = segments or shape[-2:-1]
    g = torch.Generator().manual_seed(seed)
    size = shape[-1] ** -0.5
    parts = fmt.parts(shape, segments)
    dtype, stored = parts[""]
    if fmt.block is None:
        return PackedTensor(fmt, shape, segments, (torch.randn(stored, generator=g) * size).to(dtype))
    scale_dtype, grid = parts["_scale"]
    if fmt.name == "fp8":
        data, unit = (torch.randn(stored, generator=g) * 100).clamp(-448, 448).to(dtype), size / 100
    else:
        data, unit = torch.randint(256, stored, dtype=torch.uint8, generator=g), size / 3
    if scale_dtype == torch.uint8:
        exponent = 127 + round(math.log2(unit))
        scale = torch.randint(exponent - 2, exponent + 2, grid, dtype=scale_dtype, generator=g)
        return PackedTensor(fmt, shape, segments, data, scale)
    if fmt.name != "nvfp4":
        return PackedTensor(fmt, shape, segments, data, (_spread(grid, g) * unit).to(scale_dtype))
    factors = _spread(parts["_scale_2"][1], g) * size / 60
    return PackedTensor(fmt, shape, segments, data, (_spread(grid, g) * 20).to(scale_dtype), factors)


def _spread(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Factors from 1/4 to 4."""
    return 4 ** (2 * torch.rand(shape, generator=g) - 1)


def linear64(x: torch.Tensor, w: np.ndarray, bias: torch.Tensor | None = None) -> np.ndarray:
    """x [T, K], w [N, K], bias [N] -> [T, N]."""
    x = x.double().numpy()
    out = np.empty((len(x), len(w)))
    for t in range(len(x)):
        for n in range(len(w)):
            out[t, n] = np.dot(x[t], w[n])
    return out if bias is None else out + bias.double().numpy()


def swiglu64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def moe64(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: np.ndarray, down: np.ndarray,
    activation: Callable[[np.ndarray, np.ndarray], np.ndarray] = swiglu64,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
) -> np.ndarray:  # fmt: skip
    """The loop that `Ops.moe` describes."""
    both = (gate_up, gate_up_bias), (down, down_bias)
    biases = [0 * w[..., 0] if b is None else b.double().numpy() for w, b in both]
    x, weights = x.double().numpy(), weights.double().numpy()
    out = np.zeros_like(x)
    half = gate_up.shape[1] // 2
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                inner = gate_up[e] @ x[t] + biases[0][e]
                out[t] += weights[t, j] * (down[e] @ activation(inner[:half], inner[half:]) + biases[1][e])
    return out


def tokens_of_experts(ids: torch.Tensor, experts: int) -> list[np.ndarray]:
    """For each expert the tokens that use it, and last those that use none."""
    ids = ids.numpy()
    return [*(np.nonzero((ids == e).any(1))[0] for e in range(experts)), np.nonzero((ids < 0).all(1))[0]]
