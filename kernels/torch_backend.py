"""The operations of ops.py in plain torch, on any device torch has.

Weights are decoded a tile of rows at a time, and of experts only those that a token uses: what is decoded at any moment
does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import Layout, Weight
from tutel_pack.kernels.torch_latent import latent_attention, top_positions
from tutel_pack.quant.codec import decode
from tutel_pack.spec import ClampedSwiglu, Dynamic, Linear, Llama3, Moe, Rope, Swiglu, Yarn

_TILE = 1 << 20
"""Elements of a weight decoded at a time: few enough for a processor's cache, enough to keep a product busy."""

_LARGE_TILE = 1 << 27
"""Elements of a plain weight that an accelerator converts at a time: every tile costs it three launches."""

_QUERIES = 512
"""Rows of a mask: queries attended to at a time, times the query heads that share a key head."""

_MASK = 1 << 26
"""Elements of a mask that differs between heads, as sinks make it."""


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
    if isinstance(w, PackedTensor):
        rows = max(1, _TILE // w.shape[1])
        yield from ((start, decode(tile, dtype)) for start, tile in w.row_tiles(rows))
    else:
        rows = max(1, (_TILE if w.device.type == "cpu" else _LARGE_TILE) // w.shape[1])
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


def swiglu(gate: Tensor, up: Tensor, activation: Swiglu | ClampedSwiglu) -> Tensor:
    g, u = gate.float(), up.float()
    if isinstance(activation, Swiglu):
        return F.silu(g).mul_(u).to(gate.dtype)
    g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    return (g * torch.sigmoid(activation.alpha * g) * (u + activation.shift)).to(gate.dtype)


def rotation(positions: Tensor, rope: Rope, layout: Layout | None) -> tuple[Tensor, Tensor]:
    # On the host for every device: a last bit of a frequency becomes 10⁻³ radians at position 32768.
    if isinstance(rope.scaling, Dynamic):
        frequencies = _dynamic_frequencies(positions, rope, layout)
    else:
        frequencies = _frequencies_on(rope, positions.device)[None]
    angles = positions[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    if not isinstance(rope.scaling, Yarn):
        return cosines, sines
    return cosines * rope.scaling.magnitude, sines * rope.scaling.magnitude


def _dynamic_frequencies(positions: Tensor, rope: Rope, layout: Layout | None) -> Tensor:
    """float32 [T, dim/2]: those of each token's sequence at its present length."""
    if layout is None:
        counts, lengths = [len(positions)], [int(positions.max()) + 1 if len(positions) else 0]
    else:
        counts, lengths = [b - a for a, b in zip(layout.starts, layout.starts[1:])], layout.lengths
    rows = [_frequencies(rope, length).expand(count, -1) for count, length in zip(counts, lengths)]
    return torch.cat(rows).to(positions.device)


@cache
def _frequencies_on(rope: Rope, device: torch.device) -> Tensor:
    """Copied there once, and kept: a step that is captured as a graph cannot copy, and goes on reading them."""
    return _frequencies(rope).to(device)


@lru_cache(maxsize=64)
def _frequencies(rope: Rope, length: int = 0) -> Tensor:
    """float32 [dim/2] for a sequence of `length` positions, in the order of operations of transformers, whose last bit
    is what models were trained and are judged with."""
    scaling, theta = rope.scaling, rope.theta
    if isinstance(scaling, Dynamic):
        length = torch.tensor(max(length, scaling.original))
        growth = scaling.factor * length / scaling.original - (scaling.factor - 1)
        theta = theta * growth ** (rope.dim / (rope.dim - 2))
    turns = theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    frequencies = 1.0 / turns
    if isinstance(scaling, Linear):
        return frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        keep = 1 - _yarn_ramp(rope, scaling)
        return 1.0 / (scaling.factor * turns) * (1 - keep) + frequencies * keep
    return _llama3_bands(frequencies, scaling) if isinstance(scaling, Llama3) else frequencies


def _yarn_ramp(rope: Rope, yarn: Yarn) -> Tensor:
    """float32 [dim/2]: 0 where a dimension's frequency stays, 1 where it is divided (arXiv 2309.00071 §3.2)."""

    def dimension(turns: float) -> float:
        """The dimension that turns so many times over the original context."""
        return rope.dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _llama3_bands(frequencies: Tensor, scaling: Llama3) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original / wavelengths - scaling.low) / (scaling.high - scaling.low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long, short = wavelengths > scaling.original / scaling.low, wavelengths < scaling.original / scaling.high
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, between))


def rope(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    cos, sin = (r[:, None] for r in rotation)
    dim = 2 * cos.shape[-1]
    turned = x[..., :dim].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., dim:]], dim=-1)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, window: int | None,
    scale: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    for s, table in enumerate(layout.tables):
        new = slice(layout.starts[s], layout.starts[s + 1])
        if new.start < new.stop:
            k, v = keys[table].flatten(0, 1), values[table].flatten(0, 1)
            _attend(q[new], k, v, layout.lengths[s] - (new.stop - new.start), window, scale, sinks, out[new])
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, past: int, window: int | None,
    scale: float | None, sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Attention of one sequence: query i stands at position past + i, key j at position j; out is like q."""
    if _is_plain(q, past, window, sinks) and (scale is None or scale > 0):
        q, k, v = (t[: len(q)].transpose(0, 1)[None] for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(heads[0].transpose(0, 1))
        return
    shared = q.shape[1] // k.shape[1]
    rows = _QUERIES if sinks is None else min(_QUERIES, _MASK // (k.shape[1] * len(k)))
    step = max(1, rows // shared)
    for first in range(0, len(q), step):
        last = min(first + step, len(q))
        low = 0 if window is None else max(0, past + first - window + 1)
        seen = slice(low, past + last)
        # The query heads of one key head become more queries of it: no key is copied, for any number of heads.
        rows = q[first:last].unflatten(1, (-1, shared)).transpose(0, 1).flatten(1, 2)
        mask = _mask(past + first, past + last, low, window, shared, q.device)
        keys, values = (t[seen].transpose(0, 1) for t in (k, v))
        if sinks is not None:
            keys, values = (F.pad(t, (0, 0, 1, 0)) for t in (keys, values))
            mask = _sink_mask(mask, sinks.to(q.dtype), rows, keys)
        heads = F.scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=scale)
        out[first:last] = heads[0].unflatten(1, (-1, shared)).transpose(0, 1).flatten(1, 2)


def _is_plain(q: Tensor, past: int, window: int | None, sinks: Tensor | None) -> bool:
    """Whether torch's own causal attention is what is wanted. On CPUs only: what GPUs have no kernel for, torch would
    compute with a matrix of all queries by all keys."""
    whole = past == 0 and sinks is None and (window is None or window >= len(q))
    return whole and len(q) > 1 and q.device.type == "cpu"


def _mask(first: int, last: int, low: int, window: int | None, shared: int, device: torch.device) -> Tensor | None:
    """bool [(last − first) · shared, last − low]: which keys, from position low on, the queries at positions first …
    last − 1 see. None for a single position, which sees all of them."""
    if last - first == 1:
        return None
    query = torch.arange(first, last, device=device).repeat_interleave(shared)[:, None]
    key = torch.arange(low, last, device=device)
    return key <= query if window is None else (key <= query) & (key > query - window)


def _sink_mask(mask: Tensor | None, sinks: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """[kv_heads, rows, keys] to be added to logits, from `_mask`'s of all keys but the first. That one and its value
    are zeros, so that it takes the share of a softmax that a sink does, and adds nothing."""
    bias = sinks.new_zeros(len(keys), rows.shape[1], keys.shape[1])
    bias[..., 0] = sinks.view(len(keys), -1).repeat(1, rows.shape[1] * len(keys) // len(sinks))
    if mask is not None:
        bias[..., 1:].masked_fill_(~mask, -math.inf)
    return bias


_SCORES = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "softmax_chosen": lambda logits: logits,
}


def route(logits: Tensor, spec: Moe, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    router = spec.router
    scores = _SCORES[router.score](logits.float())
    choice = scores if correction is None else scores + correction
    if router.top_groups < router.groups:
        choice = _within_groups(choice, router.groups, router.top_groups)
    ids = torch.topk(choice, spec.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if router.score == "softmax_chosen":
        weights = torch.softmax(weights, dim=-1)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.epsilon)
    return ids, weights * router.scale


def _within_groups(choice: Tensor, groups: int, top_groups: int) -> Tensor:
    """choice [T, E] with −∞ outside the groups whose two best sum to most."""
    grouped = choice.unflatten(-1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, activation: Swiglu | ClampedSwiglu,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
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
            inner = linear(x[places // k], _matrix(gate_up, e), _row(gate_up_bias, e))
            inner = swiglu(*inner.chunk(2, dim=-1), activation)
            pieces[places] = linear(inner, _matrix(down, e), _row(down_bias, e))
            start += count
    return _weighted_sum(pieces.view(-1, k, x.shape[1]), weights.masked_fill(ids < 0, 0))


def _matrix(w: Weight, e: int) -> Weight:
    return w.expert(e) if isinstance(w, PackedTensor) else w[e]


def _row(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]


def _weighted_sum(pieces: Tensor, weights: Tensor) -> Tensor:
    """pieces [T, k, H], weights float32 [T, k] -> [T, H], added up in the order of k in float32 and rounded once."""
    total = torch.zeros(len(pieces), pieces.shape[2], device=pieces.device)
    for j in range(pieces.shape[1]):
        total += pieces[:, j] * weights[:, j, None]
    return total.to(pieces.dtype)
