"""How fast a model can decode at best: what a step must read, multiply and decode, by what a GPU can do in a second.

A step gives one token to each of a batch of sequences. Its parts run one after another, and each lasts as long as the
slowest of three: memory (bytes), matrix units (products), and the issue of instructions (integers that decode weights).
Between kernels there are gaps. All but these is divided evenly among the GPUs, at no cost: no exchange, no waiting.
Tokens choose their experts independently and evenly. What is left out only takes longer, so this bounds the speed from
above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tutel_pack.artifact import Entry
from tutel_pack.formats import FORMATS
from tutel_pack.kernels.triton.gpus import INT_OPS, Gpu
from tutel_pack.kernels.triton.layers import used_experts
from tutel_pack.quant.recipe import Recipe
from tutel_pack.runtime.decoder import ATTENTION
from tutel_pack.runtime.delta_net import GatedDeltaNet
from tutel_pack.spec import Attention, DeltaNet, Layer, Mla, ModelSpec, Moe
from tutel_pack.tensors import EXPERTS, canonical_tensors

GAP = 0.5e-6
"""Seconds from the end of a kernel to the start of the next in a captured graph, at least: assumed, not measured."""

RESERVE = 2e9
"""Bytes of a GPU that are for neither weights nor cache: activations, graphs, the driver. Assumed as well."""

TOKENS = 128
"""The most that a decoded weight is multiplied with before it is decoded anew."""

_KERNELS = {Attention: 8, Mla: 11, DeltaNet: 12, Moe: 8}
"""That the decoder asks for, additions left out: norms, products, one that turns and stores, and two to attend to all
that is stored; a norm, router, choice, sort, two products, sum."""

_MLP_KERNELS = 4
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Part:
    """bytes read and written; flops in matrix units, two to a multiplication; decoded: weights by format."""

    bytes: float = 0.0
    flops: float = 0.0
    decoded: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Part) -> Part:
        decoded = {f: self.decoded.get(f, 0.0) + other.decoded.get(f, 0.0) for f in {*self.decoded, *other.decoded}}
        return Part(self.bytes + other.bytes, self.flops + other.flops, decoded)

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """What each would take alone."""
        instructions = sum(n * INT_OPS[gpu.architecture][fmt] for fmt, n in self.decoded.items())
        matrix, issue = self.flops / gpu.matrix, instructions / gpu.issue
        return {"memory": self.bytes / gpu.bandwidth, "matrix": matrix, "issue": issue}


@dataclass(frozen=True)
class Estimate:
    """Of one step. parts: name -> (what limits it, seconds).  needed: bytes of memory, of all GPUs together."""

    gpu: Gpu
    gpus: int
    batch: int
    parts: dict[str, tuple[str, float]]
    needed: float

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, at most."""
        return self.batch / self.seconds

    @property
    def limit(self) -> str:
        """What most of the time goes to."""
        totals: dict[str, float] = {}
        for term, seconds in self.parts.values():
            totals[term] = totals.get(term, 0.0) + seconds
        return max(totals, key=totals.get)

    @property
    def available(self) -> float:
        return self.gpus * (self.gpu.memory - RESERVE)

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def to_json(self) -> dict:
        parts = {name: {"limit": term, "seconds": seconds} for name, (term, seconds) in self.parts.items()}
        return {
            "chip": self.gpu.name, "gpus": self.gpus, "calibrated": self.gpu.measured is not None,
            "tokens_per_second": self.tokens_per_second, "step_seconds": self.seconds,
            "limit": self.limit, "parts": parts,
            "memory_needed": round(self.needed), "memory_available": round(self.available), "fits": self.fits,
        }  # fmt: skip


def estimate(spec: ModelSpec, entries: Mapping[str, Entry], gpu: Gpu, gpus: int, batch: int, context: int) -> Estimate:
    """entries: the model's tensors by canonical name.  context: positions that each sequence has in the cache."""
    found = {}
    for name, part in step(spec, entries, batch, context).items():
        term, seconds = max(part.seconds(gpu).items(), key=lambda item: item[1])
        found[name] = term, seconds / gpus
    found["gaps"] = "launches", GAP * kernels(spec)
    weights = sum(entry.nbytes for entry in entries.values())
    return Estimate(gpu, gpus, batch, found, weights + cache_bytes(spec, batch, context))


