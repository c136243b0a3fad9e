"""Gated delta net: linear attention that keeps the past in one matrix per head, which every token decays and corrects.

The rule is that of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); its chunked form follows the
WY representation of Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484). All but
the large projections is computed in float32: decays and corrections multiply over thousands of tokens.

Letters in shapes: T tokens of S sequences, C channels of the convolution (queries, keys, values), G key heads of which
each serves R value heads, K and V their dimensions, N tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tutel_pack.kernels.ops import Delta, Layout, Ops
from tutel_pack.runtime.cache import PagedCache, State
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import DeltaNet

CHUNK = 64
"""Tokens of a chunk: within one, time is a triangular solve; from one to the next, a loop."""
_L2_EPS = 1e-6
"""Added to the squared length of queries and keys, as the models' reference code does."""


class GatedDeltaNet:
    """Gated delta net with the options of `spec.DeltaNet`."""

    @staticmethod
    def cached(spec: DeltaNet) -> dict[str, tuple[int, ...]]:
        """What it keeps of every token: nothing."""
        return {}

    @staticmethod
    def states(spec: DeltaNet, dtype: torch.dtype) -> dict[str, State]:
        """What it keeps of a sequence: the convolution's last inputs, in the compute dtype, and the heads' memories."""
        memory = (spec.key_heads, spec.value_heads // spec.key_heads, spec.key_dim, spec.value_dim)
        return {"tail": ((spec.kernel - 1, _channels(spec)), dtype), "memory": (memory, torch.float32)}

    def __init__(self, spec: DeltaNet, layer: int, eps: float, weights: Weights, ops: Ops):
        self._spec, self._layer, self._ops = spec, layer, ops
        prefix = f"model.layers.{layer}.linear_attn."
        inputs = ("qkvz", None, "ba", None) if spec.grouped else ("qkv", "z", "b", "a")
        self.whole = Delta(
            spec, *(name and weights(f"{prefix}in_proj_{name}.weight") for name in inputs),
            weights(prefix + "conv1d.weight").float().squeeze(1), weights(prefix + "A_log").float().exp(),
            weights(prefix + "dt_bias").float(), weights(prefix + "norm.weight").float(),
            weights(prefix + "out_proj.weight"), eps,
        )  # fmt: skip

    def __call__(self, x: Tensor, cache: PagedCache, layout: Layout, rotations: object) -> Tensor:
        """x [T, H], normed -> [T, H]; brings the states of the batch's sequences up to date.

        rotations: not used, positions are in the decay.
        """
        spec, parts, states = self._spec, self.whole, cache.sequences[self._layer]
        done = self._ops.delta_net(x, parts, states["tail"], states["memory"], layout)
        if done is not None:
            return done
        mixed, z, b, a = self._grouped(x) if spec.grouped else self._separate(x)
        mixed = F.silu(convolve(mixed, parts.filter, states["tail"], layout))
        keys, heads = spec.key_heads * spec.key_dim, (spec.key_heads, spec.value_heads // spec.key_heads)
        q, k, v = mixed.split([keys, keys, spec.value_heads * spec.value_dim], dim=1)
        q, k = (_normalised(t.unflatten(1, (spec.key_heads, spec.key_dim))) for t in (q, k))
        decay = -parts.rate * F.softplus(a + parts.bias)
        v, decay, beta = v.unflatten(1, (*heads, -1)), decay.unflatten(1, heads), b.sigmoid().unflatten(1, heads)
        out = delta_rule(q * spec.key_dim**-0.5, k, v, decay, beta, states["memory"], layout)
        return self._ops.linear(self._gated(out, z).to(x.dtype), parts.output)

    def _grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k and v [T, C], z [T, heads · V], b and a float32 [T, heads]) from rows that are grouped by key head."""
        spec, ops, parts = self._spec, self._ops, self.whole
        shared = spec.value_heads // spec.key_heads
        rows = [spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim]
        q, k, v, z = (t.flatten(1) for t in ops.linear(x, parts.qkv).unflatten(1, (spec.key_heads, -1)).split(rows, dim=-1))
        b, a = (t.flatten(1) for t in ops.linear(x.float(), parts.b).unflatten(1, (spec.key_heads, -1)).chunk(2, dim=-1))
        return torch.cat([q, k, v], dim=1), z, b, a

    def _separate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same from a projection each."""
        linear, parts, exact = self._ops.linear, self.whole, x.float()
        return linear(x, parts.qkv), linear(x, parts.z), linear(exact, parts.b), linear(exact, parts.a)

    def _gated(self, heads: Tensor, z: Tensor) -> Tensor:
        """heads float32 [T, G, R, V], normed over V, times silu(z) [T, heads · V] -> float32 [T, heads · V]."""
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.whole.eps) * self.whole.norm
        return normed.flatten(1) * F.silu(z.float())


