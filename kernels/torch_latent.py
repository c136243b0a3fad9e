"""Latent attention in plain torch, with and without an index of positions: see ops.py for what each operation does.

Scores against latents can be taken in two ways, which give the same up to rounding. Absorbed: the key's up-projection
goes into the query and the value's onto the result, so that all heads attend to the latents, as to one key head. Expanded:
keys and values of every head are made first, and heads are narrower. The first is for few queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tutel_pack.kernels.ops import Layout

_QUERIES = 512
"""Queries attended to at a time, times the heads where these share a key."""

_EXPANDED = 1 << 24
"""Elements of expanded keys and values at a time; heads are taken in groups that keep to it."""

_SCORES = 1 << 22
"""Elements of an indexer's scores at a time."""


def latent_attention(
    q: Tensor, entries: Tensor, up: Tensor, layout: Layout, scale: float, picks: Sequence[Tensor | None] | None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """attend: what attends to expanded keys and values, as attend_heads, which it is if None."""
    heads, made, rank = up.shape
    out = q.new_empty(len(q), heads, made - (q.shape[2] - entries.shape[-1] + rank))
    for s, new, past in _sequences(layout):
        picked, table = picks[s] if picks else None, layout.tables[s]
        if picked is not None and len(picked) == 1:
            # What a single query does not see is not even fetched.
            seen, past, picked = _at(entries, table, picked[0]), picked.shape[1] - 1, None
        else:
            seen = _stored(entries, table, layout.lengths[s])
        if _absorbing_is_cheaper(new.stop - new.start, len(seen), made, rank):
            absorbed(q[new], seen, up, past, scale, picked, out[new])
        else:
            expanded(q[new], seen, up, past, scale, picked, out[new], attend or attend_heads)
    return out


def _sequences(layout: Layout) -> Iterator[tuple[int, slice, int]]:
    """(sequence, its new tokens in the batch, how many positions came before them) of those that have new tokens."""
    for s, (start, stop) in enumerate(zip(layout.starts, layout.starts[1:])):
        if start < stop:
            yield s, slice(start, stop), layout.lengths[s] - (stop - start)


def _stored(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """What a sequence has in a pool [blocks, B, D], by position: [length, D]."""
    return pool[table].flatten(0, 1)[:length]


def _at(pool: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """The same at some positions."""
    block = pool.shape[1]
    return pool[table[positions // block], positions % block]


def _absorbing_is_cheaper(queries: int, keys: int, made: int, rank: int) -> bool:
    """By multiplications of a head, those with the rotated dimensions left out on both sides. made: nope + v."""
    return queries * (2 * rank * keys + rank * made) <= queries * made * keys + keys * rank * made


def absorbed(q: Tensor, seen: Tensor, up: Tensor, past: int, scale: float, picked: Tensor | None, out: Tensor) -> None:
    """Attention of one sequence: query i of q [Q, heads, nope + rotated] stands at position past + i, entry j of `seen`
    [L, rank + rotated] at position j. picked: see Ops.latent_attention. out [Q, heads, v] is filled."""
    heads, rank = up.shape[0], up.shape[2]
    nope = q.shape[2] - seen.shape[1] + rank
    key_up, value_up = up[:, :nope], up[:, nope:].transpose(1, 2)
    for first, last in _steps(len(q), _QUERIES // heads):
        keys = seen[: past + last]
        queries = q[first:last].transpose(0, 1)
        queries = torch.cat([queries[..., :nope] @ key_up, queries[..., nope:]], dim=-1)
        mask = _mask(first, last, past, picked, q.device)
        mask = mask if mask is None else mask.repeat_interleave(heads, dim=0)
        # The heads of a query are queries of one key head. Its values are wider than they need be, but are the keys.
        rows, keys = queries.transpose(0, 1).flatten(0, 1)[None, None], keys[None, None]
        latents = F.scaled_dot_product_attention(rows, keys, keys, mask, scale=scale)
        latents = latents[0, 0, :, :rank].unflatten(0, (-1, heads)).transpose(0, 1)
        out[first:last] = (latents @ value_up).transpose(0, 1)


def expanded(
    q: Tensor, seen: Tensor, up: Tensor, past: int, scale: float, picked: Tensor | None, out: Tensor,
    attend: Callable[..., Tensor],
) -> None:  # fmt: skip
    """The same as `absorbed`, by the keys and values of every head. attend: see attend_heads."""
    rank, v = up.shape[2], out.shape[2]
    nope, width = q.shape[2] - seen.shape[1] + rank, max(q.shape[2], v)
    for low, high in _steps(len(up), _EXPANDED // (len(seen) * width)):
        made = F.linear(seen[:, :rank], up[low:high].flatten(0, 1)).unflatten(1, (high - low, -1))
        rotated = seen[:, None, rank:].expand(-1, high - low, -1)
        # Of one width, for which there are the better kernels; the zeros add nothing.
        keys = _widened(torch.cat([made[..., :nope], rotated], dim=-1), width)
        values = _widened(made[..., nope:], width)
        out[:, low:high] = attend(_widened(q[:, low:high], width), keys, values, past, scale, picked)[..., :v]


def attend_heads(
    q: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, picked: Tensor | None
) -> Tensor:  # fmt: skip
    """q [Q, h, D], keys and values [L, h, D], of the positions and with the picks that `absorbed` has -> [Q, h, D]."""
    out, (queries, keys, values) = torch.empty_like(q), (t.transpose(0, 1)[None] for t in (q, keys, values))
    for first, last in _steps(len(q), _QUERIES):
        mask, end = _mask(first, last, past, picked, q.device), past + last
        heads = F.scaled_dot_product_attention(
            queries[:, :, first:last], keys[:, :, :end], values[:, :, :end], mask, scale=scale
        )
        out[first:last] = heads[0].transpose(0, 1)
    return out


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


def _steps(n: int, step: int) -> Iterator[tuple[int, int]]:
    step = max(1, step)
    yield from ((first, min(first + step, n)) for first in range(0, n, step))


def _mask(first: int, last: int, past: int, picked: Tensor | None, device: torch.device) -> Tensor | None:
    """bool [last − first, past + last]: which positions the queries first … last − 1 see. None for a single query that
    sees all of them."""
    if last - first == 1 and picked is None:
        return None
    mask = _causal(past + first, past + last, device)
    if picked is None:
        return mask
    # Positions behind a query are picked where there are fewer before it: into a column of their own, which is dropped.
    chosen = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.bool, device=device)
    chosen.scatter_(1, picked[first:last].clamp(max=mask.shape[1]), True)
    return mask & chosen[:, :-1]


def _causal(first: int, last: int, device: torch.device) -> Tensor:
    """bool [last − first, last]: which positions 0 … last − 1 those from `first` on see."""
    return torch.arange(last, device=device) <= torch.arange(first, last, device=device)[:, None]


def top_positions(q: Tensor, weights: Tensor, keys: Tensor, layout: Layout, top_k: int) -> list[Tensor | None]:
    picks: list[Tensor | None] = [None] * len(layout.tables)
    for s, new, past in _sequences(layout):
        if layout.lengths[s] > top_k:
            seen = _stored(keys, layout.tables[s], layout.lengths[s]).float()
            picks[s] = _top(q[new], weights[new], seen, past, top_k)
    return picks


def _top(q: Tensor, weights: Tensor, keys: Tensor, past: int, top_k: int) -> Tensor:
    picks = torch.empty(len(q), top_k, dtype=torch.int64, device=q.device)
    for first, last in _steps(len(q), _SCORES // (q.shape[1] * len(keys))):
        # Scores of what is yet to come are −∞; some of it must be there where fewer than top_k positions came before.
        width = max(past + last, top_k)
        heads = F.relu(q[first:last].float() @ keys[:width].T)
        scores = (weights[first:last, None] @ heads)[:, 0]
        future = torch.arange(width, device=q.device) > past + torch.arange(first, last, device=q.device)[:, None]
        picks[first:last] = scores.masked_fill_(future, -torch.inf).topk(top_k, dim=-1).indices
    return picks
