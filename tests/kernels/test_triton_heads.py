"""`attend` and `attend_latents` of the triton backend, in the interpreter: norms, rotations and the cache in one
kernel, against float64, with outputs that are NaN before; and the whole as the same operations one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import UNIT
from tests.kernels.test_fused import DTYPES, HEADS, Attention, Latents, attend_arguments, normal
from torch import Tensor

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.ops import Heads, Latent, Layout, Ops
from tutel_pack.spec import Rope

MORE = {
    "interleaved with norms": {"normed": True, "rope": Rope(1e4, 32, interleaved=True)},
    "a part with norms": {"normed": True, "rope": Rope(1e4, 12)},
}
CASES = {**HEADS, **MORE}


def damaged(how, rotation: tuple, slots: Tensor, damage: str) -> tuple:
    """(how, rotation, slots) with what is wrong."""
    if damage == "pairs":
        how = replace(how, interleaved=not how.interleaved)
    if damage == "angles":
        rotation = tuple(r.flip(0) for r in rotation)
    if damage == "slots":
        slots = slots.flip(0)
    return how, rotation, slots


def place(case: Attention, rows: int | None = None, damage: str = "") -> list[Tensor]:
    """Run by a worker: turned [T, heads, D] and the pools. rows: of a program, fewer than the rule has."""
    from tutel_pack.kernels.triton.heads import placing

    how, rotation, slots = damaged(case.heads, case.rotation, case.layout.slots, damage)
    if damage == "norms":
        how = replace(how, q_norm=how.k_norm, k_norm=how.q_norm)
    pools = [pool.clone() for pool in case.pools]
    turned = torch.full((len(case.q), 4, 32), torch.nan, dtype=case.q.dtype)
    launch = placing(case.q, case.k, case.v, *pools, slots, rotation, how, turned)
    if rows:
        launch.arguments["BR"] = rows
        launch = replace(launch, grid=(len(case.q), -(-4 // rows) + 2 * -(-2 // rows)))
    launch.run()
    return [turned, *pools]


def submit(case: Attention, *how):
    return interpreted.submit("tests.kernels.test_triton_heads:place", case, *how)


def normed64(x: np.ndarray, weight: Tensor | None, eps: float) -> np.ndarray:
    """x [T, heads, D]."""
    if weight is None:
        return x
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight.double().numpy()


def turned64(x: np.ndarray, rotation: tuple[Tensor, Tensor] | None, interleaved: bool) -> np.ndarray:
    if rotation is None:
        return x
    out, half = x.copy(), rotation[0].shape[1]
    for t, row in enumerate(x):
        for j in range(half):
            i, k = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            c, s = (r[t, j].item() for r in rotation)
            out[t, :, i], out[t, :, k] = row[:, i] * c - row[:, k] * s, row[:, k] * c + row[:, i] * s
    return out


def expected64(case: Attention) -> list[np.ndarray]:
    h = case.heads
    q, k, v = (x.double().numpy().reshape(len(x), -1, 32) for x in (case.q, case.k, case.v))
    q, k = (turned64(normed64(x, n, h.eps), case.rotation, h.interleaved) for x, n in ((q, h.q_norm), (k, h.k_norm)))
    pools = [pool.double().numpy().copy() for pool in case.pools]
    for pool, new in zip(pools, (k, v)):
        for t, slot in enumerate(case.layout.slots.tolist()):
            pool[slot // 16, slot % 16] = new[t]
    return [q, *pools]


def worst_head(got: list[Tensor], expected: list[np.ndarray]) -> float:
    """The largest error of any head of any token in units of its largest value."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        error = np.abs(a.double().numpy() - b).max(-1) / np.abs(b).max(-1)
        worst = max(worst, np.nan_to_num(error, nan=np.inf).max())
    return worst