def _channels(spec: DeltaNet) -> int:
    return 2 * spec.key_heads * spec.key_dim + spec.value_heads * spec.value_dim


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def convolve(x: Tensor, weight: Tensor, tails: Tensor, layout: Layout) -> Tensor:
    """Causal depthwise convolution y[t] = Σ_j weight[:, j] · x[t − (kernel − 1) + j] of each sequence.

    x [T, C] of any float dtype, weight float32 [C, kernel] -> float32 [T, C]. tails [slots, kernel − 1, C]: the inputs
    before the first new one of the sequences in layout.states, brought up to date.
    """
    if _one_each(layout):
        return _convolve_one(x, weight, tails, layout.states)
    before = weight.shape[1] - 1
    counts = torch.tensor(layout.starts).diff()
    order = torch.arange(len(counts))
    # Every sequence's tail stands before its tokens; row r of x is row places[r] of the whole.
    places = (torch.arange(len(x)) + before * (order + 1).repeat_interleave(counts)).to(x.device)
    ends = (torch.tensor(layout.starts[1:]) + before * order)[:, None] + torch.arange(before)
    firsts = (ends - counts[:, None]).to(x.device)
    whole = x.new_empty(len(x) + before * len(counts), x.shape[1])
    whole[firsts.flatten()] = tails[layout.states].flatten(0, 1)
    whole[places] = x
    tails[layout.states] = whole[ends.to(x.device)]
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for j in range(before + 1):
        out += whole[places - before + j] * weight[:, j]
    return out


def _one_each(layout: Layout) -> bool:
    """Whether every sequence has one new token: then nothing below asks the host, and the step can be recorded."""
    return all(stop - start == 1 for start, stop in zip(layout.starts, layout.starts[1:]))


