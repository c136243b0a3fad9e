"""The router and the sort of the triton backend, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.test_products import x_of

from tutel_pack.spec import Moe, Router

ROUTERS = {
    "softmax, as it is": Moe(12, 3, 1, Router(renormalize=False)),
    "softmax": Moe(128, 8, 1),
    "512 experts": Moe(512, 10, 1, Router(scale=2.5)),
    "softmax of the chosen": Moe(32, 4, 1, Router("softmax_chosen", renormalize=False)),
    "sigmoid, corrected": Moe(160, 8, 1, Router("sigmoid", correction=True, scale=2.5)),
    "grouped": Moe(256, 8, 1, Router("sigmoid", correction=True, groups=8, top_groups=4)),
    "groups of three": Moe(12, 3, 1, Router(groups=4, top_groups=2)),  # no power of two
    "groups of one": Moe(6, 2, 1, Router(groups=6, top_groups=3)),
    "square root of softplus": Moe(384, 6, 1, Router("sqrtsoftplus", correction=True)),
    "more wanted than the groups have": Moe(8, 5, 1, Router(groups=4, top_groups=2, renormalize=False)),
}

SCORES = {
    "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)),
    "softmax_chosen": lambda x: x,
}


def route64(logits: torch.Tensor, moe: Moe, correction: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Every token by itself, sorted in full."""
    router, ids, weights = moe.router, [], []
    correction = None if correction is None else correction.double().numpy()
    for row in logits.double().numpy():
        score = SCORES[router.score](row)
        choice = score.copy() if correction is None else score + correction
        if router.top_groups < router.groups:
            groups = choice.reshape(router.groups, -1)
            sums = -np.sort(-groups, axis=1)[:, :2].sum(1)
            kept = np.argsort(-sums, kind="stable")[: router.top_groups]
            outside = np.repeat(~np.isin(np.arange(router.groups), kept), groups.shape[1])
            choice[outside] = -np.inf
        chosen = np.argsort(-choice, kind="stable")[: moe.top_k]
        weight = score[chosen]
        if router.score == "softmax_chosen":
            weight = SCORES["softmax"](weight)
        if router.renormalize:
            weight = weight / max(weight.sum(), router.epsilon)
        ids.append(chosen)
        weights.append(weight * router.scale)
    return np.stack(ids), np.stack(weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_route(name):
    moe = ROUTERS[name]
    logits = x_of(4, moe.experts, dtype=torch.float32) * 3
    logits[0, 1], logits[1, 2] = 60, -60  # all but one vanish; one does
    correction = x_of(moe.experts, dtype=torch.float32, seed=9) * 0.1 if moe.router.correction else None
    ids, weights = interpreted.op("route", logits, moe, correction).result()
    expected_ids, expected = route64(logits, moe, correction)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert np.array_equal(ids.numpy(), expected_ids)
    assert np.allclose(weights.double().numpy(), expected, rtol=1e-5, atol=1e-30)


def test_equal_logits_and_nan():
    """Of equals the first; ids that exist, whatever comes in."""
    logits = torch.zeros(3, 6)
    logits[1] = torch.nan
    logits[2, 4] = torch.nan
    ids, _ = interpreted.op("route", logits, Moe(6, 2, 1, Router("sigmoid")), None).result()
    assert ids.tolist() == [[0, 1], [0, 1], [4, 0]]


def test_no_tokens():
    ids, weights = interpreted.op("route", torch.empty(0, 6), Moe(6, 2, 1), None).result()
    assert ids.shape == weights.shape == (0, 2)


def sort(ids: torch.Tensor, experts: int, bm: int, tiles: int):
    """Run by a worker: (order, tile_expert, tile_first, tile_last)."""
    from tutel_pack.kernels.triton.matmul import Tiles, sorting

    made = Tiles.empty(len(ids), tiles, ids.device)
    for t in (made.order, made.expert, made.first, made.last):
        t.fill_(-99)
    sorting(ids, experts, bm, made).run()
    return made.order, made.expert, made.first, made.last


SORTS = {
    "ragged": torch.randint(0, 7, (50,), generator=torch.Generator().manual_seed(1)),
    "one hot expert": torch.full((70,), 6),
    "dropped": torch.tensor([-1, 3, -1, 0, 3, 7, 6, -5]),  # there are 7 experts
    "all dropped": torch.full((5,), -1),
    "several blocks of ids": torch.arange(1100) % 2 * 6,
}


@pytest.mark.parametrize("name", SORTS)
def test_sort(name):
    ids, experts, bm = SORTS[name], 7, 16
    tiles = len(ids) // bm + min(experts, len(ids))
    sorted_here = interpreted.submit("tests.kernels.test_triton_routing:sort", ids, experts, bm, tiles)
    order, expert, first, last = sorted_here.result()
    bucket = torch.where((ids >= 0) & (ids < experts), ids, experts)
    assert torch.equal(order, torch.argsort(bucket, stable=True).int())
    expected = []
    for e in range(experts):
        places = (bucket[order.long()] == e).nonzero()[:, 0].tolist()
        expected += [(e, place, places[-1] + 1) for place in places[::bm]]
    assert len(expected) <= tiles
    used = len(expected)
    assert list(zip(expert.tolist(), first.tolist(), last.tolist()))[:used] == expected
    assert (expert[used:] == -1).all()