def entries_of(spec: ModelSpec, fmt: str) -> dict[str, Entry]:
    """The tensors that tutel-convert makes of a BF16 checkpoint with --fmt; in no file yet."""
    found = {}
    for name, tensor in canonical_tensors(spec).items():
        packed = Recipe(fmt).format_for(name, tensor.role, FORMATS["bf16"])
        if packed:
            found[name] = Entry("", tensor.shape, packed, tensor.segments or tensor.shape[-2:-1])
        else:
            found[name] = Entry("", tensor.shape, dtype=_DTYPE)
    return found


def step(spec: ModelSpec, entries: Mapping[str, Entry], batch: int, context: int) -> dict[str, Part]:
    """What there is to do, by parts. Layers for multi-token prediction have none."""
    experts, weights = Part(), Part()
    for name, tensor in canonical_tensors(spec).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if layer is not None and layer >= spec.depth:
            continue
        if tensor.role == EXPERTS:
            experts += _expert_weights(entries[name], spec.layers[layer].mlp, batch)
        elif name == "model.embed_tokens.weight" and not spec.tied_head:
            weights += Part(batch * entries[name].nbytes / spec.vocab)
        else:
            weights += _weights(entries[name], batch)
    past = sum((_past(layer, seen, batch, context) for layer, seen in _seen(spec, context)), Part())
    return {"experts": experts, "weights": weights, "cache": past}


def _expert_weights(entry: Entry, moe: Moe, batch: int) -> Part:
    used, pairs, size = used_experts(moe.experts, moe.top_k, batch), batch * moe.top_k, math.prod(entry.shape[1:])
    decoded = math.ceil(pairs / used / TOKENS) * used * size
    return Part(entry.nbytes * used / moe.experts, 2.0 * pairs * size, {_format(entry): decoded})


def _weights(entry: Entry, batch: int) -> Part:
    if len(entry.shape) == 1:
        return Part(entry.nbytes)
    size = math.prod(entry.shape)
    return Part(entry.nbytes, 2.0 * batch * size, {_format(entry): math.ceil(batch / TOKENS) * float(size)})


def _format(entry: Entry) -> str:
    """What is not packed in blocks counts as bfloat16."""
    return entry.format.name if entry.format and entry.format.block else "bf16"


def _seen(spec: ModelSpec, context: int) -> Iterator[tuple[Layer, int]]:
    """Every layer, and how many positions its queries attend to."""
    picked = context
    for layer in spec.layers:
        a, seen = layer.attention, context
        if isinstance(a, Attention) and a.window:
            seen = min(a.window, context)
        if isinstance(a, Mla) and a.indexer:
            picked = min(a.indexer.top_k, context)
        if isinstance(a, Mla) and (a.indexer or a.reuse_index):
            seen = picked
        yield layer, seen


def _past(layer: Layer, seen: int, batch: int, context: int) -> Part:
    """Attention to what a layer keeps, which is read once for all heads."""
    a, kept = layer.attention, cached_bytes(layer)
    if isinstance(a, DeltaNet):
        return Part(2.0 * batch * state_bytes(layer))  # read and written
    if isinstance(a, Attention):
        return Part(batch * seen * sum(kept.values()), 4.0 * batch * seen * a.heads * a.head_dim)
    attend = Part(batch * seen * kept["latents"], 2.0 * batch * seen * a.heads * (2 * a.kv_rank + a.rope.dim))
    if not a.indexer:
        return attend
    return attend + Part(batch * context * kept["index_keys"], 2.0 * batch * context * a.indexer.heads * a.indexer.dim)


def cached_bytes(layer: Layer) -> dict[str, int]:
    """Of a position, by what is kept of it."""
    kind = layer.attention
    return {name: math.prod(shape) * _DTYPE.itemsize for name, shape in ATTENTION[type(kind)].cached(kind).items()}


def state_bytes(layer: Layer) -> int:
    """Of a sequence, whatever its length."""
    if not isinstance(layer.attention, DeltaNet):
        return 0
    states = GatedDeltaNet.states(layer.attention, _DTYPE).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in states)


def cache_bytes(spec: ModelSpec, batch: int, context: int) -> int:
    return batch * sum(context * sum(cached_bytes(layer).values()) + state_bytes(layer) for layer in spec.layers)


def kernels(spec: ModelSpec) -> int:
    """In a step, the embedding, the last norm and the head among them."""
    return 3 + sum(_KERNELS[type(layer.attention)] + _mlp_kernels(layer.mlp) for layer in spec.layers)


def _mlp_kernels(mlp) -> int:
    if not isinstance(mlp, Moe):
        return 1 + _MLP_KERNELS
    return _KERNELS[Moe] + (_MLP_KERNELS if mlp.shared else 0)