def limit(dtype: torch.dtype) -> float:
    """Three roundings at most, which for bfloat16 the interpreter makes by cutting off, twice as far as rounding."""
    return 3 * UNIT[dtype] * (2 if dtype == torch.bfloat16 else 1) + 4 * UNIT[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_heads_are_placed(name, dtype):
    case = Attention(dtype, **CASES[name])
    runs = [submit(case), submit(case, 1)]  # a program for all heads of a kind, and one for each
    for run in runs:
        assert worst_head(run.result(), expected64(case)) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_sees(dtype):
    case = Attention(dtype, **CASES["a part with norms"])
    runs = {damage: submit(case, None, damage) for damage in ("norms", "pairs", "angles", "slots")}
    for damage, run in runs.items():
        assert worst_head(run.result(), expected64(case)) > limit(dtype), damage
    zeros = [torch.zeros_like(t) for t in (runs["norms"].result())]
    assert worst_head(zeros, expected64(case)) > limit(dtype)


def both(case: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """Run by a worker: in one call, and one by one."""
    ops, single = Ops("triton"), Ops("triton")
    assert ops._fused["attend"]
    single._fused = dict.fromkeys(single._fused)
    return case.run(ops), case.run(single)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_one_by_one(name, dtype):
    """Sequences that decode, wait and prefill. float32 norms sum in another order."""
    runs = interpreted.submit("tests.kernels.test_triton_heads:both", Attention(dtype, **CASES[name])).result()
    for got, expected in zip(*runs):
        assert got.dtype == dtype and got.shape == expected.shape
        size = expected.double().abs().max()
        assert (got.double() - expected.double()).abs().max() <= 4 * UNIT[dtype] * size
        assert dtype == torch.float32 or (got != expected).double().mean() < 0.02


def strided_call() -> tuple[Tensor, Tensor]:
    """Run by a worker: parts of one projection, as they are and copied, and pools whose blocks are apart."""
    q, k, v, keys, values, layout, rotation = attend_arguments(4, 32, 16, torch.float32)
    whole = torch.cat([q, k, v], dim=1)
    parts = whole.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    apart = [torch.cat([p, p], dim=1)[:, : p.shape[1]] for p in (keys, values)]
    ops = Ops("triton")
    expected = ops.attend(q, k, v, keys, values, layout, rotation, Heads())
    return ops.attend(*parts, *apart, layout, rotation, Heads()), expected


def test_rows_and_blocks_may_be_apart():
    got, expected = interpreted.submit("tests.kernels.test_triton_heads:strided_call").result()
    assert torch.equal(got, expected)


# Latents


@dataclass
class Placed:
    """Five tokens, of which the last two stand beside each other in the cache; the first parts of queries stay."""

    heads: int = 3
    nope: int = 12
    rank: int = 32
    turned: int = 16
    interleaved: bool = False

    def build(self, dtype: torch.dtype) -> Placed:
        whole = normal(5, self.heads, self.nope + self.turned, dtype=dtype, seed=1)
        self.q, self.kv = whole[..., self.nope :], normal(5, self.rank + self.turned, dtype=dtype, seed=2)
        self.norm, self.slots = 1 + 0.3 * normal(self.rank, seed=3), torch.tensor([9, 0, 23, 4, 5])
        self.entries = normal(6, 4, self.rank + self.turned, dtype=dtype, seed=4)
        rope = Rope(1e4, self.turned, self.interleaved)
        self.rotation = torch_backend.rotation(torch.tensor([70, 0, 3, 12, 13]), rope, None)
        return self

    @property
    def how(self) -> Latent:
        return Latent(None, None, None, None, self.norm, None, None, 1.0, 1e-5, self.interleaved)

    def parts(self, turned, entries) -> list:
        """Turned queries, the latents of the pool, and its keys."""
        return [turned, entries[..., : self.rank], entries[..., self.rank :]]

    def expected(self) -> list[np.ndarray]:
        entries, rank = self.entries.double().numpy().copy(), self.rank
        latents, keys = np.split(self.kv.double().numpy()[:, None], [rank], axis=2)
        latents, keys = normed64(latents, self.norm, 1e-5), turned64(keys, self.rotation, self.interleaved)
        for t, slot in enumerate(self.slots.tolist()):
            entries[slot // 4, slot % 4] = np.concatenate([latents[t, 0], keys[t, 0]])
        return self.parts(turned64(self.q.double().numpy(), self.rotation, self.interleaved), entries)


PLACED = {
    "halves": Placed(),
    "pairs": Placed(interleaved=True),
    "no powers of two": Placed(heads=5, rank=40, turned=24),
    "more heads than a program has": Placed(heads=150, rank=24, turned=16, interleaved=True),
}


def place_latents(case: Placed, damage: str = "") -> list[Tensor]:
    """Run by a worker."""
    from tutel_pack.kernels.triton.heads import placing_latents

    (how, rotation, slots), kv = damaged(case.how, case.rotation, case.slots, damage), case.kv
    if damage == "norm":
        how = replace(how, kv_norm=how.kv_norm.flip(0))
    if damage == "epsilon":
        how = replace(how, eps=0.1)
    if damage == "parts":
        kv = kv.roll(1, 1)
    entries, turned = case.entries.clone(), torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    placing_latents(case.q, kv, entries, slots, rotation, how, turned).run()
    untouched = torch.ones(24, dtype=torch.bool).index_fill_(0, slots, False)
    assert torch.equal(entries.flatten(0, 1)[untouched], case.entries.flatten(0, 1)[untouched])
    return case.parts(turned, entries)


def submit_placed(case: Placed, damage: str = ""):
    return interpreted.submit("tests.kernels.test_triton_heads:place_latents", case, damage)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLACED)
def test_latents_are_placed(name, dtype):
    case = PLACED[name].build(dtype)
    assert worst_head(submit_placed(case).result(), case.expected()) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_of_latents_sees(dtype):
    case = Placed().build(dtype)
    runs = {damage: submit_placed(case, damage) for damage in ("norm", "epsilon", "pairs", "angles", "slots", "parts")}
    for damage, run in runs.items():
        assert worst_head(run.result(), case.expected()) > limit(dtype), damage
    for i in range(3):
        wrong = submit_placed(case).result()
        wrong[i] = torch.zeros_like(wrong[i])
        assert worst_head(wrong, case.expected()) > limit(dtype)


PICKS = [None, torch.tensor([[0, 3], [1, 0], [2, 0], [3, 1], [4, 2]])]
"""Of `Latents`: all positions of the sequence that decodes, two of each query's in the one that prefills."""


def both_of_latents(case: Latents, picks, apart: bool = False) -> list[list[Tensor]]:
    """Run by a worker: in one call, and one by one. apart: tokens and blocks have gaps between them, in the former."""
    ops, single, found = Ops("triton"), Ops("triton"), []
    assert ops._fused["attend_latents"]
    single._fused = dict.fromkeys(single._fused)
    dtype = case.pools[0].dtype
    q, kv = normal(6, 120, dtype=dtype, seed=1), normal(6, 48, dtype=dtype, seed=2)
    if apart:
        q, kv = torch.cat([q, kv], dim=1).split([120, 48], dim=1)
    pools = torch.cat([case.pools[0]] * 2, dim=1)[:, :16] if apart else case.pools[0].clone(), case.pools[0].clone()
    for backend, pool in zip((ops, single), pools):
        given = q.clone(), kv.clone()
        out = backend.attend_latents(q, kv, pool, case.layout, case.rotation, case.attention, picks)
        assert torch.equal(q, given[0]) and torch.equal(kv, given[1]), "inputs stay"
        found.append([out, pool])
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("picks", [None, PICKS], ids=["all", "picked"])
@pytest.mark.parametrize("name", ["one after another", "apart", "pairs"])
def test_latents_as_one_by_one(name, picks, dtype):
    """A sequence that decodes, and one that prefills."""
    case, function = Latents(dtype, interleaved=name == "pairs"), "tests.kernels.test_triton_heads:both_of_latents"
    for got, expected in zip(*interpreted.submit(function, case, picks, name == "apart").result()):
        assert got.dtype == dtype and got.shape == expected.shape
        size = expected.double().abs().max()
        assert (got.double() - expected.double()).abs().max() <= 4 * UNIT[dtype] * size
        assert dtype == torch.float32 or (got != expected).double().mean() < 0.02
