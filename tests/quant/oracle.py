"""The packed formats once more, in numpy and float64, written from the definitions and not from tutel_pack.quant.

Decoding is arithmetic on the codes. Encoding finds the nearest element by looking at all of them, with the quotient
and the error sums in float32, as the formats define them. Arrays: x float32 [N, K]; expected parts as uint8 or float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tutel_pack.formats import PackedTensor

F32 = np.float32


def e2m1_value(code: int) -> float:
    """Of a 4-bit code: sign, two exponent bits of bias 1, one mantissa bit."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if code >> 3 else magnitude


def e4m3_value(byte: int) -> float:
    """Of an e4m3fn byte: bias 7, no infinities, NaN where all seven low bits are set."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
    if byte & 127 == 127:
        return np.nan
    return -magnitude if byte >> 7 else magnitude


def e8m0_value(byte: int) -> float:
    """Of an e8m0 byte: a power of two, 255 is NaN."""
    return np.nan if byte == 255 else 2.0 ** (byte - 127)


E2M1 = np.array([e2m1_value(c) for c in range(16)])
E4M3 = np.array([e4m3_value(b) for b in range(256)])
E8M0 = np.array([e8m0_value(b) for b in range(256)])


def nearest(values: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Index of the value next to each non-negative y, ties to the even index, above the last to the last."""
    high = np.searchsorted(values, y.astype(np.float64)).clip(1, len(values) - 1)
    down, up = y - values[high - 1], values[high] - y
    return np.where((down < up) | ((down == up) & (high % 2 == 1)), high - 1, high)


def encode_elements(values: np.ndarray, sign_bit: int, y: np.ndarray) -> np.ndarray:
    """uint8 codes of float32 quotients; the sign is kept for zeros too."""
    return (nearest(values, np.abs(y)) + sign_bit * np.signbit(y)).astype(np.uint8)


def tree(x: np.ndarray) -> np.ndarray:
    """float32 sum over axis 0 by halving."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def in_columns(x: np.ndarray, block: int) -> np.ndarray:
    """[N, K] -> [block, N · ceil(K/block)], zero padded."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % block)))
    return np.ascontiguousarray(x.reshape(-1, block).T)


