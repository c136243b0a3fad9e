"""Attention over a paged cache against float64 loops, worst tile of every query head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.kernels.reference import ON_A_CPU, DTYPES, tolerance, worst_tile

from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Layout, get_ops

OPS = get_ops("torch")
D = 32


@pytest.fixture(autouse=True, params=ON_A_CPU)
def every_backend(request, monkeypatch):
    if request.param == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    monkeypatch.setitem(globals(), "OPS", get_ops(request.param))


@dataclass
class Case:
    """past, new: tokens of each sequence that are in the cache already, and that are added."""

    past: list[int]
    new: list[int]
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    block: int = 5
    q: torch.Tensor = field(init=False)

    def build(self, dtype: torch.dtype) -> Case:
        """Blocks of all sequences shuffled in pools that are NaN wherever no token is."""
        g = torch.Generator().manual_seed(0)
        self.lengths = [p + n for p, n in zip(self.past, self.new)]
        self.q = torch.randn(sum(self.new), self.heads, D, generator=g).to(dtype)
        need = [-(-n // self.block) for n in self.lengths]
        tables = torch.randperm(sum(need) + 1, generator=g)[:-1].split(need)
        pool_shape = (sum(need) + 1, self.block, self.kv_heads, D)
        self.keys, self.values = (torch.full(pool_shape, torch.nan, dtype=dtype) for _ in "kv")
        self.k, self.v = ([torch.randn(n, self.kv_heads, D, generator=g).to(dtype) for n in self.lengths] for _ in "kv")
        for pool, tokens in ((self.keys, self.k), (self.values, self.v)):
            for table, rows in zip(tables, tokens):
                for position, row in enumerate(rows):
                    pool[table[position // self.block], position % self.block] = row
        starts = np.cumsum([0, *self.new]).tolist()
        self.layout = Layout(starts, self.lengths, tables, torch.empty(0))
        return self

    def expected(self) -> np.ndarray:
        """[T · heads, D]"""
        out = []
        for s, (past, new) in enumerate(zip(self.past, self.new)):
            k, v = self.k[s].double().numpy(), self.v[s].double().numpy()
            for i in range(new):
                last = past + i
                first = 0 if self.window is None else max(0, last - self.window + 1)
                for h in range(self.heads):
                    kv = h // (self.heads // self.kv_heads)
                    query = self.q[self.layout.starts[s] + i, h].double().numpy()
                    scores = k[first : last + 1, kv] @ query / math.sqrt(D)
                    p = np.exp(scores - scores.max())
                    out.append(p / p.sum() @ v[first : last + 1, kv])
        return np.stack(out)

    def error(self, got: torch.Tensor) -> float:
        """Of the worst head of the worst query."""
        got = got.flatten(0, 1)
        return worst_tile(got, self.expected(), [np.array([i]) for i in range(len(got))])

    def limit(self) -> float:
        return tolerance(self.q.dtype, max(self.lengths))


CASES = {
    "prefill": Case([0], [12]),
    "decode": Case([7, 31], [1, 1]),
    "mixed": Case([0, 7, 30, 0], [12, 1, 6, 3]),  # what a scheduler's step looks like
    "nothing new": Case([0, 4, 0], [3, 0, 2]),  # a sequence that waits
    "block ends": Case([4, 5, 6], [1, 5, 4]),  # the last token is a block's last, or a block's only one
    "few": Case([0, 7, 30, 2], [3, 1, 6, 0]),
    "one token": Case([0], [1]),
    "multi-head": Case([3], [9], heads=4, kv_heads=4),
    "multi-query": Case([3], [9], heads=6, kv_heads=1),
    "several query tiles": Case([3], [300]),  # 256 queries of 2 shared heads at a time
    "window": Case([0, 7, 30], [12, 1, 6], window=5),
    "window longer than the sequence": Case([0], [12], window=64),
    "window over few": Case([0, 7, 30], [3, 1, 6], window=5),
    "window of one": Case([0, 9], [7, 1], window=1),
    "window over query tiles": Case([3], [300], window=40),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention(case, dtype):
    case = CASES[case].build(dtype)
    got = OPS.attention(case.q, case.keys, case.values, case.layout, case.window)
    assert got.dtype == dtype
    assert case.error(got) < case.limit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_sees(dtype):
    case = Case([0, 7], [12, 3], window=5).build(dtype)

    def error(keys=case.keys, values=case.values, layout=case.layout, window=case.window):
        return case.error(OPS.attention(case.q, keys, values, layout, window))

    assert error() < case.limit()
    assert error(window=4) > case.limit() and error(window=6) > case.limit()
    assert error(keys=case.keys.flip(2), values=case.values.flip(2)) > case.limit()
    first, second = case.layout.tables
    assert error(layout=replace(case.layout, tables=[first.flip(0), second])) > case.limit()
    assert case.error(torch.zeros_like(case.q)) > case.limit()


def test_no_tokens():
    case = Case([0], [0]).build(torch.float32)
    assert OPS.attention(case.q, case.keys, case.values, case.layout).shape == (0, 4, D)
