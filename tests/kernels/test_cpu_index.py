"""Layers whose latent attention sees picked positions, by the native kernels: every instruction set, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.kernels.reference import worst_tile
from tests.kernels.test_cpu_attention import threads  # noqa: F401
from tests.kernels.test_cpu_delta import matrix, normal, ops  # noqa: F401

from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Dense, Index, Latent, Layer, Layout, Ops, PlacedLayers
from tutel_pack.spec import Indexer, Rope

if not native.LIBRARY.exists():
    pytest.skip("the native kernels were not built: there was no compiler", allow_module_level=True)

HIDDEN, RANK, QUERY = 96, 32, 64
NOPE, SHARED, VALUE, HEADS = 24, 16, 20, 3
LIMIT = 5e-6


@dataclass
class Case:
    """Sequences of `lengths` positions, of which the last `new` are of this step, in blocks out of order."""

    lengths: list[int]
    new: list[int]
    top: int
    heads: int = 4
    dim: int = 32
    block: int = 16

    def build(self) -> Case:
        tokens, need = sum(self.new), [-(-n // self.block) for n in self.lengths]
        tables = torch.randperm(sum(need) + 1, generator=torch.Generator().manual_seed(1))[:-1].split(need)
        starts = [0, *np.cumsum(self.new).tolist()]
        self.positions = [p for n, new in zip(self.lengths, self.new) for p in range(n - new, n)]
        sequences = [s for s, new in enumerate(self.new) for _ in range(new)]
        slots = [tables[s][p // self.block] * self.block + p % self.block for s, p in zip(sequences, self.positions)]
        self.layout = Layout(starts, self.lengths, list(tables), torch.tensor(slots))
        self.x = 1e-4 * normal(tokens, HIDDEN, seed=2)  # so small that a residual connection rounds nothing
        self.norm = 1 + 0.3 * normal(HIDDEN, seed=3)
        # Keys of all positions but the new ones; what no sequence has is no number.
        self.pools = [torch.full((sum(need) + 1, self.block, n), torch.nan) for n in (RANK + SHARED, self.dim)]
        for s, (table, length, new) in enumerate(zip(tables, self.lengths, self.new)):
            for p in range(length - new):
                for i, pool in enumerate(self.pools):
                    pool[table[p // self.block], p % self.block] = normal(pool.shape[2], seed=1000 * s + 2 * p + i)
        rope = Rope(1e4, SHARED)
        self.rotation = Ops("torch").rotation(torch.tensor(self.positions), rope)
        self.latent = Latent(
            plain(QUERY, HIDDEN), 1 + 0.3 * normal(QUERY, seed=5), plain(HEADS * (NOPE + SHARED), QUERY),
            plain(RANK + SHARED, HIDDEN), 1 + 0.3 * normal(RANK, seed=6), 0.2 * normal(HEADS, NOPE + VALUE, RANK, seed=7),
            plain(HIDDEN, HEADS * VALUE), 0.2, 1e-6, False, self._index(rope),
        )  # fmt: skip
        return self

    def _index(self, rope: Rope) -> Index:
        spec = Indexer(self.heads, self.dim, self.top, rope)
        weights = [plain(n, k, seed=n)[0] for n, k in ((self.heads * self.dim, QUERY), (self.dim, HIDDEN), (self.heads, HIDDEN))]
        return Index(spec, *weights, 1 + 0.3 * normal(self.dim, seed=8), 0.3 * normal(self.dim, seed=9), 1e-6)

    def run(self, ops: Ops, **changed) -> torch.Tensor:  # noqa: F811
        """What two layers give, the second of which reuses the picks of the first."""
        nothing = Dense(*((torch.zeros(*shape), None) for shape in ((32, HIDDEN), (32, HIDDEN), (HIDDEN, 32))))
        first = replace(self.latent, index=replace(self.latent.index, **changed))
        second = replace(self.latent, index=None, reuses=True, scale=0.3)
        layers = [Layer(self.norm, torch.zeros(HIDDEN), 1e-12, a, nothing) for a in (first, second)]
        pools = [[pool.clone() for pool in self.pools], [self.pools[0].clone()]]
        out = ops.layers(self.x, PlacedLayers(layers, pools, [0, 0], [0, None]), [self.rotation], self.layout)
        assert out is not None
        return out

    def expected(self) -> np.ndarray:
        x, picks = self.x.double().numpy(), None
        for a in (self.latent, replace(self.latent, index=None, scale=0.3)):
            added, picks = self._attention(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * doubles(self.norm), a, picks)
            x = x + added
        return x

    def _attention(self, x: np.ndarray, a: Latent, picks: list | None) -> tuple[np.ndarray, list]:
        entries, keys = (doubles(pool) for pool in self.pools)
        compressed = rms(x @ matrix(a.q_down[0]).T, doubles(a.q_norm), a.eps)
        queries = (compressed @ matrix(a.q_up[0]).T).reshape(len(x), HEADS, -1)
        made = x @ matrix(a.kv_down[0]).T
        for t, slot in enumerate(self.layout.slots.tolist()):
            cosines, sines = (doubles(part)[t] for part in self.rotation)
            queries[t, :, NOPE:] = turned(queries[t, :, NOPE:], cosines, sines)
            entry = np.concatenate([rms(made[t, :RANK], doubles(a.kv_norm), a.eps), turned(made[t, RANK:], cosines, sines)])
            entries.reshape(-1, RANK + SHARED)[slot] = entry
        picks = self._picks(x, compressed, keys, a.index) if a.index else picks
        out = []
        for t, (sequence, seen) in enumerate(picks):
            table = self.layout.tables[sequence].numpy()
            rows = entries[table].reshape(-1, RANK + SHARED)[seen]
            heads = []
            for head in range(HEADS):
                up = doubles(a.up)[head]
                logits = np.concatenate([rows[:, :RANK] @ up[:NOPE].T, rows[:, RANK:]], 1) @ queries[t, head] * a.scale
                p = np.exp(logits - logits.max())
                heads.append(p / p.sum() @ (rows[:, :RANK] @ up[NOPE:].T))
            out.append(matrix(a.output[0]) @ np.concatenate(heads))
        return np.stack(out), picks

    def _picks(self, x: np.ndarray, compressed: np.ndarray, keys: np.ndarray, index: Index) -> list:
        """Of each token its sequence, and the positions that it sees."""
        found, weights = [], x @ matrix(index.weights).T * (self.heads * self.dim) ** -0.5
        made, queries = x @ matrix(index.k).T, (compressed @ matrix(index.q).T).reshape(len(x), self.heads, -1)
        made = (made - made.mean(-1, keepdims=True)) / np.sqrt(made.var(-1, keepdims=True) + index.eps)
        made = made * doubles(index.norm) + doubles(index.bias)
        for t, slot in enumerate(self.layout.slots.tolist()):
            cosines, sines = (doubles(part)[t] for part in self.rotation)
            keys.reshape(-1, self.dim)[slot] = partly_turned(made[t], cosines, sines)
            queries[t] = partly_turned(queries[t], cosines, sines)
        for t, own in enumerate(self.positions):
            sequence = np.searchsorted(self.layout.starts, t, side="right") - 1
            rows = keys[self.layout.tables[sequence].numpy()].reshape(-1, self.dim)[: own + 1]
            scores = np.maximum(rows @ queries[t].T, 0) @ weights[t]
            found.append((sequence, np.sort(np.argsort(-scores)[: self.top])))
        return found


def plain(n: int, k: int, seed: int = 4) -> tuple[torch.Tensor, None]:
    return (normal(n, k, seed=seed) * k**-0.5).bfloat16(), None


def doubles(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy().copy()


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)


def partly_turned(x: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    return np.concatenate([turned(x[..., :SHARED], cosines, sines), x[..., SHARED:]], axis=-1)


CASES = {
    "longer and shorter than what is picked": Case([300, 20, 33, 34], [1, 2, 1, 1], top=33),
    "several tokens, some before there is enough to pick": Case([12, 0, 100], [8, 0, 5], top=6),
    "blocks that are larger than pieces, and many heads": Case([200, 65], [1, 1], top=40, heads=40, dim=48, block=64),
    "small blocks": Case([90], [3], top=1, block=5),
    "all that there is": Case([30, 7], [1, 4], top=64),
}


@pytest.mark.parametrize("name", CASES)
def test_picked_positions(ops, threads, name):  # noqa: F811
    case = replace(CASES[name]).build()
    got, expected = case.run(ops), case.expected()
    assert worst_tile(got, expected, [np.array([t]) for t in range(len(expected))]) < LIMIT


@pytest.mark.parametrize("changed", ["weights", "norm", "bias", "q", "k", "top"])
def test_the_check_of_picked_positions_sees(ops, changed):  # noqa: F811
    case = Case([8, 90], [8, 2], top=3).build()
    index = case.latent.index
    other = {"spec": replace(index.spec, top_k=2)} if changed == "top" else {changed: getattr(index, changed).flip(0)}
    rows = [np.array([t]) for t in range(10)]
    assert worst_tile(case.run(ops), case.expected(), rows) < LIMIT
    assert worst_tile(case.run(ops, **other), case.expected(), rows) > 100 * LIMIT


def test_scores_that_are_no_numbers_count_as_largest(ops):  # noqa: F811
    """As for torch: the position is seen, and so it shows."""
    case = Case([100, 50], [1, 1], top=5).build()
    case.pools[1][case.layout.tables[0][1], 3] = torch.nan
    case.pools[0][case.layout.tables[0][1], 3] = torch.nan
    first, second = case.run(ops)
    assert first.isnan().all() and not second.isnan().any()


def test_pools_that_do_not_fit(ops):  # noqa: F811
    case = Case([9], [1], top=5).build()
    layer = Layer(case.norm, case.norm, 1e-6, case.latent, Dense(*(plain(HIDDEN, HIDDEN),) * 3))
    for keys in (case.pools[1][1:], case.pools[1][..., 1:], case.pools[1].half()):
        with pytest.raises(ValueError, match="layers cannot take"):
            PlacedLayers([layer], [[case.pools[0], keys]], [0], [0])
    with pytest.raises(ValueError, match="layers cannot take"):
        PlacedLayers([layer, layer], [case.pools] * 2, [0, 0], [0])


def test_parts_that_do_not_fit_together():
    case = Case([60, 9], [2, 1], top=5).build()
    index = case.latent.index
    wrong = [
        {"q": index.q[:-16]}, {"k": index.k[:16]}, {"k": torch.cat([index.k] * 2)}, {"weights": index.weights[:1]},
        {"norm": index.norm[:1]}, {"norm": index.norm.double()}, {"bias": index.bias.bfloat16()},
        {"spec": replace(index.spec, top_k=0)}, {"spec": replace(index.spec, rope=Rope(1e4, 128))},
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(ValueError, match="an index cannot take"):
            replace(index, **changes)
    other = replace(case.latent, index=replace(index, q=index.q[:, :-1]))
    layer = Layer(case.norm, case.norm, 1e-6, other, Dense(*(plain(HIDDEN, HIDDEN),) * 3))
    with pytest.raises(ValueError, match="layers cannot take"):
        PlacedLayers([layer], [case.pools], [0], [0])


def test_rotations_that_do_not_fit(ops):  # noqa: F811
    """Are left to single operations, which say so."""
    case = Case([60, 9], [2, 1], top=5).build()
    layer = Layer(case.norm, case.norm, 1e-6, case.latent, Dense(*(plain(HIDDEN, HIDDEN),) * 3))
    wide = Ops("torch").rotation(torch.tensor(case.positions), Rope(1e4, 128))
    for which, index in (([0], ()), ([0], [1]), ([None], [None])):
        assert ops.layers(case.x, PlacedLayers([layer], [case.pools], which, index), [case.rotation, wide], case.layout) is None
