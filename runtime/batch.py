"""What one forward pass works on: a ragged batch of sequences, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

STEP_TOKENS = 4096
"""New tokens of one step at most: what bounds the memory of activations, and how long others wait for a long prompt.
Fewer cost more each: a weight of an expert is decoded for all of a step's tokens at once."""


@dataclass(frozen=True)
class Batch:
    """New tokens of S sequences, laid end to end.

    tokens, positions: int64 [T].
    starts: S + 1 numbers; sequence s owns tokens starts[s] … starts[s + 1] − 1, at consecutive positions.
    lengths: S numbers; how many positions a sequence has with its new tokens, 0 where it has no new ones.
    block_tables: S lists of cache block ids; entry j of a list holds the sequence's positions j·B … j·B + B − 1 (B is
        the cache's block size) and the list covers every position up to the sequence's last new token.
    rows: int64 [R], the tokens whose logits are wanted.
    slots: S state slots of the cache; may be empty for a model that keeps no states.
    """

    tokens: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
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
        starts = list(accumulate((len(ids) for ids in new), initial=0))
        lengths = tuple(p + len(ids) if ids else 0 for p, ids in zip(past, new))
        tokens = [t for ids in new for t in ids]
        positions = [i for p, ids in zip(past, new) for i in range(p, p + len(ids))]
        rows = range(starts[-1]) if all_rows else [stop - 1 for stop in starts[1:]]
        tokens, positions, rows = (
            torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (tokens, positions, rows)
        )
        return cls(tokens, positions, tuple(starts), lengths, tuple(block_tables), rows, tuple(slots))