def _convolve_one(x: Tensor, weight: Tensor, tails: Tensor, slots: Tensor) -> Tensor:
    window = torch.cat([tails[slots], x[:, None]], dim=1)
    tails[slots] = window[:, 1:]
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for j in range(window.shape[1]):
        out += window[:, j] * weight[:, j]
    return out


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memories: Tensor, layout: Layout
) -> Tensor:
    """The gated delta rule: for every token of a sequence and every value head, with its memory M [K, V],

        M ← exp(decay) · M;  M ← M + k ⊗ (beta · (v − Mᵀk));  out = Mᵀq

    All float32: q, k [T, G, K], v [T, G, R, V], decay (not above 0) and beta [T, G, R] -> [T, G, R, V].
    memories [slots, G, R, K, V]: of the sequences in layout.states, brought up to date.
    """
    if _one_each(layout):
        out, memories[layout.states] = _step(q, k, v, decay, beta, memories[layout.states])
        return out
    out = torch.empty_like(v)
    counts = [stop - start for start, stop in zip(layout.starts, layout.starts[1:])]
    single = [s for s, count in enumerate(counts) if count == 1]
    several = sorted((s for s, count in enumerate(counts) if count > 1), key=lambda s: -counts[s])
    if single:
        rows = torch.tensor([layout.starts[s] for s in single], device=q.device)
        slots = layout.states[single]
        out[rows], memories[slots] = _step(*(t[rows] for t in (q, k, v, decay, beta)), memories[slots])
    if several:
        slots = layout.states[several]
        chunks, sizes = _chunks([range(layout.starts[s], layout.starts[s + 1]) for s in several])
        rows, used = chunks.to(q.device), (chunks >= 0).to(q.device)
        inputs = (_in_chunks(t, rows, used) for t in (q[:, :, None], k[:, :, None], v, decay, beta))
        pieces, memories[slots] = _scan(*inputs, memories[slots], sizes)
        out[rows[used]] = pieces[used]
    return out


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for one token of each of S sequences; memory [S, G, R, K, V] -> (out [S, G, R, V], memory).

    The memory, which is all that counts here, is read once and written once: Mᵀq is put together from what it was.
    """
    kept = decay.exp()[..., None]
    known, asked = (kept[..., None] * (torch.stack([k, q], dim=2)[:, :, None] @ memory)).unbind(-2)
    change = beta[..., None] * (v - known)
    memory.mul_(kept[..., None]).addcmul_(k[:, :, None, :, None], change[..., None, :])
    return asked + (q * k).sum(-1)[..., None, None] * change, memory


def _chunks(spans: Sequence[range]) -> tuple[Tensor, list[int]]:
    """Token rows [chunks, N], −1 where a chunk is not full, of sequences in the order of their lengths, longest first.

    First the first chunk of every sequence, then the second of those that have one, and so on: (rows, how many each).
    """
    size = min(CHUNK, len(spans[0]))
    steps = range(0, len(spans[0]), size)
    groups = [[span[i : i + size] for span in spans if len(span) > i] for i in steps]
    rows = [[*part, *[-1] * (size - len(part))] for group in groups for part in group]
    return torch.tensor(rows), [len(group) for group in groups]


def _in_chunks(t: Tensor, rows: Tensor, used: Tensor) -> Tensor:
    """t [T, G, R, …] -> [chunks, G, R, N, …], zero where a chunk is not full: such tokens change nothing."""
    return t[rows].masked_fill(~used.view(*used.shape, *[1] * (t.ndim - 1)), 0).movedim(1, 3)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """The rule for chunks as `_chunks` lays them out: q, k [chunks, G, 1, N, K], v [chunks, G, R, N, V], decay and beta
    [chunks, G, R, N], memory [S, G, R, K, V] -> (out [chunks, N, G, R, V], memory after the last chunks).

    With D[t] the decays of a chunk up to token t, and M its memory before the chunk, what token t changes is
    c[t] = beta[t] · (v[t] − exp(D[t]) · Mᵀk[t] − Σ_{j<t} exp(D[t] − D[j]) · (k[t] · k[j]) · c[j]): a triangular system,
    whose solution for all M at once is solved here for every chunk, before M is known.
    """
    # In float64: the difference of two long sums is what a short decay is read off.
    total = decay.double().cumsum(-1)
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).float().masked_fill(future, -torch.inf).exp()
    kept, left = (t.float().exp()[..., None] for t in (total, total[..., -1:] - total))
    system = beta[..., None] * between * (k @ k.transpose(-1, -2))
    known = beta[..., None] * torch.cat([v, kept * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    wanted, recalled = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = between * (q @ k.transpose(-1, -2))
    q, k, decay = kept * q, (left * k).transpose(-1, -2), kept[..., -1:, :]
    out, start = torch.empty_like(v), 0
    for size in sizes:
        part, now = slice(start, start + size), memory[:size]
        change = wanted[part] - recalled[part] @ now
        out[part] = q[part] @ now + seen[part] @ change
        now.mul_(decay[part]).add_(k[part] @ change)
        start += size
    return out.movedim(3, 1), memory
