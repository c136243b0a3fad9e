"""The operations of ops.py in plain torch, on any device torch has.

Weights are decoded a tile of rows at a time, and of experts only those that a token uses: what is decoded at any moment
does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import Layout, Weight
from tutel_pack.quant.codec import decode
from tutel_pack.spec import Moe, Rope

_TILE = 1 << 20
"""Elements of a weight decoded at a time: few enough for a processor's cache, enough to keep a product busy."""

_QUERIES = 512
"""Rows of a mask: queries attended to at a time, times the query heads that share a key head."""


def linear(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    w, rows = _plain(w), len(x)
    x, bias = _fill_up(x), None if bias is None else bias.to(x.dtype)
    if isinstance(w, Tensor) and w.dtype == x.dtype:
        return F.linear(x, w, bias)[:rows]
    out = x.new_empty(len(x), w.shape[0])
    for start, tile in _decoded_tiles(w, x.dtype):
        part = slice(start, start + len(tile))
        out[:, part] = F.linear(x, tile, None if bias is None else bias[part])
    return out[:rows]


def _fill_up(x: Tensor) -> Tensor:
    """x [T, K] with rows of zeros, up to a T of at most three significant bits, where the number of rows matters.

    On CPUs oneDNN, which multiplies 16-bit floats, compiles a kernel for every T it meets (4 ms) and keeps a thousand
    of them (0.8 MB each).
    """
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return x
    missing = -len(x) % (1 << max(0, len(x).bit_length() - 3))
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _plain(w: Weight) -> Weight:
    """The tensor itself where packing is nothing but bfloat16."""
    return w.data if isinstance(w, PackedTensor) and w.format.block is None else w


def _decoded_tiles(w: Weight, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    rows = max(1, _TILE // w.shape[1])
    if isinstance(w, PackedTensor):
        yield from ((start, decode(tile, dtype)) for start, tile in w.row_tiles(rows))
    else:
        yield from ((start, w[start : start + rows].to(dtype)) for start in range(0, len(w), rows))


def embedding(ids: Tensor, w: Weight, dtype: torch.dtype) -> Tensor:
    w = _plain(w)
    return w.index_select(0, ids).to(dtype) if isinstance(w, Tensor) else decode(_gather_rows(w, ids), dtype)


def _gather_rows(w: PackedTensor, ids: Tensor) -> PackedTensor:
    """The rows `ids` of a packed matrix as a matrix of its own, whose blocks are one row high."""
    fmt = w.format.with_block((1, w.format.block[1]))
    shape = (len(ids), w.shape[1])
    return PackedTensor(fmt, shape, shape[:1], w.data[ids], w.scale[ids // w.block_rows], w.global_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.mul_(weight).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.float()).mul_(up).to(gate.dtype)


def rotation(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    # On the host for every device: a last bit of a frequency becomes 10⁻³ radians at position 32768.
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    return angles.cos(), angles.sin()


def rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (r[:, None] for r in rotation)
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)


def attention(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, window: int | None) -> Tensor:
    out = torch.empty_like(q)
    for s, table in enumerate(layout.tables):
        new = slice(layout.starts[s], layout.starts[s + 1])
        if new.start < new.stop:
            k, v = keys[table].flatten(0, 1), values[table].flatten(0, 1)
            _attend(q[new], k, v, layout.lengths[s] - (new.stop - new.start), window, out[new])
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, past: int, window: int | None, out: Tensor) -> None:
    """Attention of one sequence: query i stands at position past + i, key j at position j; out is like q."""
    shared = q.shape[1] // k.shape[1]
    step = max(1, _QUERIES // shared)
    for first in range(0, len(q), step):
        last = min(first + step, len(q))
        low = 0 if window is None else max(0, past + first - window + 1)
        seen = slice(low, past + last)
        # The query heads of one key head become more queries of it: no key is copied, for any number of heads.
        rows = q[first:last].unflatten(1, (-1, shared)).transpose(0, 1).flatten(1, 2)
        mask = _mask(past + first, past + last, low, window, shared, q.device)
        keys, values = (t[seen].transpose(0, 1) for t in (k, v))
        heads = F.scaled_dot_product_attention(rows[None], keys[None], values[None], mask)
        out[first:last] = heads[0].unflatten(1, (-1, shared)).transpose(0, 1).flatten(1, 2)


def _mask(first: int, last: int, low: int, window: int | None, shared: int, device: torch.device) -> Tensor | None:
    """bool [(last − first) · shared, last − low]: which keys, from position low on, the queries at positions first …
    last − 1 see. None for a single position, which sees all of them."""
    if last - first == 1:
        return None
    query = torch.arange(first, last, device=device).repeat_interleave(shared)[:, None]
    key = torch.arange(low, last, device=device)
    return key <= query if window is None else (key <= query) & (key > query - window)


def route(logits: Tensor, spec: Moe) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), spec.top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if spec.router.renormalize else weights


def moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    k = ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    dropped, *counts = torch.bincount(flat + 1, minlength=down.shape[0] + 1).tolist()
    pieces = x.new_empty(len(flat), x.shape[1])
    pieces[order[:dropped]] = 0
    start = dropped
    for e, count in enumerate(counts):
        if count:
            places = order[start : start + count]
            pieces[places] = _expert(x[places // k], _matrix(gate_up, e), _matrix(down, e))
            start += count
    return _weighted_sum(pieces.view(-1, k, x.shape[1]), weights.masked_fill(ids < 0, 0))


def _matrix(w: Weight, e: int) -> Weight:
    return w.expert(e) if isinstance(w, PackedTensor) else w[e]


def _expert(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    gate, up = linear(x, gate_up, None).chunk(2, dim=-1)
    return linear(swiglu(gate, up), down, None)


def _weighted_sum(pieces: Tensor, weights: Tensor) -> Tensor:
    """pieces [T, k, H], weights float32 [T, k] -> [T, H], added up in the order of k in float32 and rounded once."""
    total = torch.zeros(len(pieces), pieces.shape[2], device=pieces.device)
    for j in range(pieces.shape[1]):
        total += pieces[:, j] * weights[:, j, None]
    return total.to(pieces.dtype)
