"""The operations a decoder is made of: each contract stated once, checked once, and served by one backend.

A backend is a module with functions of the same names and signatures as the methods of `Ops`. It is chosen by name
when a model is loaded and never changes after that. Backends are given checked arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.spec import ClampedSwiglu, DeltaNet, Indexer, Moe, Rope, Swiglu

BACKENDS = {
    "cpu": "tutel_pack.kernels.cpu.backend",
    "triton": "tutel_pack.kernels.triton.backend",
    "torch": "tutel_pack.kernels.torch_backend",
}
"""Name -> module, imported when chosen."""

FUSED = ("linears", "add_norm", "attend", "attend_latents", "delta_net", "dense", "routed", "layers", "logits")
"""Several operations in one call, which a backend need not have."""

ACTS = {"fp8": "fp8", "mxfp8": "mxfp4", "nvfp4": "nvfp4"}
"""Formats that activations can be quantized to on a GPU, and the format of the experts that take them so."""

CPU_ACTS = {"int8": native.FOUR_BITS}
"""The same on a CPU, where experts may be in several formats."""

_log = logging.getLogger(__name__)

Weight = Tensor | PackedTensor
"""A matrix or a stack of matrices: packed, or plain in any float dtype."""

Projection = tuple[Weight, Tensor | None]
"""A weight and its bias, see Ops.linear."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where S sequences of a ragged batch stand in a paged cache.

    starts: S + 1 numbers; sequence s owns the batch's tokens starts[s] … starts[s + 1] − 1, the last of its positions.
    lengths: S numbers; how many positions a sequence has in the cache, its new tokens included.
    tables: S int64 tensors of block ids; entry j holds the positions j·B … j·B + B − 1 (B positions to a block).
    slots: int64 [T]; where each new token is stored, block id · B + place in the block.
    states: int64 [S]; the state slot of each sequence, one that there is; None for a model that keeps no states.
    unused: bool [T]; True for tokens that fill up a batch, which pass no expert; None if there are none.
    flat: the same for kernels, made when first asked for.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    tables: Sequence[Tensor]
    slots: Tensor
    states: Tensor | None = None
    unused: Tensor | None = None

    @cached_property
    def flat(self) -> FlatLayout:
        sizes = [len(table) for table in self.tables]
        first = [0, *accumulate(sizes)][:-1]
        numbers = torch.tensor([*self.starts, *self.lengths, *first]).to(self.tables[0].device, non_blocking=True)
        starts, lengths, first = numbers.split([len(self.starts), len(self.lengths), len(first)])
        return FlatLayout(starts, lengths, torch.cat(list(self.tables)), first, max(sizes))


@dataclass(frozen=True)
class FlatLayout:
    """int64 starts [S + 1] and lengths [S], as of Layout; blocks: all tables, one after another, that of a sequence from
    first_block [S] on.  most: entries of the longest table."""

    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    first_block: Tensor
    most: int


