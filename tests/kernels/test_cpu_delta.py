"""Layers of gated delta nets by the native kernels: every instruction set, against a float64 loop over tokens and heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.reference import UNIT, decode64, random_packed, worst_tile
from tests.kernels.test_cpu_attention import threads  # noqa: F401

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Delta, Dense, Layer, Layout, Ops, PlacedLayers
from tutel_pack.spec import DeltaNet

if not native.LIBRARY.exists():
    pytest.skip("the native kernels were not built: there was no compiler", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 4e-6, torch.bfloat16: 6 * UNIT[torch.bfloat16]}
"""Of worst_tile: what goes in is rounded by the norm before it and as a projection, what comes out as heads and a sum, and
a correction is a difference."""
HIDDEN, EPS = 96, 1e-5
SPECS = {
    "grouped": DeltaNet(key_heads=3, value_heads=6, key_dim=24, value_dim=20, kernel=4, grouped=True),
    "separate": DeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=144, kernel=2, grouped=False),
    "wide": DeltaNet(key_heads=1, value_heads=1, key_dim=128, value_dim=128, kernel=1, grouped=True),
    "many channels": DeltaNet(key_heads=2, value_heads=2, key_dim=300, value_dim=8, kernel=4, grouped=False),
}


@pytest.fixture(params=native.available())
def ops(request):
    native.select(request.param)
    yield Ops("cpu")
    native.select(None)


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def delta_of(spec: DeltaNet) -> Delta:
    heads, values = spec.value_heads, spec.value_heads * spec.value_dim
    channels = 2 * spec.key_heads * spec.key_dim + values
    rows = (channels + values, None, 2 * heads, None) if spec.grouped else (channels, values, heads, heads)
    qkv, z = (n and random_packed("fp8", (n, HIDDEN), seed=n) for n in rows[:2])
    b, a = (n and 0.2 * normal(n, HIDDEN, seed=n + i) for i, n in enumerate(rows[2:]))
    b, a = (w if w is None else w.bfloat16() for w in (b, a))
    rate, bias = 0.05 + torch.rand(heads, generator=torch.Generator().manual_seed(4)), normal(heads, seed=5)
    return Delta(
        spec, qkv, z, b, a, 0.5 * normal(channels, spec.kernel, seed=6), rate, bias, 1 + 0.3 * normal(spec.value_dim, seed=7),
        random_packed("fp8", (HIDDEN, values), seed=8), EPS,
    )  # fmt: skip


FEW, MANY = (1, 0, 4), (33, 0, 70)
"""New tokens of sequences; of MANY, more than are worked on together."""


class Case:
    """Sequences with states from before, in slots out of order and between those of others."""

    SLOTS = (5, 2, 1)

    def __init__(self, name: str, dtype: torch.dtype, counts: tuple[int, ...] = FEW):
        self.delta, self.dtype, self.counts = delta_of(SPECS[name]), dtype, counts
        spec, tokens = self.delta.spec, sum(counts)
        # So small that a residual connection rounds nothing of what is added to it.
        self.x = 1e-4 * normal(tokens, HIDDEN, dtype=dtype, seed=1)
        self.norm = 1 + 0.3 * normal(HIDDEN, dtype=torch.bfloat16, seed=2)
        shape = (6, spec.key_heads, spec.value_heads // spec.key_heads, spec.key_dim, spec.value_dim)
        tails = normal(6, spec.kernel - 1, len(self.delta.filter), dtype=dtype, seed=3)
        self.states = [tails, 0.3 * normal(*shape, seed=9)]
        starts = [0, *np.cumsum(counts).tolist()]
        tables = [torch.empty(0, dtype=torch.int64)] * 3
        self.layout = Layout(starts, counts, tables, torch.arange(tokens), torch.tensor(self.SLOTS))

    def run(self, ops: Ops, **changed) -> list[torch.Tensor]:
        """What the delta net gives, and its states after it. The layer's experts are of no effect: they get zeros."""
        nothing = Dense(*((torch.zeros(*shape, dtype=torch.bfloat16), None) for shape in ((32, HIDDEN), (32, HIDDEN), (HIDDEN, 32))))
        delta = replace(self.delta, **changed)
        layer = Layer(self.norm, torch.zeros(HIDDEN), 1e-12, delta, nothing)
        states = [state.clone() for state in self.states]
        out = ops.layers(self.x, PlacedLayers([layer], [states], [None]), [], self.layout)
        assert out is not None and out.dtype == self.dtype
        return [out, *states]

    def expected(self) -> list[np.ndarray]:
        x = self.x.double().numpy()
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * self.norm.double().numpy()
        out, (tails, memories) = np.zeros_like(x), (state.double().numpy() for state in self.states)
        for slot, start, count in zip(self.SLOTS, self.layout.starts, self.counts):
            for t in range(start, start + count):
                out[t] = self.x[t].double().numpy() + token64(self.delta, x[t], tails[slot], memories[slot])
        return [out, tails, memories]


