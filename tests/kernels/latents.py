"""Latent attention over a paged cache in float64, one head of one token after another; the pool is NaN where no token
is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tests.kernels.reference import tolerance, worst_tile

from tutel_pack.kernels.ops import Layout


@dataclass
class Latents:
    """lengths: of sequences, their new tokens included; new: these, one each if None. picked: top_k positions of those
    that are longer, the query's own among them; so may be some that are behind it."""

    lengths: list[int]
    heads: int = 3
    rank: int = 24
    shared: int = 8
    nope: int = 12
    v: int = 20
    picked: int | None = None
    block: int = 5
    new: list[int] | None = None

    def build(self, dtype: torch.dtype) -> Latents:
        g = torch.Generator().manual_seed(3)
        self.new = self.new or [1] * len(self.lengths)
        self.positions = [range(n - new, n) for n, new in zip(self.lengths, self.new)]
        self.q = torch.randn(sum(self.new), self.heads, self.nope + self.shared, generator=g).to(dtype)
        self.up = (torch.randn(self.heads, self.nope + self.v, self.rank, generator=g) * self.rank**-0.5).to(dtype)
        self.rows = [torch.randn(n, self.rank + self.shared, generator=g).to(dtype) for n in self.lengths]
        need = [-(-n // self.block) for n in self.lengths]
        tables = torch.randperm(sum(need) + 1, generator=g)[:-1].split(need)
        self.entries = torch.full((sum(need) + 1, self.block, self.rank + self.shared), torch.nan, dtype=dtype)
        for table, rows in zip(tables, self.rows):
            for position, row in enumerate(rows):
                self.entries[table[position // self.block], position % self.block] = row
        starts = np.cumsum([0, *self.new]).tolist()
        self.layout = Layout(starts, self.lengths, list(tables), torch.empty(0))
        self.picks = [self._picks(s, g) for s in range(len(self.new))] if self.picked else None
        self.scale = (self.nope + self.shared) ** -0.5
        return self

    def _picks(self, s: int, g: torch.Generator) -> torch.Tensor | None:
        length = self.lengths[s]
        if length <= self.picked:
            return None
        picks = []
        for own in self.positions[s]:
            others = torch.randperm(length - 1, generator=g)[: self.picked - 1]
            picks.append(torch.cat([others + (others >= own), torch.tensor([own])]))
        return torch.stack(picks) if picks else None

    def expected(self) -> np.ndarray:
        """[T · heads, v]"""
        out = []
        for s, positions in enumerate(self.positions):
            rows, picks = self.rows[s].double().numpy(), self.picks and self.picks[s]
            for i, own in enumerate(positions):
                seen = rows[: own + 1] if picks is None else rows[[p for p in picks[i].tolist() if p <= own]]
                out += self._heads(self.q[self.layout.starts[s] + i].double().numpy(), seen)
        return np.stack(out)

    def _heads(self, q: np.ndarray, seen: np.ndarray) -> list[np.ndarray]:
        out, up = [], self.up.double().numpy()
        for h in range(self.heads):
            keys = np.concatenate([seen[:, : self.rank] @ up[h, : self.nope].T, seen[:, self.rank :]], axis=1)
            logits = keys @ q[h] * self.scale
            p = np.exp(logits - logits.max())
            out.append(p / p.sum() @ (seen[:, : self.rank] @ up[h, self.nope :].T))
        return out

    def error(self, got: torch.Tensor) -> float:
        """Of the worst head of the worst query."""
        got = got.flatten(0, 1)
        return worst_tile(got, self.expected(), [np.array([i]) for i in range(len(got))])

    def limit(self) -> float:
        """By the longest sum on the way: over positions, or over an entry, however few positions there are."""
        return tolerance(self.q.dtype, max(*self.lengths, self.rank + self.shared))