@dataclass(frozen=True, eq=False)
class Heads:
    """What the heads of a layer's attention do, beside the softmax.

    q_norm, k_norm: [D], RMSNorm of every query and key with `eps`; both or neither.
    interleaved: see Ops.rope.  window, scale, sinks: see Ops.attention.
    """

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    interleaved: bool = False
    window: int | None = None
    scale: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Dense:
    """A gated MLP that every token passes: weights and biases, see Ops.linear."""

    gate: Projection
    up: Projection
    down: Projection
    activation: Swiglu | ClampedSwiglu = Swiglu()


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of a layer and their router: see Ops.linear, route and moe.

    router: [E, H], of plain floats.  shared: the experts that every token passes; shared_gate: [1, H], of plain floats.
    """

    spec: Moe
    router: Weight
    gate_up: Weight
    down: Weight
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared: Dense | None = None
    shared_gate: Weight | None = None


@dataclass(frozen=True, eq=False)
class Grouped:
    """Grouped-query attention: what `heads` do (see Ops.attend) with the projections of x.

    gated: every query comes with a gate behind it, and what its head gives is times sigmoid(gate).
    norms: [heads · D] or [D] of queries and of keys, RMSNorm of all values of a token or of each head's, before
    everything else; both or neither.  clip: queries, keys and values are kept within ±clip after that.
    """

    qkv: Sequence[Projection]
    output: Projection
    heads: Heads
    gated: bool = False
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    clip: float | None = None

    def fits(self, *pools: Tensor) -> bool:
        """Whether it can keep keys and values there, and its parts fit together."""
        keys, values = pools if len(pools) == 2 else (pools[0], None)
        if values is None or keys.shape != values.shape or keys.dtype != values.dtype:
            return False
        rows, width = [w.shape[0] for w, _ in self.qkv], keys.shape[-1]
        q, kv = rows[0] // 2 if self.gated else rows[0], keys.shape[-2] * width
        normed = all(n is None or len(n) in (width, all_of) for n, all_of in zip(self.norms, (q, kv)))
        normed = normed and (self.norms[0] is None) == (self.norms[1] is None)
        return rows[1:] == [kv, kv] and q % kv == 0 and self.output[0].shape[1] == q and normed and self.clip != 0


@dataclass(frozen=True, eq=False)
class Index:
    """What picks positions for latent attention: Ops.top_positions of what the projections make.

    q [heads · D, rank]: of compressed queries.  k [D, H], normed by a LayerNorm of norm and bias, float32 [D], with `eps`:
    the key of a token.  Both are turned, see Ops.rope.  weights [heads, H]: of x in float32, times (heads · D)^−½.
    """

    spec: Indexer
    q: Weight
    k: Weight
    weights: Weight
    norm: Tensor
    bias: Tensor
    eps: float

    def __post_init__(self):
        s, hidden, small = self.spec, self.k.shape[1], (self.norm, self.bias)
        shapes = [tuple(w.shape) for w in (self.k, self.weights)]
        fits = shapes == [(s.dim, hidden), (s.heads, hidden)] and self.q.shape[0] == s.heads * s.dim and s.top_k > 0
        fits = fits and all(v.shape == (s.dim,) and v.dtype == torch.float32 for v in small) and s.rope.dim <= s.dim
        _check(fits, "an index", self.q, self.k, self.weights, *small)


@dataclass(frozen=True, eq=False)
class Latent:
    """Latent attention: Ops.latent_attention of what the projections of x make.

    q_down: and an RMSNorm by q_norm behind it come before q_up, if there is one.  kv_down: gives a latent, normed by
    kv_norm, and the key that heads share.  That key and as many values at the end of every query are turned, see
    Ops.rope.  eps: of both norms.  index: picks the positions that are seen.  reuses: those are seen that were picked
    last; otherwise all are.
    """

    q_down: Projection | None
    q_norm: Tensor | None
    q_up: Projection
    kv_down: Projection
    kv_norm: Tensor
    up: Tensor
    output: Projection
    scale: float
    eps: float
    interleaved: bool
    index: Index | None = None
    reuses: bool = False

    def fits(self, *pools: Tensor) -> bool:
        """Whether it can keep entries, and the keys of its index, there, and its parts fit together."""
        if self.index is None or len(pools) != 2:
            return self.index is None and len(pools) == 1
        (entries, keys), hidden = pools, self.kv_down[0].shape[1]
        if self.index.k.shape[1] != hidden or self.index.q.shape[1] != (self.q_down[0].shape[0] if self.q_down else hidden):
            return False
        return keys.shape == (*entries.shape[:2], self.index.spec.dim) and keys.dtype == entries.dtype


@dataclass(frozen=True, eq=False)
class Delta:
    """A gated delta net, see runtime.delta_net, of C channels.

    qkv [C, H], z [heads · V, H]: of x.  b, a [heads, H]: of x in float32. If spec.grouped, qkv and b have the rows of z
    and a, too, by key heads, and these are None.  filter: float32 [C, kernel].  rate, bias: float32 [heads].
    norm: float32 [V], with `eps`.  output: [H, heads · V].
    """

    spec: DeltaNet
    qkv: Weight
    z: Weight | None
    b: Weight
    a: Weight | None
    filter: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    output: Weight
    eps: float

    def __post_init__(self):
        s, hidden, values = self.spec, self.qkv.shape[1], self.spec.value_heads * self.spec.value_dim
        channels, heads = 2 * s.key_heads * s.key_dim + values, s.value_heads
        rows = (channels + values, None, 2 * heads, None) if s.grouped else (channels, values, heads, heads)
        shapes = [None if w is None else tuple(w.shape) for w in (self.qkv, self.z, self.b, self.a)]
        fits = shapes == [n and (n, hidden) for n in rows] and self.output.shape[1] == values
        small = self.filter, self.rate, self.bias, self.norm
        fits = fits and [tuple(v.shape) for v in small] == [(channels, s.kernel), (heads,), (heads,), (s.value_dim,)]
        _check(fits and all(v.dtype == torch.float32 for v in small), "a delta net", self.qkv, self.output, *small)

    def fits(self, *pools: Tensor) -> bool:
        """Whether tails and memories are for it."""
        if len(pools) != 2:
            return False
        s, (tails, memories) = self.spec, pools
        memory = len(tails), s.key_heads, s.value_heads // s.key_heads, s.key_dim, s.value_dim
        tail = s.kernel - 1, self.filter.shape[0]
        return tails.shape[1:] == tail and memories.shape == memory and memories.dtype == torch.float32


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of attention and a feed-forward block: x + scale · attention(norm(x)), then x + scale · mlp(norm(x)).

    input_norm, post_norm: [H] of RMSNorm with `eps`.
    """

    input_norm: Tensor
    post_norm: Tensor
    eps: float
    attention: Grouped | Latent | Delta
    mlp: Experts | Dense
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class PlacedLayers:
    """Layers of the same H that follow each other, and where they keep what they have of tokens and sequences.

    pools: of each layer, keys and values as for `Ops.attend`, or entries as for `Ops.latent_attention` and behind them
    the keys of an index, or the states of a delta net: tails [slots, kernel − 1, C] and float32 memories
    [slots, G, R, K, V]. What is new is stored in them.
    rotations: of each layer, which one of a step's rotations turns it; None turns nothing.  index_rotations: the same of
    their indices; may be left out where there are none.
    """

    layers: Sequence[Layer]
    pools: Sequence[Sequence[Tensor]]
    rotations: Sequence[int | None]
    index_rotations: Sequence[int | None] = ()

    def __post_init__(self):
        norms = [norm for layer in self.layers for norm in (layer.input_norm, layer.post_norm)]
        fits = 0 < len(self.layers) == len(self.pools) == len(self.rotations)
        fits = fits and len(self.index_rotations) in (0, len(self.layers))
        fits = fits and all(layer.attention.fits(*pools) for layer, pools in zip(self.layers, self.pools))
        _check(fits and all(norm.shape == norms[0].shape for norm in norms), "layers", *norms)

    @cached_property
    def stateful(self) -> bool:
        """Whether any of them keeps states of sequences."""
        return any(isinstance(layer.attention, Delta) for layer in self.layers)


