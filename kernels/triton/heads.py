"""What comes before the attention of grouped heads, in one launch: norms, rotations, and new keys and values stored.

Rows of a token are its query heads, key heads and value heads; a program has some rows of one kind. What the steps give
is rounded between them, as it is when they are done one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tutel_pack.kernels.ops import Heads
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.rows import inverse_root

_ELEMENTS = 2048
"""Of a program, about."""


@triton.jit
def _columns(j, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the first and the second of the pairs j are."""
    if INTERLEAVED:
        return 2 * j, 2 * j + 1
    else:
        return j, j + HALF


@triton.jit
def _scaled(x, factor, weight, column, inside, dtype: tl.constexpr):
    """x times the factor of its row and the weight of its column, rounded once."""
    x *= factor[:, None] * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x.to(dtype).to(tl.float32)


@triton.jit
def _place(
    x, out, row, out_head, count, norm, cos, sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rows of x [count, D] to out [count, ·], normed where there is a norm [D], and turned in HALF pairs by cos and sin
    [HALF]; BH, BD: powers of two that HALF and what D has beyond the pairs fit into."""
    dtype: tl.constexpr = out.dtype.element_ty
    j, d = tl.arange(0, BH), 2 * HALF + tl.arange(0, BD)
    here = row < count
    x += row[:, None] * D
    out += row.to(tl.int64)[:, None] * out_head
    first, second = _columns(j, HALF, INTERLEAVED)
    pair, rest = here[:, None] & (j < HALF)[None, :], here[:, None] & (d < D)[None, :]
    c = tl.load(x + d[None, :], mask=rest, other=0.0).to(tl.float32)
    if HALF > 0:
        a = tl.load(x + first[None, :], mask=pair, other=0.0).to(tl.float32)
        b = tl.load(x + second[None, :], mask=pair, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(c * c, axis=1)
        if HALF > 0:
            squares += tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        factor = inverse_root(squares / D + eps)
        c = _scaled(c, factor, norm, d, d < D, dtype)
        if HALF > 0:
            a = _scaled(a, factor, norm, first, j < HALF, dtype)
            b = _scaled(b, factor, norm, second, j < HALF, dtype)
    if HALF > 0:
        cosines = tl.load(cos + j, mask=j < HALF, other=0.0)[None, :]
        sines = tl.load(sin + j, mask=j < HALF, other=0.0)[None, :]
        tl.store(out + first[None, :], (a * cosines - b * sines).to(dtype), mask=pair)
        tl.store(out + second[None, :], (b * cosines + a * sines).to(dtype), mask=pair)
    tl.store(out + d[None, :], c.to(dtype), mask=rest)


@triton.jit
def place_heads(
    q, k, v, q_norm, k_norm, cos, sin, slots, turned, keys, values,
    heads, kv_heads, q_row, k_row, v_row, key_block, key_row, key_head, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Queries q [T, heads · D] to turned [T, heads, D]; keys and values [T, kv_heads · D] to the pools keys and values
    [·, BLOCK, kv_heads, D] at slots int64 [T]. See ops.Ops.attend.

    q_norm, k_norm: [D] or None.  cos, sin: float32 [T, HALF], None where HALF is 0.  Strides in elements: of a token,
    of a pool's block, position and head.  BV: a power of two that D fits into.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles, kv_tiles = tl.cdiv(heads, BR), tl.cdiv(kv_heads, BR)
    r = tl.arange(0, BR)
    if HALF > 0:
        cos += token * HALF
        sin += token * HALF
    if tile < q_tiles:
        out = turned + token * heads * D
        row = tile * BR + r
        _place(q + token * q_row, out, row, D, heads, q_norm, cos, sin, eps, D, HALF, INTERLEAVED, BR, BH, BD)
    else:
        slot = tl.load(slots + token)
        home = slot // BLOCK * key_block + slot % BLOCK * key_row
        if tile < q_tiles + kv_tiles:
            row = (tile - q_tiles) * BR + r
            _place(
                k + token * k_row, keys + home, row, key_head, kv_heads, k_norm, cos, sin, eps,
                D, HALF, INTERLEAVED, BR, BH, BD,
            )  # fmt: skip
        else:
            row = (tile - q_tiles - kv_tiles) * BR + r
            _place(
                v + token * v_row, values + home, row, key_head, kv_heads, None, None, None, eps,
                D, 0, False, BR, 1, BV,
            )  # fmt: skip


def placing(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
    rotation: tuple[Tensor, Tensor] | None, how: Heads, turned: Tensor,
) -> Launch:  # fmt: skip
    """Of q, k, v as for Ops.attend, strided by row, into turned [T, heads, D], contiguous, and into the pools, which
    are laid out alike."""
    tokens, heads, d = turned.shape
    kv_heads, half = keys.shape[2], rotation[0].shape[1] if rotation else 0
    cos, sin = rotation or (None, None)
    wide = triton.next_power_of_2(d)
    br = max(1, min(_ELEMENTS // wide, triton.next_power_of_2(heads)))
    arguments = dict(
        q=q, k=k, v=v, q_norm=how.q_norm, k_norm=how.k_norm, cos=cos, sin=sin, slots=slots, turned=turned, keys=keys,
        values=values, heads=heads, kv_heads=kv_heads, q_row=q.stride(0), k_row=k.stride(0), v_row=v.stride(0),
        key_block=keys.stride(0), key_row=keys.stride(1), key_head=keys.stride(2), eps=float(how.eps),
        D=d, HALF=half, INTERLEAVED=how.interleaved, BLOCK=keys.shape[1],
        BR=br, BH=triton.next_power_of_2(max(1, half)), BD=triton.next_power_of_2(max(1, d - 2 * half)), BV=wide,
    )  # fmt: skip
    return Launch(place_heads, (tokens, -(-heads // br) + 2 * -(-kv_heads // br)), arguments)
