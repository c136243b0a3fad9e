"""`attend` of the triton backend, in the interpreter: norms, rotations and the cache in one kernel, against float64,
with outputs that are NaN before; and the whole as the same operations one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import UNIT
from tests.kernels.test_fused import DTYPES, HEADS, Attention, attend_arguments
from torch import Tensor

from tutel_pack.kernels.ops import Heads, Ops
from tutel_pack.spec import Rope

MORE = {
    "interleaved with norms": {"normed": True, "rope": Rope(1e4, 32, interleaved=True)},
    "a part with norms": {"normed": True, "rope": Rope(1e4, 12)},
}
CASES = {**HEADS, **MORE}


def place(case: Attention, rows: int | None = None, damage: str = "") -> list[Tensor]:
    """Run by a worker: turned [T, heads, D] and the pools. rows: of a program, fewer than the rule has."""
    from tutel_pack.kernels.triton.heads import placing

    how, slots, rotation = case.heads, case.layout.slots, case.rotation
    if damage == "norms":
        how = replace(how, q_norm=how.k_norm, k_norm=how.q_norm)
    if damage == "pairs":
        how = replace(how, interleaved=not how.interleaved)
    if damage == "angles":
        rotation = tuple(r.flip(0) for r in rotation)
    if damage == "slots":
        slots = slots.flip(0)
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