def _has_states(layout: Layout) -> bool:
    """Whether every sequence has a slot."""
    states = layout.states
    return states is not None and states.dtype == torch.int64 and states.shape == (len(layout.starts) - 1,)


def get_ops(backend: str = "auto", device: torch.device | str = "cpu", act: str | None = None) -> Ops:
    """The operations by the backend of that name, for tensors on `device`.

    act: quantize what enters the experts (Ops.moe) to this format of ACTS or CPU_ACTS, where theirs is one for it.
    "auto" takes the best one there: the native kernels on a CPU, those of Triton on a GPU, torch where these cannot be
    had. InputError lists the known names, and says why a backend cannot be had.
    """
    device = torch.device(device)
    name, why = _best(device) if backend == "auto" else (backend, "as asked for")
    if name not in BACKENDS:
        raise InputError(f"Unknown backend {backend!r}: choose one of auto, {', '.join(BACKENDS)}.")
    if reason := missing(name, device):
        raise InputError(f"The backend {name!r} cannot be had: {reason}.")
    if act and (reason := _refused_act(act, name, device)):
        raise InputError(f"Activations cannot be quantized to {act!r}: {reason}.")
    _log.info("kernels: backend %s, %s%s", name, why, f"; activations of experts in {act}" if act else "")
    return Ops(name, act)


