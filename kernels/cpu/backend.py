"""The operations of ops.py by the C++ of this folder, in float32 and bfloat16.

Native are `linear` and `moe` of mxfp4, nvfp4, int4, fp8, bfloat16 and (few tokens) float32 weights, what lies between them,
gated delta nets, and whole layers: of few new tokens, and of many in bfloat16 where the processor multiplies by tiles and
attention is not to latents. Everything else is torch's, and so are activations in float16 and weights that
`native.describe` has no kernel for.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tutel_pack.errors import ResourceError
from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import (
    Delta,
    Dense,
    Experts,
    Grouped,
    Heads,
    Index,
    Latent,
    Layer,
    Layout,
    PlacedLayers,
    Projection,
    Weight,
)
from tutel_pack.kernels.torch_backend import (  # noqa: F401  what is not native
    embedding,
    rope,
    rotation,
    swiglu,
    top_positions,
)
from tutel_pack.kernels.torch_latent import attend_heads
from tutel_pack.spec import ClampedSwiglu, Moe, Swiglu

_library = native.library()
_linear, _linears, _moe = _library.tp_linear, _library.tp_linears, _library.tp_moe
_dense, _routed, _delta_net = _library.tp_dense_step, _library.tp_routed, _library.tp_delta_net
_rms_norm, _add_norm = _library.tp_rms_norm, _library.tp_add_norm
_route, _place_heads = _library.tp_route, _library.tp_place_heads
_attend, _attend_latents, _has_attention = _library.tp_attend, _library.tp_attend_latents, _library.tp_attends
_layers_step, _logits = _library.tp_layers, _library.tp_logits

_DTYPES = native.DTYPES

WIDEST = 576
"""Values of a key that attention takes at most, as ATTEND_WIDTH of isa.h: DeepSeek's latents with what heads share."""

_known: dict[tuple[int, str | None], tuple[weakref.ref, int]] = {}
"""By id of a weight, and what vectors are quantized to for it: a reference to it, and where its description is, 0 if
there is none."""

_described: dict[tuple[int, str | None], native.Weight] = {}
_describing = threading.Lock()


def _place(w: Weight, act: str | None = None) -> int:
    """Address of a weight's description, 0 where there is no kernel for it. Described once."""
    found = _known.get((id(w), act))
    return found[1] if found is not None and found[0]() is w else _describe(w, act)


def _describe(w: Weight, act: str | None) -> int:
    key = id(w), act

    def forget(_, key=key):
        _known.pop(key, None)
        _described.pop(key, None)

    with _describing:  # two threads may meet a weight at once, and each keeps the address that it was given
        found = _known.get(key)
        if found is None or found[0]() is not w:
            _described[key] = description = native.describe(w, act)
            _known[key] = found = weakref.ref(w, forget), ctypes.addressof(description) if description else 0
        return found[1]


def _bias(bias: Tensor | None) -> tuple[int | None, int, Tensor | None]:
    """(address, dtype, the tensor to be kept) of a bias."""
    if bias is None:
        return None, 0, None
    if bias.dtype not in _DTYPES:
        bias = bias.float()
    bias = bias.contiguous()
    return bias.data_ptr(), _DTYPES[bias.dtype], bias


def _clamp(activation: Swiglu | ClampedSwiglu) -> tuple[float, float, float]:
    """(limit, alpha, shift) as the library takes them; no limit is none of them."""
    clamped = isinstance(activation, ClampedSwiglu)
    return (activation.limit, activation.alpha, activation.shift) if clamped else (0.0, 0.0, 0.0)


def _address(structure: ctypes.Structure | None) -> int | None:
    return None if structure is None else ctypes.addressof(structure)


_FEW = 8
"""Vectors that plain weights in float32 meet one by one; for more, torch's products are faster."""

_NO_KERNEL = 3
"""A status: nothing was done."""


def _check(status: int) -> None:
    if status == 1:
        raise IndexError("an expert id is outside −1 … experts − 1")
    if status == 2:
        raise ResourceError("There is not enough memory for this many tokens at once: run fewer or shorter sequences.")


