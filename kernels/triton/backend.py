"""The backend of ops.py for NVIDIA's and AMD's GPUs: kernels in Triton, which TRITON_INTERPRET=1 runs on a CPU.

Kernels are linear (of packed weights, and of plain ones in another dtype than x's, as heads and routers are), moe,
route, rms_norm, rope, attention and latent_attention of sequences with one new token, for `attend` and `attend_latents`
ones that norm, turn and store before them, and for linears and dense one that adds up parts of several products. The
rest is torch's: attention of sequences with several, top_positions, embedding, rotation, swiglu, products with matrices
in x's dtype, and weights whose geometry `matmul.is_served` excludes. Nothing here waits for the device, and grids depend
on shapes and the layout alone. An expert id that does not exist counts as −1, for to tell would mean to wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from functools import partial
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.ops import Dense, Heads, Latent, Layout, Projection, Weight
from tutel_pack.kernels.torch_backend import embedding, rotation, swiglu, top_positions  # noqa: F401  (served by torch)
from tutel_pack.kernels.triton.activations import Activations, quantizing
from tutel_pack.kernels.triton.attention import Queries, attending, by_length, stack_picks
from tutel_pack.kernels.triton.chips import Chip, chip_of
from tutel_pack.kernels.triton.heads import placing, placing_latents
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.matmul import (
    Epilogue,
    Operand,
    Tiles,
    elements,
    is_served,
    joint,
    operand,
    problem_of,
    product,
    sorting,
    summing,
)
from tutel_pack.kernels.triton.router import route as _route
from tutel_pack.kernels.triton.rows import norming, rotating
from tutel_pack.kernels.triton.tiles import tile_for
from tutel_pack.spec import ClampedSwiglu, Moe, Swiglu


def linear(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    plain = elements(w)
    if not is_served(w) or (plain is not None and plain.dtype == x.dtype):
        return torch_backend.linear(x, w, bias)
    out = x.new_empty(len(x), w.shape[0])
    weight, chip = operand(w), chip_of(x.device)
    tile = tile_for(chip, problem_of(weight, len(x), x.dtype))
    for launch in product(chip, x.contiguous(), weight, out, tile, Epilogue(bias)):
        launch.run()
    return out


def linears(x: Tensor, parts: Sequence[Projection]) -> list[Tensor]:
    out = _joint(x, parts)
    if out is None:
        return [linear(x, w, bias) for w, bias in parts]
    return list(out.split([w.shape[0] for w, _ in parts], dim=1))


def dense(x: Tensor, dense: Dense) -> Tensor | None:
    inner = _joint(x, (dense.gate, dense.up), dense.activation)
    return None if inner is None else linear(inner, *dense.down)


def _joint(
    x: Tensor, parts: Sequence[Projection], activation: Swiglu | ClampedSwiglu | None = None
) -> Tensor | None:
    """See matmul.joint; None, too, for weights and biases that it is not for."""
    weights, biases = zip(*parts)
    if any(bias is not None for bias in biases) or not all(elements(w) is None and is_served(w) for w in weights):
        return None
    found = joint(chip_of(x.device), x.contiguous(), [operand(w) for w in weights], activation)
    if found is None:
        return None
    out, launches = found
    for launch in launches:
        launch.run()
    return out


def _dense(x: Tensor) -> Tensor:
    """Without gaps in its last dimension, as kernels take rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, out = _dense(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    norming(x.reshape(-1, x.shape[-1]), weight, eps, out.view(-1, x.shape[-1])).run()
    return out


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    x, added, *made = (t.view(-1, t.shape[-1]) for t in (_dense(x), _dense(added), total, out))
    norming(x, weight, eps, made[1], added, made[0]).run()
    return total, out


def rope(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rotating(_dense(x), rotation, interleaved, out).run()
    return out


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: Layout,
    rotation: tuple[Tensor, Tensor] | None, heads: Heads,
) -> Tensor | None:  # fmt: skip
    if q.dtype != keys.dtype or keys.stride() != values.stride() or keys.stride(3) != 1:
        return None
    turned = q.new_empty(len(q), q.shape[1] // keys.shape[3], keys.shape[3])
    angles = rotation and tuple(r.contiguous() for r in rotation)
    placing(*map(_dense, (q, k, v)), keys, values, layout.slots.contiguous(), angles, heads, turned).run()
    return attention(turned, keys, values, layout, heads.window, heads.scale, heads.sinks).flatten(1)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, window: int | None,
    scale: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    def decode(queries: Sequence[Tensor], layout: Layout, which: Sequence[int]) -> Tensor:
        q = _dense(queries[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        factor, chip = q.shape[2] ** -0.5 if scale is None else scale, chip_of(q.device)
        for launch in attending(chip, Queries(q), keys, values, layout.flat, out, factor, window, sinks):
            launch.run()
        return out

    def prefill(queries: Sequence[Tensor], layout: Layout, which: Sequence[int]) -> Tensor:
        return torch_backend.attention(*queries, keys, values, layout, window, scale, sinks)

    return by_length([q], layout, decode, prefill)


def latent_attention(
    q: Tensor, entries: Tensor, up: Tensor, layout: Layout, scale: float, picks: Sequence[Tensor | None] | None
) -> Tensor:
    shared = entries.shape[-1] - up.shape[2]
    parts = _dense(q).split([q.shape[2] - shared, shared], dim=-1)
    return _attend_to_latents(parts, entries, up, layout, scale, picks)


def attend_latents(
    q: Tensor, kv: Tensor, entries: Tensor, layout: Layout, rotation: tuple[Tensor, Tensor], latent: Latent,
    picks: Sequence[Tensor | None] | None,
) -> Tensor | None:  # fmt: skip
    if q.dtype != entries.dtype or entries.stride(2) != 1:
        return None
    q, shared = _dense(q).unflatten(1, (len(latent.up), -1)), kv.shape[1] - latent.up.shape[2]
    nope, rotated = q.split([q.shape[2] - shared, shared], dim=-1)
    turned, angles = rotated.new_empty(rotated.shape), [r.contiguous() for r in rotation]
    placing_latents(rotated, _dense(kv), entries, layout.slots.contiguous(), angles, latent, turned).run()
    return _attend_to_latents((nope, turned), entries, latent.up, layout, latent.scale, picks).flatten(1)


def _attend_to_latents(
    parts: Sequence[Tensor], entries: Tensor, up: Tensor, layout: Layout, scale: float,
    picks: Sequence[Tensor | None] | None,
) -> Tensor:  # fmt: skip
    """`latent_attention` of queries in parts [T, heads, nope] and [T, heads, D]. The up-projections of keys and values
    are absorbed: they are applied to queries and results, by torch."""
    heads, made, rank = up.shape

    def decode(queries: Sequence[Tensor], layout: Layout, which: Sequence[int]) -> Tensor:
        nope, rest = queries
        key_up, value_up = up.split([nope.shape[2], made - nope.shape[2]], dim=1)
        absorbed = torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)
        latents, out = (nope.new_empty(len(nope), heads, n) for n in (rank, value_up.shape[1]))
        seen = stack_picks([picks[s] for s in which], nope.device) if picks else None
        given, keys = Queries(absorbed, rest if rest.shape[2] else None), entries[:, :, None]
        for launch in attending(chip_of(nope.device), given, keys, None, layout.flat, latents, scale, picks=seen):
            launch.run()
        torch.bmm(latents.transpose(0, 1), value_up.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def prefill(queries: Sequence[Tensor], layout: Layout, which: Sequence[int]) -> Tensor:
        chosen = picks and [picks[s] for s in which]
        return torch_backend.latent_attention(torch.cat(queries, dim=-1), entries, up, layout, scale, chosen)

    return by_length(parts, layout, decode, prefill)


def route(logits: Tensor, spec: Moe, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    ids = torch.empty(len(logits), spec.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        routing(logits.contiguous(), spec, correction, ids, weights).run()
    return ids, weights


def routing(logits: Tensor, spec: Moe, correction: Tensor | None, ids: Tensor, weights: Tensor) -> Launch:
    """Fills ids and weights."""
    router = spec.router
    groups = router.groups if router.top_groups < router.groups else 1
    size = spec.experts // groups
    g, s = triton.next_power_of_2(groups), triton.next_power_of_2(size)
    arguments = dict(
        logits=logits, correction=correction, ids=ids, weights=weights,
        experts=spec.experts, size=size, scale=float(router.scale), epsilon=float(router.epsilon),
        SCORE=router.score, TOP_K=spec.top_k, GROUPS=groups, TOP_GROUPS=min(groups, router.top_groups),
        RENORMALIZE=router.renormalize, G=g, S=s, K=triton.next_power_of_2(spec.top_k),
    )  # fmt: skip
    return Launch(_route, (len(logits),), arguments, warps=1)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, activation: Swiglu | ClampedSwiglu,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str | None = None,
) -> Tensor:  # fmt: skip
    if not is_served(gate_up) or not is_served(down):
        return torch_backend.moe(x, ids, weights, gate_up, down, activation, gate_up_bias, down_bias)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = Epilogue(gate_up_bias, None, activation), Epilogue(down_bias, weights.contiguous())
    x, ids = x.contiguous(), ids.contiguous()
    for launch in experts(chip_of(x.device), x, ids, operand(gate_up), operand(down), first, second, out, act):
        launch.run()
    return out


def experts(
    chip: Chip, x: Tensor, ids: Tensor, gate_up: Operand, down: Operand, first: Epilogue, second: Epilogue,
    out: Tensor, act: str | None = None,
) -> list[Launch]:  # fmt: skip
    """What fills out [T, H]: the sort, the two products, the sum. first, second: what follows the products.  act: of
    activations, where a weight can take them so."""
    (count, h, i), pairs = down.shape, ids.numel()
    acts = [act if act and w.takes(act) else None for w in (gate_up, down)]
    problem = problem_of(gate_up, pairs, x.dtype, acts[0])
    up, back = tile_for(chip, problem), tile_for(chip, problem_of(down, pairs, x.dtype, acts[1]))
    tiles = Tiles.empty(pairs, problem.tiles, x.device)
    inner, pieces = x.new_empty(pairs, i), x.new_empty(pairs, h)
    flat = ids.view(-1)
    (x, before), (given, between) = _quantized(x, acts[0]), _quantized(inner, acts[1])
    return [
        sorting(flat, count, up.bm, tiles),
        *before,
        *product(chip, x, gate_up, inner, up, first, flat, tiles, gather=ids.shape[1]),
        *between,
        *product(chip, given, down, pieces, back, second, flat, tiles, scatter=True),
        summing(pieces, ids, out, count),
    ]


def _quantized(x: Tensor, act: str | None) -> tuple[Tensor | Activations, list[Launch]]:
    if act is None:
        return x, []
    made, launch = quantizing(x, act)
    return made, [launch]


def with_act(act: str) -> SimpleNamespace:
    """This backend, with what enters the experts quantized: see ops.ACTS."""
    return SimpleNamespace(**{**globals(), "moe": partial(moe, act=act)})