def _refused_act(act: str, backend: str, device: torch.device) -> str:
    """Why it cannot be, empty if it can."""
    if act not in (*ACTS, *CPU_ACTS):
        return f"choose one of {', '.join((*ACTS, *CPU_ACTS))}, or leave act out"
    if act in CPU_ACTS:
        why = f"the backend {backend!r} has no kernels for it; leave act out, or run on a CPU by its native kernels"
        return "" if backend == "cpu" else why
    if backend != "triton":
        return f"the backend {backend!r} has no kernels for it; leave act out, or run on a GPU by triton"
    from tutel_pack.kernels.triton.chips import chip_of

    chip = chip_of(device)
    if act in chip.acts:
        return ""
    others = f"has them for {', '.join(chip.acts)}" if chip.acts else "has none for other formats either; leave act out"
    return f"{chip.name} has no instructions for it; it {others}"


def _best(device: torch.device) -> tuple[str, str]:
    """(name, why) of the backend to take unless asked for another."""
    own = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch")
    if reason := missing(own, device):
        return "torch", f"because {own} cannot be had: {reason}"
    return own, f"by {native.selected()} on {native.threads()} threads" if own == "cpu" else f"the one for {device.type}"


def missing(name: str, device: torch.device) -> str:
    """What a backend lacks to work on a device, empty if nothing."""
    if name == "cpu" and device.type != "cpu":
        return f"it cannot work on {device}; choose another, or the device 'cpu'"
    if name == "cpu":
        return native.missing()
    if name == "triton" and find_spec("triton") is None:
        return "it needs the package triton: pip install 'tutel-pack[triton]'"
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it runs on GPUs; on a CPU choose another, or test it by TRITON_INTERPRET=1"
    return ""