def tree_error(columns: np.ndarray, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32 squared error of every column under its scale."""
    rounded = values[nearest(values, np.abs(columns / scale))].astype(F32)
    return tree(np.square(rounded * scale - np.abs(columns)))


def exact_error(columns: np.ndarray, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The same in float64."""
    magnitude = np.abs(columns.astype(np.float64))
    return np.square(values[nearest(values, magnitude / scale)] * scale - magnitude).sum(0)


def least(errors: list[np.ndarray]) -> np.ndarray:
    """Which candidate has the least error, the first of equal ones."""
    return np.argmin(np.stack(errors), axis=0)


def mxfp4_exponent(amax: float, rule: str) -> int:
    """Unbiased, not yet limited."""
    if amax == 0:
        return -127
    mantissa, exponent = np.frexp(np.float64(amax))  # amax = mantissa · 2^exponent, 0.5 ≤ mantissa < 1
    round_up = {"floor": False, "even": 2 * mantissa >= 1.75, "ceil": 2 * mantissa > 1.5}[rule]
    return int(exponent) - 1 - 2 + bool(round_up)


def mxfp4(x: np.ndarray, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(element codes [N, padded K], scale bytes [N, blocks]). 6 · 2^125 is the last product that float32 holds."""
    columns = in_columns(x, 32)
    first = [mxfp4_exponent(a, "floor" if rule == "lsq" else rule) for a in np.abs(columns).max(0)]
    candidates = [np.clip(np.array(first) + step + 127, 0, 252) for step in ((0, 1) if rule == "lsq" else (0,))]
    scales = [E8M0[c].astype(F32) for c in candidates]
    chosen = least([tree_error(columns, s, E2M1[:8]) for s in scales])
    byte, scale = np.choose(chosen, candidates), np.choose(chosen, scales)
    codes = encode_elements(E2M1[:8], 8, columns / scale)
    return codes.T.reshape(len(x), -1), byte.reshape(len(x), -1).astype(np.uint8)


def nvfp4_global(amax: float) -> np.float32:
    """amax / (6 · 448); 1 for zeros."""
    return F32(amax) / F32(2688) if amax > 0 else F32(1)


def nvfp4(x: np.ndarray, rule: str, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(element codes [N, padded K], scale bytes [N, blocks])."""
    columns = in_columns(x, 16)
    wanted = np.abs(columns).max(0) / (F32(6) * global_scale)
    start = nearest(E4M3[:127], wanted.clip(2.0**-9, 448)).astype(int)
    candidates = [np.clip(start + step, 1, 126) for step in (range(-3, 8) if rule == "lsq" else (0,))]
    scales = [E4M3[c].astype(F32) * global_scale for c in candidates]
    chosen = least([tree_error(columns, s, E2M1[:8]) for s in scales])
    byte, scale = np.choose(chosen, candidates), np.choose(chosen, scales)
    codes = encode_elements(E2M1[:8], 8, columns / scale)
    return codes.T.reshape(len(x), -1), byte.reshape(len(x), -1).astype(np.uint8)


def fp8(x: np.ndarray, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(element bytes [N, K], float32 scales [block rows, block columns]) of one row segment."""
    n, k = x.shape
    grid = -(-n // 128), -(-k // 128)
    bytes_, scales = np.zeros(x.shape, np.uint8), np.zeros(grid, F32)
    for i, j in np.ndindex(*grid):
        place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        block = np.zeros((128, 128), F32)
        block[: x[place].shape[0], : x[place].shape[1]] = x[place]
        scales[i, j] = fp8_scale(block, rule)
        bytes_[place] = encode_elements(E4M3[:127], 128, x[place] / scales[i, j])
    return bytes_, scales


def fp8_scale(block: np.ndarray, rule: str) -> np.float32:
    """amax/448, never a subnormal; lsq: the best of 12 that end before twice as much."""
    base = max(np.abs(block).max() / F32(448), np.finfo(F32).tiny)
    candidates = [base * F32(2.0 ** (j / 12)) for j in range(12 if rule == "lsq" else 1)]
    # Rows are added first, then columns.
    return candidates[least([tree(tree_error(block, s, E4M3[:127])) for s in candidates])]


@dataclass(frozen=True)
class Parts:
    """Expected parts of one matrix: element codes before packing, scale (bytes, or float32 for fp8)."""

    codes: np.ndarray
    scale: np.ndarray


def encode_matrix(fmt: str, x: np.ndarray, segments: tuple[int, ...], rule: str, globals_: list) -> Parts:
    """Expected parts of [N, K] with row segments; globals_: one global scale a segment, for nvfp4."""
    parts, start = [], 0
    for s, rows in enumerate(segments):
        segment = x[start : start + rows]
        more = (globals_[s],) if fmt == "nvfp4" else ()
        parts.append({"mxfp4": mxfp4, "nvfp4": nvfp4, "fp8": fp8}[fmt](segment, rule, *more))
        start += rows
    return Parts(*(np.concatenate(p) for p in zip(*parts)))


def nibbles(data: np.ndarray) -> np.ndarray:
    """Codes of packed bytes: element 2i is byte i's low nibble."""
    return np.stack([data % 16, data // 16], axis=-1).reshape(*data.shape[:-1], -1)


def numpy_bytes(part: torch.Tensor) -> np.ndarray:
    """uint8 view of a one-byte tensor."""
    return part.contiguous().view(torch.uint8).numpy()


def codes_of(p: PackedTensor) -> np.ndarray:
    """Element codes of [N, K] in the order of k, padding included."""
    data = numpy_bytes(p.data)
    return data if p.format.name == "fp8" else nibbles(data)


def scales_of(p: PackedTensor) -> np.ndarray:
    """Block scales of [N, K] as they are stored: bytes, or float32 for fp8."""
    return p.scale.numpy() if p.format.name == "fp8" else numpy_bytes(p.scale)


def decode_matrix(p: PackedTensor, combine: Callable = np.multiply) -> np.ndarray:
    """float64 values of [N, K]. combine: of block and global scale, so that a test can round their product."""
    n, k = p.shape
    rows, columns = p.format.block
    elements = (E4M3 if p.format.name == "fp8" else E2M1)[codes_of(p)]
    scale, name = scales_of(p), p.format.name
    scale = scale.astype(np.float64) if name == "fp8" else (E8M0 if name == "mxfp4" else E4M3)[scale]
    out, start, grid = np.empty((n, k)), 0, 0
    for s, count in enumerate(p.segments):
        for row in range(count):
            row_scale = np.repeat(scale[grid + row // rows], columns)
            if p.global_scale is not None:
                row_scale = combine(row_scale, np.float64(p.global_scale[s]))
            out[start + row] = elements[start + row, :k] * row_scale[:k]
        start, grid = start + count, grid + -(-count // rows)
    return out


def float32_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product rounded to float32, for `decode_matrix`."""
    return (a.astype(F32) * b.astype(F32)).astype(np.float64)


def check_encoded(p: PackedTensor, x: torch.Tensor, rule: str) -> None:
    """Every part of a packed [N, K] or [E, N, K] is bit for bit what the oracle makes of x and p's global scales."""
    for e in range(len(x)) if x.ndim == 3 else (None,):
        matrix, packed = (x, p) if e is None else (x[e], p.expert(e))
        globals_ = None if p.global_scale is None else [F32(g) for g in packed.global_scale.tolist()]
        expected = encode_matrix(p.format.name, matrix.float().numpy(), p.segments, rule, globals_)
        check_part(f"expert {e}: scales", scales_of(packed), expected.scale)
        check_part(f"expert {e}: codes", codes_of(packed), expected.codes)


def check_part(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Equal arrays, or an AssertionError with the first difference."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    wrong = np.argwhere(got != want)
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(f"{name} differ, first at {at}: {got[at]}, not {want[at]}; {len(wrong)} of {got.size}")


def check_decoded(values: torch.Tensor, p: PackedTensor) -> None:
    """float32 values of a packed tensor are its exact products, rounded where float32 cannot hold them."""
    for e in range(p.shape[0]) if len(p.shape) == 3 else (None,):
        got, packed = (values, p) if e is None else (values[e], p.expert(e))
        want = decode_matrix(packed, float32_product).astype(F32)
        np.testing.assert_array_equal(got.numpy(), want, err_msg=f"expert {e}")
        np.testing.assert_allclose(got.double().numpy(), decode_matrix(packed), rtol=2.0**-23, atol=0)
