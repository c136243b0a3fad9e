"""What one forward pass works on: a ragged batch of sequences, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """New tokens of S sequences, laid end to end.

    tokens, positions: int64 [T].
    starts: int64 [S + 1] on the host; sequence s owns tokens starts[s] … starts[s + 1] − 1, at consecutive positions.
    block_tables: S lists of cache block ids; entry j of a list holds the sequence's positions j·B … j·B + B − 1 (B is
        the cache's block size) and the list covers every position up to the sequence's last new token.
    rows: int64 [R], the tokens whose logits are wanted.
    slots: S state slots of the cache; may be empty for a model that keeps no states.
    """

    tokens: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    block_tables: tuple[Sequence[int], ...]
    rows: Tensor
    slots: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        new: Sequence[Sequence[int]],
        past: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device="cpu",
        all_rows=False,
        slots: Sequence[int] = (),
    ) -> Batch:
        """From the new token ids of each sequence and how many tokens each has in the cache already.

        Logits are wanted of each sequence's last token, or with `all_rows` of every token.
        """
        starts = [0]
        for ids in new:
            starts.append(starts[-1] + len(ids))
        tokens = torch.tensor([t for ids in new for t in ids], dtype=torch.int64)
        positions = torch.cat([torch.arange(p, p + len(ids)) for p, ids in zip(past, new)])
        rows = torch.arange(len(tokens)) if all_rows else torch.tensor(starts[1:]) - 1
        tables = tuple(block_tables)
        return cls(tokens.to(device), positions.to(device), tuple(starts), tables, rows.to(device), tuple(slots))