class Ops:
    """The operations by one backend.

    T tokens, H hidden size, N rows and K columns of a weight, E experts, k experts a token, D dimensions of a head.
    x has the compute dtype C (float32, bfloat16 or float16); so has what is returned, unless stated. Weights are
    rounded to C once at most, sums are float32 and rounded once to C. T may be 0. A shape that does not fit is a ValueError.

    Those of FUSED are several operations in one call, for decoding, where calls cost more than some of their work. A
    backend need not have them, and may return None for what it leaves to the single operations.

    whole_layers: whether it has `layers`.
    """

    def __init__(self, name: str, act: str | None = None):
        self.name, self.act = name, act
        self._backend = import_module(BACKENDS[name])
        if act:
            self._backend = self._backend.with_act(act)
        self._fused = {op: getattr(self._backend, op, None) for op in FUSED}
        self.whole_layers = self._fused["layers"] is not None

    def linear(self, x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · w [N, K]ᵀ + bias [N] -> [T, N]."""
        n, k = w.shape
        _check(x.ndim == 2 and x.shape[1] == k and (bias is None or bias.shape == (n,)), "linear", x, w, bias)
        return self._backend.linear(x, w, bias) if x.numel() else x.new_empty(0, n)

    def linears(self, x: Tensor, parts: Sequence[tuple[Weight, Tensor | None]]) -> list[Tensor]:
        """`linear` of x with each pair of a weight and a bias."""
        if not self._fused["linears"] or not x.numel():
            return [self.linear(x, w, bias) for w, bias in parts]
        for w, bias in parts:
            n, k = w.shape
            _check(x.ndim == 2 and x.shape[1] == k and (bias is None or bias.shape == (n,)), "linears", x, w, bias)
        return self._fused["linears"](x, parts)

    def embedding(self, ids: Tensor, w: Weight, dtype: torch.dtype) -> Tensor:
        """Rows of w [N, K], of one segment if packed, by ids int64 [T] in 0 … N − 1 -> [T, K] in `dtype`."""
        _check(ids.ndim == 1 and len(w.shape) == 2, "embedding", ids, w)
        if not len(ids):
            return torch.empty(0, w.shape[1], dtype=dtype, device=ids.device)
        return self._backend.embedding(ids, w, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] / sqrt(mean(x²) + eps) · weight [D], in float32 and rounded once -> [..., D]."""
        _check(x.shape[-1:] == weight.shape, "rms_norm", x, weight)
        return self._backend.rms_norm(x, weight, eps) if x.numel() else x

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + added, or x itself if that is None, `rms_norm` of that), all [T, H]."""
        if added is None:
            return x, self.rms_norm(x, weight, eps)
        _check(x.shape == added.shape and x.shape[-1:] == weight.shape, "add_norm", x, added, weight)
        fused = self._fused["add_norm"]
        done = fused(x, added, weight, eps) if fused and x.numel() else None
        if done is not None:
            return done
        x = x + added
        return x, self.rms_norm(x, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor, activation: Swiglu | ClampedSwiglu = Swiglu()) -> Tensor:
        """The activation's formula (see spec) of gate and up, both [T, N], in float32 and rounded once -> [T, N]."""
        _check(gate.shape == up.shape, "swiglu", gate, up)
        return self._backend.swiglu(gate, up, activation) if gate.numel() else gate

    def rotation(self, positions: Tensor, rope: Rope, layout: Layout | None = None) -> tuple[Tensor, Tensor]:
        """cosines and sines times the scaling's magnitude, float32 [T, rope.dim / 2] each, of the angles of positions
        int64 [T].

        layout: of the batch, for `spec.Dynamic`, whose frequencies depend on how many positions a token's sequence has
        so far (keys in the cache keep the rotation they were stored with, so prefilling such a sequence beyond
        `original` positions in chunks is not quite prefilling it at once); None takes the positions for one sequence.
        """
        _check(positions.ndim == 1, "rotation", positions)
        return self._backend.rotation(positions, rope, layout)

    def rope(self, x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
        """The pairs (i, i + dim/2) of x [T, heads, D], or if interleaved (2i, 2i + 1), turned by `rotation`, in float32
        and rounded once; the dimensions from `dim` on stay."""
        cos, sin = rotation
        fits = x.ndim == 3 and cos.shape == sin.shape == (len(x), cos.shape[1]) and 2 * cos.shape[1] <= x.shape[2]
        _check(fits, "rope", x, cos, sin)
        return self._backend.rope(x, rotation, interleaved) if len(x) else x

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, layout: Layout, window: int | None = None,
        scale: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q [T, heads, D] over a paged cache -> [T, heads, D].

        keys, values: [blocks, B, kv_heads, D], the new tokens' among them; query head h reads head h · kv_heads/heads.
        window: a query sees itself and the window − 1 positions before it; None sees all.
        scale: of the logits; None is D^−½.
        sinks: [heads], one more logit of every softmax of that head, whose share is dropped.
        """
        *_, kv_heads, head_dim = keys.shape
        fits = q.ndim == 3 and q.shape[2] == head_dim and q.shape[1] % kv_heads == 0 and layout.starts[-1] == len(q)
        fits = fits and keys.shape == values.shape and (sinks is None or sinks.shape == q.shape[1:2])
        _check(fits, "attention", q, keys, values, sinks)
        return self._backend.attention(q, keys, values, layout, window, scale, sinks) if len(q) else q

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: Layout,
        rotation: tuple[Tensor, Tensor] | None, heads: Heads,
    ) -> Tensor:  # fmt: skip
        """All that lies between the projections of grouped-query attention: q [T, heads · D], k and v [T, kv_heads · D]
        -> [T, heads · D].

        Queries and keys are normed and turned by `rotation` (None: they are not), as rms_norm and rope do it, the new
        keys and values are stored in keys and values [blocks, B, kv_heads, D] at layout.slots, and the queries attend
        to all that is stored, as in `attention`.
        """
        width = keys.shape[2] * keys.shape[3]
        fits = k.shape == v.shape == (q.shape[0], width) and keys.shape == values.shape and q.shape[1] % width == 0
        _check(fits and layout.slots.shape == q.shape[:1], "attend", q, k, v, keys, values)
        if self._fused["attend"] and q.numel():
            done = self._fused["attend"](q, k, v, keys, values, layout, rotation, heads)
            if done is not None:
                return done
        q, k, v = (x.view(len(x), -1, keys.shape[3]) for x in (q, k, v))
        if heads.q_norm is not None:
            q, k = self.rms_norm(q, heads.q_norm, heads.eps), self.rms_norm(k, heads.k_norm, heads.eps)
        if rotation:
            q, k = (self.rope(x, rotation, heads.interleaved) for x in (q, k))
        for pool, new in ((keys, k), (values, v)):
            pool.flatten(0, 1).index_copy_(0, layout.slots, new)
        return self.attention(q, keys, values, layout, heads.window, heads.scale, heads.sinks).flatten(1)

    def latent_attention(
        self, q: Tensor, entries: Tensor, up: Tensor, layout: Layout, scale: float,
        picks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q [T, heads, nope + D] over a paged cache of latents -> [T, heads, v].

        entries: [blocks, B, R + D], the new tokens' among them: a latent of rank R, then D dimensions of a key that all
        heads share. up: [heads, nope + v, R] of C makes the first nope dimensions of a head's keys and its values of
        latents. scale: of the logits.
        picks: as of top_positions; a query sees only those of its picks that are not behind it.
        """
        heads, made, rank = up.shape
        shared = entries.shape[-1] - rank
        fits = q.ndim == 3 and entries.ndim == 3 and q.shape[1] == heads and 0 < q.shape[2] - shared < made
        _check(fits and shared >= 0 and layout.starts[-1] == len(q), "latent_attention", q, entries, up)
        _check(not picks or len(picks) == len(layout.tables), "latent_attention", q, entries, up)
        if not len(q):
            return q.new_empty(0, heads, made - (q.shape[2] - shared))
        return self._backend.latent_attention(q, entries, up, layout, scale, picks)

    def attend_latents(
        self, q: Tensor, kv: Tensor, entries: Tensor, layout: Layout, rotation: tuple[Tensor, Tensor], latent: Latent,
        picks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """All that lies between the projections of latent attention: q [T, heads · (nope + D)] and kv [T, R + D]
        -> [T, heads · v].

        The latents are normed, the keys behind them and the last D dimensions of every query are turned by `rotation`,
        as rms_norm and rope do it, the new latents and keys are stored in entries [blocks, B, R + D] at layout.slots,
        and the queries attend to all that is stored, or to `picks`, as in `latent_attention`.
        """
        (heads, made, rank), shared = latent.up.shape, 2 * rotation[0].shape[1]
        fits = q.ndim == 2 and q.shape[1] % heads == 0 and 0 < q.shape[1] // heads - shared < made
        fits = fits and kv.shape == (len(q), rank + shared) and entries.shape[2:] == kv.shape[1:]
        _check(fits and layout.slots.shape == q.shape[:1], "attend_latents", q, kv, entries, latent.up, *rotation)
        if self._fused["attend_latents"] and q.numel():
            done = self._fused["attend_latents"](q, kv, entries, layout, rotation, latent, picks)
            if done is not None:
                return done
        new, key = kv.split([rank, shared], dim=-1)
        key = self.rope(key[:, None], rotation, latent.interleaved)[:, 0]
        entry = torch.cat([self.rms_norm(new, latent.kv_norm, latent.eps), key], dim=-1)
        entries.flatten(0, 1).index_copy_(0, layout.slots, entry)
        q = q.unflatten(1, (heads, -1))
        nope, turned = q.split([q.shape[2] - shared, shared], dim=-1)
        q = torch.cat([nope, self.rope(turned, rotation, latent.interleaved)], dim=-1)
        return self.latent_attention(q, entries, latent.up, layout, latent.scale, picks).flatten(1)

    def top_positions(
        self, q: Tensor, weights: Tensor, keys: Tensor, layout: Layout, top_k: int
    ) -> Sequence[Tensor | None]:
        """For every sequence int64 [its new tokens, top_k]: the positions of the largest Σ_h weights_h · relu(q_h · key)
        in float32, any of equal ones, those behind the query last; None where it has no more than top_k positions, or no
        new tokens.

        q [T, heads, D], weights float32 [T, heads], keys [blocks, B, D], the new tokens' among them.
        """
        fits = q.ndim == keys.ndim == 3 and weights.shape == q.shape[:2] and q.shape[2] == keys.shape[2]
        _check(fits and layout.starts[-1] == len(q), "top_positions", q, weights, keys)
        return self._backend.top_positions(q, weights, keys, layout, top_k)

    def route(self, logits: Tensor, spec: Moe, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, E], their bias included -> ids int64 [T, k], weights float32 [T, k]; see `spec.Router`.

        correction: [E], added to the scores for the choice. The largest sum comes first.
        """
        fits = logits.shape[1:] == (spec.experts,) and (correction is None or correction.shape == (spec.experts,))
        _check(fits and (correction is not None) == spec.router.correction, "route", logits, correction)
        return self._backend.route(logits, spec, correction)

    def moe(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight,
        activation: Swiglu | ClampedSwiglu = Swiglu(),
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Σ over k of weights · (down[id] · activation(gate_up[id] · x + gate_up_bias[id]) + down_bias[id]), summed in
        float32 in the order of k -> [T, H].

        x [T, H], ids int64 [T, k] in −1 … E − 1, weights float32 [T, k], gate_up [E, 2I, H] (gate rows first), down
        [E, H, I], gate_up_bias [E, 2I], down_bias [E, H]. An id of −1 contributes nothing, whatever its weight.
        """
        experts, h, i = down.shape
        _check(x.ndim == 2 and x.shape[1] == h and gate_up.shape == (experts, 2 * i, h), "moe", x, gate_up, down)
        _check(ids.shape == weights.shape and ids.ndim == 2 and ids.shape[0] == x.shape[0], "moe", x, ids, weights)
        _check(gate_up_bias is None or gate_up_bias.shape == (experts, 2 * i), "moe", gate_up, gate_up_bias)
        _check(down_bias is None or down_bias.shape == (experts, h), "moe", down, down_bias)
        return self._backend.moe(x, ids, weights, gate_up, down, activation, gate_up_bias, down_bias) if x.numel() else x

    def delta_net(self, x: Tensor, delta: Delta, tails: Tensor, memories: Tensor, layout: Layout) -> Tensor | None:
        """x [T, H], normed, through a gated delta net -> [T, H]; None, and nothing is done, where the backend leaves it to
        runtime.delta_net.

        tails [slots, kernel − 1, C] and memories float32 [slots, G, R, K, V]: of the sequences in layout.states, brought
        up to date.
        """
        fits = x.shape[1:] == delta.qkv.shape[1:] and layout.starts[-1] == len(x)
        _check(fits and delta.fits(tails, memories) and _has_states(layout), "delta_net", x, tails, memories)
        fused = self._fused["delta_net"]
        return fused(x, delta, tails, memories, layout) if fused and x.numel() else None

    def dense(self, x: Tensor, dense: Dense) -> Tensor:
        """down · activation(gate · x, up · x), each with its bias, of x [T, H] -> [T, H]."""
        if self._fused["dense"] and x.numel():
            done = self._fused["dense"](x, dense)
            if done is not None:
                return done
        gate, up = self.linears(x, (dense.gate, dense.up))
        return self.linear(self.swiglu(gate, up, dense.activation), *dense.down)

    def routed(self, x: Tensor, experts: Experts, unused: Tensor | None = None) -> Tensor:
        """x [T, H], each token through the experts that the router picks for it -> [T, H]; added to that is what the
        shared ones make of it, times sigmoid(shared_gate · x) if there is one.

        unused: bool [T]; the router picks nothing for tokens that are.

        Logits are of x in float32: a rounded one picks another expert, and that is no small error.
        """
        if self._fused["routed"] and x.numel() and unused is None:
            done = self._fused["routed"](x, experts)
            if done is not None:
                return done
        e = experts
        ids, weights = self.route(self.linear(x.float(), e.router, e.router_bias), e.spec, e.correction)
        if unused is not None:
            ids = ids.masked_fill(unused[:, None], -1)
        routed = self.moe(x, ids, weights, e.gate_up, e.down, e.spec.activation, e.gate_up_bias, e.down_bias)
        return routed if e.shared is None else routed + self._shared(x, e)

    def _shared(self, x: Tensor, experts: Experts) -> Tensor:
        shared, gate = self.dense(x, experts.shared), experts.shared_gate
        return shared if gate is None else shared * torch.sigmoid(self.linear(x, gate))

    def layers(
        self, x: Tensor, placed: PlacedLayers, rotations: Sequence[tuple[Tensor, Tensor]], layout: Layout
    ) -> Tensor | None:
        """x [T, H] -> [T, H] by all operations of layers that follow each other at once; None, and nothing is done, where
        the backend leaves those of any of them to be done one by one. After a ResourceError states of sequences are of no
        use: they may have moved on."""
        fits = x.ndim == 2 and layout.slots.shape == x.shape[:1] and placed.layers[0].input_norm.shape == x.shape[1:]
        angles = [part for rotation in rotations for part in rotation]
        fits = fits and layout.slots.dtype == torch.int64 and all(len(part) == len(x) for part in angles)
        fits = fits and (not placed.stateful or _has_states(layout))
        _check(fits, "layers", x, layout.slots, *angles)
        fused = self._fused["layers"]
        return fused(x, placed, rotations, layout) if fused and x.numel() else None

    def logits(self, x: Tensor, added: Tensor | None, norm: Tensor, eps: float, head: Weight) -> Tensor:
        """head [V, H] · rms_norm(x [R, H] + added, which may be None) -> float32 [R, V].

        In float32: among logits rounded to bfloat16 the largest is often shared, and the choice then arbitrary.
        """
        fits = head.shape[1:] == norm.shape == x.shape[1:] and (added is None or added.shape == x.shape)
        _check(fits, "logits", x, added, norm, head)
        fused = self._fused["logits"]
        done = fused(x, added, norm, eps, head) if fused and x.numel() else None
        return self.linear(self.add_norm(x, added, norm, eps)[1].float(), head) if done is None else done


def _check(fits: bool, op: str, *arguments: Weight | None) -> None:
    if not fits:
        shapes = ", ".join(str(tuple(a.shape)) for a in arguments if a is not None)
        raise ValueError(f"{op} cannot take arguments of shapes {shapes}")
