"""What layers keep of the past: entries of every token, in pools of equal blocks that sequences take and give back, and
states of fixed size, in slots of which a sequence has one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tutel_pack.errors import ResourceError
from tutel_pack.kernels.ops import Layout
from tutel_pack.runtime.batch import Batch


State = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a layer keeps of a whole sequence."""


class PagedCache:
    """Pools of what layers keep of every token, [blocks, block_size, …] each, and of every sequence, [slots, …] each.

    shapes: for every layer, name -> shape of one token's entry, such as {"keys": (kv_heads, head_dim), …}.
    states: for every layer, name -> State; none for models that keep nothing but tokens.
    tokens: for every layer, name -> pool. A block id stands for the same place in all pools. ResourceError if the pools
    do not fit into the device's memory.
    sequences: for every layer, name -> pool of states, by slot. They grow with the slots that are taken, so what is
    kept of them is a pool's content and never the pool itself.
    """

    def __init__(
        self,
        shapes: Sequence[dict[str, tuple[int, ...]]],
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        states: Sequence[dict[str, State]] = (),
    ):
        self.block_size = block_size
        try:
            self.tokens = [
                {name: torch.empty(blocks, block_size, *shape, dtype=dtype, device=device) for name, shape in layer.items()}
                for layer in shapes
            ]
        except RuntimeError as e:  # torch's out-of-memory errors, of any device
            size = blocks * block_size * dtype.itemsize * sum(math.prod(s) for layer in shapes for s in layer.values())
            raise ResourceError(
                f"A cache of {blocks * block_size} tokens takes {size / 1e9:.1f} GB, which {device} does not have: "
                "ask for a shorter context or fewer sequences at once."
            ) from e
        self._free, self._used = list(range(blocks - 1, -1, -1)), set()
        self._stateful = any(states)
        self._free_slots, self._used_slots = [], set()
        self.sequences = [
            {name: torch.empty(0, *shape, dtype=kind, device=device) for name, (shape, kind) in layer.items()}
            for layer in states
        ]

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, whose contents are undefined. ResourceError, and nothing taken, if fewer are free."""
        if n > len(self._free):
            raise ResourceError(
                f"The cache has {len(self._free)} free blocks of {self.block_size} tokens where {n} are needed: "
                "give it more blocks, or run fewer or shorter sequences at once."
            )
        taken = [self._free.pop() for _ in range(n)]
        self._used.update(taken)
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back. ValueError if one is not taken: freed twice, it would end up in two sequences."""
        for block in ids:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            self._free.append(block)

    def allocate_slot(self) -> int:
        """Take a slot, whose states are those of a sequence without tokens: zeros.

        ResourceError, and nothing taken, if the device's memory is full.
        """
        if not self._free_slots:
            self._add_slots(max(1, len(self._used_slots)))
        slot = self._free_slots.pop()
        self._used_slots.add(slot)
        for pool in self._state_pools():
            pool[slot].zero_()
        return slot

    def free_slot(self, slot: int) -> None:
        """Give a slot back. ValueError if it is not taken."""
        if slot not in self._used_slots:
            raise ValueError(f"slot {slot} is not in use")
        self._used_slots.remove(slot)
        self._free_slots.append(slot)

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy of all states of a slot, for `restore`: tokens that are run after it are then as if they were not."""
        return [pool[slot].clone() for pool in self._state_pools()]

    def restore(self, slot: int, states: Sequence[Tensor]) -> None:
        """Put a snapshot into a slot, that it was taken of or another one."""
        for pool, state in zip(self._state_pools(), states, strict=True):
            pool[slot] = state

    def _state_pools(self) -> Iterator[Tensor]:
        return (pool for layer in self.sequences for pool in layer.values())

    def _add_slots(self, n: int) -> None:
        have = len(self._used_slots)
        try:
            grown = [{name: _grown(pool, have + n) for name, pool in layer.items()} for layer in self.sequences]
        except RuntimeError as e:
            size = (have + n) * sum(math.prod(p.shape[1:]) * p.itemsize for p in self._state_pools())
            raise ResourceError(
                f"The states of {have + n} sequences take {size / 1e9:.1f} GB, which the device does not have: "
                "run fewer sequences at once."
            ) from e
        if self._stateful:  # another list is for others to see that the pools have moved
            self.sequences = grown
        self._free_slots += range(have + n - 1, have - 1, -1)

    def layout(self, batch: Batch) -> Layout:
        """Where the batch's sequences and new tokens are stored.

        ValueError if a block table does not reach its sequence's last token: another's blocks would be overwritten; and
        if there are states to keep and the sequences do not have a slot each, of those that are taken.
        """
        size, device = self.block_size, batch.positions.device
        slots: list[int] = []
        for s, (length, table) in enumerate(zip(batch.lengths, batch.block_tables)):
            if len(table) * size < length:
                raise ValueError(f"sequence {s} has {length} tokens but only {len(table)} blocks of {size}")
            new = range(length - (batch.starts[s + 1] - batch.starts[s]), length)
            slots += [table[position // size] * size + position % size for position in new]
        tables = [
            torch.tensor(table[: -(-length // size)], dtype=torch.int64, device=device)
            for table, length in zip(batch.block_tables, batch.lengths)
        ]
        slots = torch.tensor(slots, dtype=torch.int64, device=device)
        return Layout(batch.starts, batch.lengths, tables, slots, self._states(batch))

    def _states(self, batch: Batch) -> Tensor | None:
        """int64 [S]: the slot of every sequence; None where no states are kept."""
        if not self._stateful:
            return None
        if len(set(batch.slots)) != len(batch.block_tables) or not self._used_slots.issuperset(batch.slots):
            raise ValueError(f"{len(batch.block_tables)} sequences need a state slot each, not {list(batch.slots)}")
        return torch.tensor(batch.slots, dtype=torch.int64).to(batch.positions.device)

    def append(self, layer: int, layout: Layout, **entries: Tensor) -> None:
        """Store the new tokens' entries, name -> [T, …], in the pools of a layer."""
        for name, entry in entries.items():
            self.tokens[layer][name].flatten(0, 1).index_copy_(0, layout.slots, entry)


def _grown(pool: Tensor, slots: int) -> Tensor:
    """A pool of more slots with the same content."""
    grown = pool.new_empty(slots, *pool.shape[1:])
    grown[: len(pool)] = pool
    return grown