def token64(d: Delta, x: np.ndarray, tail: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """One token in float64; brings its states up to date."""
    s = d.spec
    shared, keys = s.value_heads // s.key_heads, s.key_heads * s.key_dim
    made = {name: matrix(w) @ x for name in ("qkv", "z", "b", "a") if (w := getattr(d, name)) is not None}
    if s.grouped:
        rows = made["qkv"].reshape(s.key_heads, -1)
        q, k, v, z = np.split(rows, np.cumsum([s.key_dim, s.key_dim, shared * s.value_dim]), axis=1)
        b, a = np.split(made["b"].reshape(s.key_heads, -1), 2, axis=1)
        qkv, z, b, a = np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel(), b.ravel(), a.ravel()
    else:
        qkv, z, b, a = made["qkv"], made["z"], made["b"], made["a"]
    window = np.concatenate([tail, qkv[None]])
    tail[:] = window[1:]
    y = (window * d.filter.double().numpy().T).sum(0)
    y = y / (1 + np.exp(-y))
    q, k, v = (part.reshape(s.key_heads, -1) for part in np.split(y, [keys, 2 * keys]))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    heads = []
    for h in range(s.value_heads):
        g, r = divmod(h, shared)
        m, value = memory[g, r], v.reshape(s.value_heads, -1)[h]
        m *= np.exp(-d.rate[h].item() * np.log1p(np.exp(a[h] + d.bias[h].item())))
        m += np.outer(k[g], (value - m.T @ k[g]) / (1 + np.exp(-b[h])))
        o = m.T @ q[g] * s.key_dim**-0.5
        o = o / np.sqrt((o**2).mean() + d.eps) * d.norm.double().numpy()
        gate = z.reshape(s.value_heads, -1)[h]
        heads.append(o * gate / (1 + np.exp(-gate)))
    return matrix(d.output) @ np.concatenate(heads)


def matrix(w: torch.Tensor | PackedTensor) -> np.ndarray:
    return decode64(w) if isinstance(w, PackedTensor) else w.double().numpy()


def worst(got: list[torch.Tensor], expected: list[np.ndarray]) -> float:
    """Of any token, any input of a slot, and any head's memory."""
    pairs = [(g.flatten(1), e.reshape(len(e), -1)) for g, e in zip(got[:2], expected[:2])]
    pairs.append((got[2].flatten(0, 3), expected[2].reshape(-1, expected[2].shape[-1])))
    rows = [[np.array([i]) for i in range(len(e))] for _, e in pairs[:2]]
    heads = np.arange(len(pairs[2][1])).reshape(-1, expected[2].shape[3])
    return max(worst_tile(g, e, groups) for (g, e), groups in zip(pairs, [*rows, list(heads)]))


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_delta(ops, threads, name, dtype, counts):  # noqa: F811
    case = Case(name, dtype, counts)
    got, expected = case.run(ops), case.expected()
    # Among many tokens are some whose queries find next to nothing, of which a norm makes as much as of others' finds.
    assert worst(got, expected) < LIMIT[dtype] * (1 if counts == FEW else 4)
    others = [slot for slot in range(6) if slot not in (5, 1)]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(got[1:], case.states)), "states of others"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_without_its_layer(ops, dtype):
    case = Case("separate", dtype, MANY)
    states = [state.clone() for state in case.states]
    x = ops.rms_norm(case.x, case.norm, 1e-12)
    got, (whole, *expected) = ops.delta_net(x, case.delta, *states, case.layout), case.run(ops)
    assert torch.equal(case.x + got, whole) and all(torch.equal(a, b) for a, b in zip(states, expected))
    # Where the states or what is given are of another dtype, runtime.delta_net does it.
    assert ops.delta_net(x.half(), case.delta, *states, case.layout) is None
    assert ops.delta_net(x.float() if dtype == torch.bfloat16 else x.bfloat16(), case.delta, *states, case.layout) is None
    again = ops.delta_net(x, case.delta, *(state.clone() for state in case.states), case.layout)
    assert torch.equal(again, got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changed", ["filter", "rate", "bias", "norm", "b", "output"])
def test_the_check_of_delta_sees(ops, changed, dtype):
    """One head's share of a weight, or one of its values, exchanged for another's."""
    case = Case("grouped", dtype)
    w = getattr(case.delta, changed)
    if isinstance(w, PackedTensor):
        data = w.data.clone()
        data[:, -20:] = data[:, :20]
        other = replace(w, data=data)
    else:
        other = w.clone()
        other[-1] = w[0]
    assert worst(case.run(ops, **{changed: other}), case.expected()) > 2 * LIMIT[dtype]


def test_threads_change_nothing(ops):
    case, before = Case("separate", torch.bfloat16, (4, 0, 70)), native.threads()
    found = []
    for count in (1, 2, 3, 8):
        native.set_threads(count)
        found.append(case.run(ops))
    native.set_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_sequence_that_is_not_finite_spoils_no_other(ops, threads):  # noqa: F811
    case = Case("grouped", torch.float32)
    case.x[0] = torch.nan
    out, tails, memories = case.run(ops)
    case.x[0] = 0
    expected = case.expected()
    assert out[0].isnan().all() and memories[5].isnan().all()
    assert worst_tile(out[1:], expected[0][1:]) < LIMIT[torch.float32]
    assert torch.equal(memories[1], memories[1].nan_to_num()) and torch.equal(tails[1], tails[1].nan_to_num())


def test_gates_at_their_ends(ops):
    """Memories that are kept or forgotten as a whole, corrections by nothing or by all."""
    case = Case("grouped", torch.float32)
    case.delta.bias[:] = torch.tensor([-100.0, 100.0, 30.0, -30.0, 0.0, 19.9])
    case.delta.rate[:] = torch.tensor([1.0, 1.0, 10.0, 1e-9, 0.0, 1e-3])
    case.delta.b.mul_(10)
    assert worst(case.run(ops), case.expected()) < LIMIT[torch.float32]


def test_states_that_do_not_fit(ops):
    case = Case("grouped", torch.float32)
    layer = Layer(case.norm, case.norm, 1e-6, case.delta, Dense(*((normal(96, 96).bfloat16(), None),) * 3))
    tails, memories = case.states
    for pools in ([tails[:, 1:], memories], [tails, memories[..., 1:]], [tails, memories.double()], [tails[1:], memories]):
        with pytest.raises(ValueError, match="layers cannot take"):
            PlacedLayers([layer], [pools], [None])
    for states in (None, torch.tensor([1]), torch.tensor([1, 2, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match="layers cannot take"):
            ops.layers(case.x, PlacedLayers([layer], [case.states], [None]), [], replace(case.layout, states=states))
        with pytest.raises(ValueError, match="delta_net cannot take"):
            ops.delta_net(case.x, case.delta, *case.states, replace(case.layout, states=states))


@pytest.mark.parametrize("part", ["qkv", "z", "b", "a", "filter", "rate", "bias", "norm", "output"])
def test_parts_that_do_not_fit_together(part):
    delta = delta_of(SPECS["separate"])
    w = getattr(delta, part)
    for other in (torch.ones(*(n + 1 for n in w.shape)), w.double() if part in ("filter", "rate", "bias", "norm") else None):
        with pytest.raises(ValueError, match="a delta net cannot take"):
            replace(delta, **{part: torch.ones(3, 3) if other is None else other})