def linear(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    place, dtype = _place(w), _DTYPES.get(x.dtype)
    if not place or dtype is None or (len(x) > _FEW and isinstance(w, Tensor) and w.dtype == torch.float32):
        return torch_backend.linear(x, w, bias)
    x, out = x.contiguous(), x.new_empty(len(x), w.shape[0])
    address, bias_dtype, _kept = _bias(bias)
    _check(_linear(place, x.data_ptr(), len(x), dtype, address, bias_dtype, out.data_ptr()))
    return out


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, activation: Swiglu | ClampedSwiglu,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str | None = None,
) -> Tensor:  # fmt: skip
    gate_up_place, down_place, dtype = _place(gate_up, act), _place(down, act), _DTYPES.get(x.dtype)
    if act and dtype is None:
        return moe(x.float(), ids, weights, gate_up, down, activation, gate_up_bias, down_bias, act).to(x.dtype)
    if not gate_up_place or not down_place or dtype is None:
        return torch_backend.moe(x, ids, weights, gate_up, down, activation, gate_up_bias, down_bias)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    out = torch.empty_like(x)
    first, first_dtype, _first = _bias(gate_up_bias)
    second, second_dtype, _second = _bias(down_bias)
    _check(_moe(
        gate_up_place, down_place, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), len(x), ids.shape[1], dtype,
        *_clamp(activation), first, first_dtype, second, second_dtype, out.data_ptr(),
    ))  # fmt: skip
    return out


def with_act(act: str) -> SimpleNamespace:
    """This backend, with what enters the experts quantized: see ops.CPU_ACTS."""
    changed = {operation.__name__: partial(operation, act=act) for operation in (moe, routed, layers)}
    return SimpleNamespace(**{**globals(), **changed})


def linears(x: Tensor, parts: Sequence[tuple[Weight, Tensor | None]]) -> list[Tensor]:
    places, dtype = [_place(w) for w, _ in parts], _DTYPES.get(x.dtype)
    biases = [bias for _, bias in parts]
    same = len({bias is not None and bias.dtype for bias in biases}) == 1
    if dtype is None or not all(places) or not same or (biases[0] is not None and biases[0].dtype not in _DTYPES):
        return [linear(x, w, bias) for w, bias in parts]
    tokens, rows = x.shape[0], [w.shape[0] for w, _ in parts]
    x, out = x.contiguous(), x.new_empty(tokens * sum(rows))
    pointers = ctypes.c_void_p * len(parts)
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    addresses = None if biases[0] is None else pointers(*(bias.data_ptr() for bias in biases))
    bias_dtype = 0 if addresses is None else _DTYPES[biases[0].dtype]
    _check(_linears(
        len(parts), pointers(*places), x.data_ptr(), tokens, dtype, addresses, bias_dtype, out.data_ptr()
    ))  # fmt: skip
    return [part.view(tokens, n) for part, n in zip(out.split([tokens * n for n in rows]), rows)]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype, weight_dtype = _DTYPES.get(x.dtype), _DTYPES.get(weight.dtype)
    if dtype is None or weight_dtype is None:
        return torch_backend.rms_norm(x, weight, eps)
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    n = weight.shape[0]
    _check(_rms_norm(
        x.data_ptr(), x.numel() // n, n, dtype, weight.data_ptr(), weight_dtype, eps, out.data_ptr()
    ))  # fmt: skip
    return out


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    dtype, weight_dtype = _DTYPES.get(x.dtype), _DTYPES.get(weight.dtype)
    if dtype is None or weight_dtype is None or added.dtype != x.dtype:
        return None
    x, added, weight = x.contiguous(), added.contiguous(), weight.contiguous()
    total, out, n = torch.empty_like(x), torch.empty_like(x), weight.shape[0]
    _check(_add_norm(
        x.data_ptr(), added.data_ptr(), x.numel() // n, n, dtype, weight.data_ptr(), weight_dtype, eps,
        total.data_ptr(), out.data_ptr(),
    ))  # fmt: skip
    return total, out


def logits(x: Tensor, added: Tensor | None, norm: Tensor, eps: float, head: Weight) -> Tensor | None:
    x = x if added is None else x + added
    place, dtype, norm_dtype = _place(head), _DTYPES.get(x.dtype), _DTYPES.get(norm.dtype)
    if not place or dtype is None or norm_dtype is None:
        return None
    x, norm = x.contiguous(), norm.contiguous()
    out = x.new_empty(len(x), head.shape[0], dtype=torch.float32)
    _check(_logits(place, x.data_ptr(), len(x), dtype, norm.data_ptr(), norm_dtype, eps, out.data_ptr()))
    return out


