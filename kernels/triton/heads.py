"""What comes before attention, in one launch: norms, rotations, and new keys and values, or latents, stored.

Rows of a token are its query heads, key heads and value heads, or query heads and one latent with the key that heads
share; a program has some rows of one kind. What the steps give is rounded between them, as it is when they are done one
by one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tutel_pack.kernels.ops import Heads, Latent
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
    x, x_head, out, out_head, row, count, norm, cos, sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """D columns of x [count, ·] to out [count, ·], normed where there is a norm [D], and turned in HALF pairs by cos
    and sin [HALF]; BH, BD: powers of two that HALF and what D has beyond the pairs fit into."""
    dtype: tl.constexpr = out.dtype.element_ty
    j, d = tl.arange(0, BH), 2 * HALF + tl.arange(0, BD)
    here = row < count
    x += row[:, None] * x_head
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
        _place(
            q + token * q_row, D, turned + token * heads * D, D, tile * BR + r, heads, q_norm, cos, sin, eps,
            D, HALF, INTERLEAVED, BR, BH, BD,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        home = slot // BLOCK * key_block + slot % BLOCK * key_row
        if tile < q_tiles + kv_tiles:
            row = (tile - q_tiles) * BR + r
            _place(
                k + token * k_row, D, keys + home, key_head, row, kv_heads, k_norm, cos, sin, eps,
                D, HALF, INTERLEAVED, BR, BH, BD,
            )  # fmt: skip
        else:
            row = (tile - q_tiles - kv_tiles) * BR + r
            _place(
                v + token * v_row, D, values + home, key_head, row, kv_heads, None, None, None, eps,
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


@triton.jit
def place_latents(
    q, kv, norm, cos, sin, slots, turned, entries,
    heads, q_row, q_head, kv_row, entry_block, entry_row, eps,
    R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """What is turned of queries, q [T, heads, 2 · HALF], to turned, alike; latents of rank R, which are normed, and the
    keys behind them, which are turned, kv [T, R + 2 · HALF], to the pool entries [·, BLOCK, R + 2 · HALF] at slots
    int64 [T]. See ops.Ops.attend_latents.

    norm: [R].  cos, sin: float32 [T, HALF].  Strides in elements: of a token and a head of the queries, of a token, of
    the pool's block and position.  BL: a power of two that R fits into.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    if tile < tl.num_programs(1) - 1:
        _place(
            q + token * q_row, q_head, turned + token * heads * 2 * HALF, 2 * HALF, tile * BR + tl.arange(0, BR), heads,
            None, cos, sin, eps, 2 * HALF, HALF, INTERLEAVED, BR, BH, 1,
        )  # fmt: skip
    else:
        slot, one = tl.load(slots + token), tl.arange(0, 1)
        kv += token * kv_row
        entries += slot // BLOCK * entry_block + slot % BLOCK * entry_row
        _place(kv, R, entries, R, one, 1, norm, None, None, eps, R, 0, False, 1, 1, BL)
        _place(kv + R, 0, entries + R, 0, one, 1, None, cos, sin, eps, 2 * HALF, HALF, INTERLEAVED, 1, BH, 1)


def placing_latents(
    q: Tensor, kv: Tensor, entries: Tensor, slots: Tensor, rotation: tuple[Tensor, Tensor], how: Latent, turned: Tensor
) -> Launch:
    """Of q [T, heads, E], the dimensions that are turned, and kv [T, R + E], both strided but for the last dimension,
    into turned [T, heads, E], contiguous, and into the pool."""
    tokens, heads, e = turned.shape
    (cos, sin), rank = rotation, kv.shape[1] - e
    br = max(1, min(_ELEMENTS // triton.next_power_of_2(e), triton.next_power_of_2(heads)))
    arguments = dict(
        q=q, kv=kv, norm=how.kv_norm, cos=cos, sin=sin, slots=slots, turned=turned, entries=entries,
        heads=heads, q_row=q.stride(0), q_head=q.stride(1), kv_row=kv.stride(0),
        entry_block=entries.stride(0), entry_row=entries.stride(1), eps=float(how.eps),
        R=rank, HALF=e // 2, INTERLEAVED=how.interleaved, BLOCK=entries.shape[1],
        BR=br, BH=triton.next_power_of_2(e // 2), BL=triton.next_power_of_2(rank),
    )  # fmt: skip
    return Launch(place_latents, (tokens, -(-heads // br) + 1), arguments)