def route(logits: Tensor, spec: Moe, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    logits, tokens = logits.float().contiguous(), logits.shape[0]
    ids, weights = torch.empty(tokens, spec.top_k, dtype=torch.int64), torch.empty(tokens, spec.top_k)
    router = native.describe_router(spec, correction)
    _check(_route(ctypes.addressof(router), logits.data_ptr(), tokens, ids.data_ptr(), weights.data_ptr()))
    return ids, weights


_layers: dict[str | None, weakref.WeakKeyDictionary[Heads | Delta | Dense | Experts | PlacedLayers, Any]]
_layers = defaultdict(weakref.WeakKeyDictionary)
"""What is the same for all tokens of a layer, described once, by what enters its experts as."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: Layout,
    rotation: tuple[Tensor, Tensor] | None, heads: Heads,
) -> Tensor | None:  # fmt: skip
    if q.dtype != keys.dtype or not (keys.is_contiguous() and values.is_contiguous() and _is_plain(rotation)):
        return None
    made_for, place = _made_for(q, keys, rotation), _layers[None].get(heads)
    if place is None or place.made_for != made_for:
        _layers[None][heads] = place = _describe_heads(q, keys, rotation, heads)
    if place is None:
        return None
    q, k, v, slots = q.contiguous(), k.contiguous(), v.contiguous(), layout.slots.contiguous()
    tokens, turned = q.shape[0], torch.empty_like(q)
    _check(_place_heads(
        ctypes.addressof(place), tokens, q.data_ptr(), k.data_ptr(), v.data_ptr(), *_angles(rotation),
        slots.data_ptr(), turned.data_ptr(), keys.data_ptr(), values.data_ptr(),
    ))  # fmt: skip
    turned = turned.view(tokens, place.heads, place.width)
    return attention(turned, keys, values, layout, heads.window, heads.scale, heads.sinks).view(tokens, -1)


def _is_plain(rotation: tuple[Tensor, Tensor] | None) -> bool:
    return rotation is None or (rotation[0].is_contiguous() and rotation[1].is_contiguous())


def _angles(rotation: tuple[Tensor, Tensor] | None) -> tuple[int | None, int | None]:
    """Addresses of cosines and sines."""
    return (None, None) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())


def attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, window: int | None,
    scale: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    place, heads, dtype = _layout(layout), q.shape[1], _DTYPES.get(q.dtype)
    if not _attends(q.dtype, keys) or not (keys.is_contiguous() and values.is_contiguous()):
        return torch_backend.attention(q, keys, values, layout, window, scale, sinks)
    described = _describe_attention(heads, keys, window, scale, sinks, dtype)
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    status = _attend(
        ctypes.addressof(described), place.address, q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()
    )
    if status == _NO_KERNEL:
        return torch_backend.attention(q, keys, values, layout, window, scale, sinks)
    _check(status)
    return out


def _attends(dtype: torch.dtype, keys: Tensor) -> bool:
    """Whether there is a kernel for queries of such keys."""
    width = keys.shape[-1]
    return dtype in _DTYPES and keys.dtype == dtype and width % 16 == 0 and width <= WIDEST


def _describe_attention(heads: int, keys: Tensor, window, scale, sinks: Tensor | None, dtype: int) -> native.Attention:
    _, block_size, kv_heads, width = keys.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    found = native.Attention(
        heads, kv_heads, width, width, block_size, window or 0, None if sinks is None else sinks.data_ptr(),
        width**-0.5 if scale is None else scale, dtype, dtype,
    )  # fmt: skip
    found.keep = sinks
    return found


def latent_attention(
    q: Tensor, entries: Tensor, up: Tensor, layout: Layout, scale: float, picks: Sequence[Tensor | None] | None
) -> Tensor:
    place, (heads, made, rank) = _layout(layout), up.shape
    shared, tops = entries.shape[-1] - rank, {p.shape[1] for p in picks or () if p is not None}
    same = q.dtype == up.dtype and entries.is_contiguous() and rank % 16 == 0 and len(tops) <= 1
    if not same or not _attends(q.dtype, entries):
        return torch_backend.latent_attention(q, entries, up, layout, scale, picks)
    nope = q.shape[2] - shared
    described = native.Latents(heads, nope, made - nope, rank, shared, entries.shape[1], scale, _DTYPES[q.dtype])
    q, up, out = q.contiguous(), up.contiguous(), q.new_empty(len(q), heads, made - nope)
    picked = [None if p is None else p.contiguous() for p in picks or ()]
    addresses = (ctypes.c_void_p * len(picked))(*(None if p is None else p.data_ptr() for p in picked))
    status = _attend_latents(
        ctypes.addressof(described), place.address, q.data_ptr(), entries.data_ptr(), up.data_ptr(),
        addresses if tops else None, max(tops, default=0), out.data_ptr(),
    )  # fmt: skip
    if status == _NO_KERNEL:
        return torch_backend.latent_attention(q, entries, up, layout, scale, picks, _attend_heads)
    _check(status)
    return out


_FIRST = torch.zeros(1, dtype=torch.int64)
"""The table of a sequence in one block."""


def _attend_heads(
    q: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, picked: Tensor | None
) -> Tensor:  # fmt: skip
    """As torch_latent.attend_heads."""
    layout = Layout([0, len(q)], [len(keys)], [_FIRST], _FIRST[:0])
    described = _describe_attention(q.shape[1], keys[None], None, scale, None, _DTYPES[q.dtype])
    if picked is not None or not _has_attention(ctypes.addressof(described), _layout(layout).address):
        return attend_heads(q, keys, values, past, scale, picked)
    return attention(q, keys[None], values[None], layout, None, scale, None)


_layouts: weakref.WeakKeyDictionary[Layout, native.Layout] = weakref.WeakKeyDictionary()


def _layout(layout: Layout) -> native.Layout:
    """Described once."""
    if layout not in _layouts:
        _layouts[layout] = _describe_layout(layout)
    return _layouts[layout]


def _describe_layout(layout: Layout) -> native.Layout:
    starts, lengths = list(layout.starts), list(layout.lengths)
    tables = [table.contiguous() for table in layout.tables]
    addresses = [table.data_ptr() for table in tables]
    arrays = [
        (ctypes.c_int64 * len(starts))(*starts), (ctypes.c_int64 * len(lengths))(*lengths),
        (ctypes.c_void_p * len(addresses))(*addresses),
    ]  # fmt: skip
    states = None if layout.states is None else layout.states.contiguous()
    found = native.Layout(len(lengths), *map(ctypes.addressof, arrays), None if states is None else states.data_ptr())
    found.keep, found.address = (arrays, tables, states), ctypes.addressof(found)
    return found


def _describe_heads(q: Tensor, keys: Tensor, rotation: tuple[Tensor, Tensor] | None, heads: Heads) -> native.Heads | None:
    if q.dtype not in _DTYPES:
        return None
    norms, (kv_heads, width) = [_vector(norm) for norm in (heads.q_norm, heads.k_norm)], keys.shape[2:]
    if norms[0].dtype != norms[1].dtype:
        return None
    found = native.Heads(
        q.shape[1] // width, kv_heads, width, 2 * rotation[0].shape[1] if rotation else 0, norms[0].data, norms[1].data,
        norms[0].dtype, heads.interleaved, _DTYPES[q.dtype], heads.eps,
    )  # fmt: skip
    found.made_for, found.keep = _made_for(q, keys, rotation), norms
    return found


def _made_for(q: Tensor, keys: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple:
    """What the description of a layer's heads depends on, beside the Heads."""
    return q.dtype, q.shape[1], keys.shape[1:], rotation[0].shape[1] if rotation else 0


def delta_net(x: Tensor, delta: Delta, tails: Tensor, memories: Tensor, layout: Layout) -> Tensor | None:
    made_for = x.dtype, tails.dtype
    place = _layers[None].get(delta)
    if place is None or place.made_for != made_for:
        place = SimpleNamespace(made_for=made_for, delta=_describe_delta(x, delta, tails))
        _layers[None][delta] = place
    if place.delta is None or not (tails.is_contiguous() and memories.is_contiguous()):
        return None
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _check(_delta_net(
        ctypes.addressof(place.delta), _layout(layout).address, x.data_ptr(), tails.data_ptr(), memories.data_ptr(),
        out.data_ptr(),
    ))  # fmt: skip
    return out


def dense(x: Tensor, dense: Dense) -> Tensor | None:
    return _whole(_dense, _describe_dense, dense, x)


def _whole(
    function: Callable, describe: Callable, parts: Dense | Experts, x: Tensor, act: str | None = None
) -> Tensor | None:
    """What a feed-forward block makes of x; None where one of its parts has no kernel."""
    layers = _layers[act]
    if parts not in layers:
        layers[parts] = describe(parts)
    place, dtype = layers[parts], _DTYPES.get(x.dtype)
    if place is None or dtype is None:
        return None
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _check(function(ctypes.addressof(place), x.data_ptr(), x.shape[0], dtype, out.data_ptr()))
    return out


def _describe_dense(d: Dense) -> native.Dense | None:
    described = _describe_projections([d.gate, d.up, d.down])
    if described is None:
        return None
    weights, biases = described
    found = native.Dense(weights, biases, *_clamp(d.activation))
    found.keep = biases
    return found


def _describe_projections(parts: Sequence[Projection | None]) -> tuple[ctypes.Array, ctypes.Array] | None:
    """(weights, biases); None where one has no kernel. A projection that is not there is null."""
    places = [part and _place(part[0]) for part in parts]
    if 0 in places:
        return None
    vectors = [_vector(part and part[1]) for part in parts]
    biases = (native.Vector * len(parts))(*vectors)
    biases.keep = vectors
    return (ctypes.c_void_p * len(parts))(*places), biases


def _vector(x: Tensor | None) -> native.Vector:
    address, dtype, kept = _bias(x)
    found = native.Vector(address, dtype)
    found.keep = kept
    return found


def routed(x: Tensor, experts: Experts, act: str | None = None) -> Tensor | None:
    return _whole(_routed, partial(_describe_experts, act=act), experts, x, act)


def _exact(w: Weight | None) -> Weight | None:
    """A small weight that meets x in float32: in float16 it has no kernel, but float32 holds it."""
    return w.float() if isinstance(w, Tensor) and w.dtype == torch.float16 else w


def _describe_experts(e: Experts, act: str | None) -> native.Experts | None:
    small = _exact(e.router), _exact(e.shared_gate)
    places = [_place(small[0]), _place(e.gate_up, act), _place(e.down, act)]
    shared = None if e.shared is None else _describe_dense(e.shared)
    gate = None if small[1] is None else _place(small[1])
    if not all(places) or (e.shared is not None and shared is None) or gate == 0:
        return None
    router = native.describe_router(e.spec, e.correction)
    biases = [_vector(bias) for bias in (e.router_bias, e.gate_up_bias, e.down_bias)]
    found = native.Experts(
        *places, ctypes.addressof(router), *biases, *_clamp(e.spec.activation), _address(shared), gate
    )
    found.keep = router, biases, shared, small
    return found


def layers(
    x: Tensor, placed: PlacedLayers, rotations: Sequence[tuple[Tensor, Tensor]], layout: Layout, act: str | None = None
) -> Tensor | None:
    if not all(map(_is_plain, rotations)):
        return None
    made_for, known = (x.dtype, tuple(cosines.shape[1] for cosines, _ in rotations)), _layers[act]
    place = known.get(placed)
    if place is None or place.made_for != made_for:
        known[placed] = place = SimpleNamespace(made_for=made_for, layers=_describe_layers(x, placed, rotations, act))
    if place.layers is None:
        return None
    angles = (native.Rotation * len(rotations))(*map(_angles, rotations))
    out, slots = x.clone(memory_format=torch.contiguous_format), layout.slots.contiguous()
    status = _layers_step(
        len(place.layers), place.layers, angles, _layout(layout).address, out.data_ptr(), x.shape[0], slots.data_ptr()
    )
    if status == _NO_KERNEL:
        return None
    _check(status)
    return out


def _describe_layers(
    x: Tensor, placed: PlacedLayers, rotations: Sequence[tuple[Tensor, Tensor]], act: str | None
) -> ctypes.Array | None:
    """None where one of them has no kernel."""
    kept = []
    whiches = placed.rotations, placed.index_rotations or [None] * len(placed.layers)
    for layer, pools, *which in zip(placed.layers, placed.pools, *whiches):
        plain, turned = all(pool.is_contiguous() for pool in pools), [None if i is None else rotations[i] for i in which]
        described = _describe_layer(x, layer, pools, *turned, act) if plain else None
        if described is None:
            return None
        kept.append(described)
    found = (native.PlacedLayer * len(kept))(*(
        (ctypes.addressof(layer), *(-1 if i is None else i for i in which), pools[0].data_ptr(), pools[-1].data_ptr())
        for layer, pools, *which in zip(kept, placed.pools, *whiches)
    ))  # fmt: skip
    found.keep = kept
    return found


def _describe_layer(
    x: Tensor, layer: Layer, pools: Sequence[Tensor], rotation: tuple[Tensor, Tensor] | None,
    index_rotation: tuple[Tensor, Tensor] | None, act: str | None,
) -> native.Layer | None:  # fmt: skip
    """None where one of its parts has no kernel."""
    a, m = layer.attention, layer.mlp
    grouped = _describe_grouped(x, a, pools[0], rotation) if isinstance(a, Grouped) else None
    latent = _describe_latent(x, a, pools[0], rotation, index_rotation) if isinstance(a, Latent) else None
    delta = _describe_delta(x, a, pools[0]) if isinstance(a, Delta) else None
    experts = _describe_experts(m, act) if isinstance(m, Experts) else None
    dense = _describe_dense(m) if isinstance(m, Dense) else None
    if not (grouped or latent or delta) or not (experts or dense):
        return None
    kept = [_vector(norm) for norm in (layer.input_norm, layer.post_norm)], grouped, latent, delta, experts, dense
    found = native.Layer(*kept[0], *map(_address, kept[1:]), layer.eps, layer.scale, _DTYPES[x.dtype])
    found.keep = kept
    return found


def _describe_grouped(
    x: Tensor, a: Grouped, keys: Tensor, rotation: tuple[Tensor, Tensor] | None
) -> native.Grouped | None:
    rows, h = a.qkv[0][0].shape[0] // (2 if a.gated else 1), a.heads
    described = _describe_projections([*a.qkv, a.output])
    heads = _describe_heads(x.new_empty(1, rows), keys, rotation, h)
    if described is None or heads is None or not _attends(x.dtype, keys):
        return None
    attended = _describe_attention(rows // keys.shape[3], keys, h.window, h.scale, h.sinks, _DTYPES[x.dtype])
    norms = [_vector(norm) for norm in a.norms]
    found = native.Grouped(
        *described, ctypes.addressof(heads), ctypes.addressof(attended), (native.Vector * 2)(*norms),
        (ctypes.c_int64 * 2)(*(0 if norm is None else len(norm) for norm in a.norms)), a.clip or 0.0, a.gated,
    )  # fmt: skip
    found.keep = heads, attended, described, norms
    return found


def _describe_latent(
    x: Tensor, a: Latent, entries: Tensor, rotation: tuple[Tensor, Tensor],
    index_rotation: tuple[Tensor, Tensor] | None,
) -> native.Latent | None:  # fmt: skip
    (heads, made, rank), (_, block_size, width) = a.up.shape, entries.shape
    shared, described = width - rank, _describe_projections([a.q_down, a.q_up, a.kv_down, a.output])
    fits = a.up.dtype == x.dtype and rank % 16 == 0 and rotation is not None and 2 * rotation[0].shape[1] == shared
    if described is None or not fits or not _attends(x.dtype, entries):
        return None
    index = a.index and _describe_index(x, a.index, block_size, index_rotation)
    if a.index and index is None:
        return None
    nope, up = a.q_up[0].shape[0] // heads - shared, a.up.contiguous()
    norms = [_vector(norm) for norm in (a.q_norm, a.kv_norm)]
    latents = native.Latents(heads, nope, made - nope, rank, shared, block_size, a.scale, _DTYPES[x.dtype])
    found = native.Latent(
        *described, *norms, up.data_ptr(), ctypes.addressof(latents), _address(index), a.eps, a.interleaved, a.reuses
    )
    found.keep = described, norms, up, latents, index
    return found


def _describe_index(x: Tensor, a: Index, block_size: int, rotation: tuple[Tensor, Tensor]) -> native.Index | None:
    s, weights = a.spec, (a.q, a.k, _exact(a.weights))
    places = [_place(w) for w in weights]
    if not all(places) or s.dim % 16 or s.dim > WIDEST or rotation is None or 2 * rotation[0].shape[1] > s.dim:
        return None
    values = [v.contiguous() for v in (a.norm, a.bias)]
    found = native.Index(
        *places, *(v.data_ptr() for v in values), s.heads, s.dim, 2 * rotation[0].shape[1], s.top_k, block_size, a.eps,
        s.rope.interleaved, _DTYPES[x.dtype],
    )  # fmt: skip
    found.keep = values, weights
    return found


def _describe_delta(x: Tensor, a: Delta, tails: Tensor) -> native.Delta | None:
    s, weights = a.spec, (a.qkv, a.z, _exact(a.b), _exact(a.a), a.output)
    places = [None if w is None else _place(w) for w in weights]
    if 0 in places or tails.dtype != x.dtype or x.dtype not in _DTYPES:
        return None
    values = [v.contiguous() for v in (a.filter.T, a.rate, a.bias, a.norm)]
    found = native.Delta(
        *places, *(v.data_ptr() for v in values), s.key_heads, s.value_heads // s.key_heads, s.key_dim, s.value_dim,
        s.kernel, a.eps, _DTYPES[x.dtype],
    )  # fmt: skip
    found.keep = values, weights
    return found
