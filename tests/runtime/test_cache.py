"""Blocks and slots are never in two hands, and every token lands where its sequence's table says."""

from __future__ import annotations

import pytest
import torch

from tutel_pack.errors import ResourceError
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cache import PagedCache


def make(blocks: int = 6, block_size: int = 4) -> PagedCache:
    """Two layers, of 2 heads of 8 and 1 head of 16."""
    return PagedCache([{"keys": s, "values": s} for s in ((2, 8), (1, 16))], blocks, block_size, torch.device("cpu"), torch.float32)


def test_blocks_are_taken_and_given_back():
    cache = make()
    first, second = cache.allocate(2), cache.allocate(3)
    assert len({*first, *second}) == 5 and {*first, *second} <= set(range(6)) and cache.free_blocks == 1
    cache.free(first)
    assert cache.free_blocks == 3
    assert not set(cache.allocate(3)) & set(second) and cache.free_blocks == 0
    assert cache.allocate(0) == []


def test_an_exhausted_cache_says_so_and_gives_nothing():
    cache = make()
    cache.allocate(4)
    with pytest.raises(ResourceError, match="2 free blocks of 4 tokens where 3 are needed"):
        cache.allocate(3)
    assert cache.free_blocks == 2


def test_a_block_cannot_be_freed_twice():
    cache = make()
    ids = cache.allocate(2)
    cache.free(ids)
    with pytest.raises(ValueError, match="not in use"):
        cache.free(ids)
    with pytest.raises(ValueError, match="not in use"):
        cache.free([99])
    assert cache.free_blocks == 6


def test_the_pools_take_what_was_asked_for():
    cache = make(blocks=6, block_size=4)
    for name in ("keys", "values"):
        assert [layer[name].shape for layer in cache.tokens] == [(6, 4, 2, 8), (6, 4, 1, 16)]
    assert sum(p.nbytes for layer in cache.tokens for p in layer.values()) == 2 * 2 * 6 * 4 * 16 * 4


def test_a_cache_larger_than_the_memory():
    with pytest.raises(ResourceError, match=r"A cache of \d+ tokens takes [\d.]+ GB, which cpu does not have"):
        make(blocks=2, block_size=1 << 40)


def test_tokens_land_where_the_tables_say():
    cache = make()
    for pool in (p for layer in cache.tokens for p in layer.values()):
        pool.fill_(torch.nan)
    # Positions 3 … 5 of one sequence, none of the second, position 0 of the third.
    batch = Batch.build([[7, 8, 9], [], [5]], [3, 2, 0], [[4, 1], [0], [3]])
    layout = cache.layout(batch)
    assert layout.slots.tolist() == [4 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 3 * 4 + 0]
    assert list(layout.lengths) == [6, 0, 1] and [t.tolist() for t in layout.tables] == [[4, 1], [], [3]]
    new = torch.arange(4.0)[:, None, None].expand(4, 2, 8)
    cache.append(0, layout, keys=new, values=-new)
    for pool, sign in ((cache.tokens[0]["keys"], 1), (cache.tokens[0]["values"], -1)):
        assert [pool[b, i, 1, 5].item() for b, i in ((4, 3), (1, 0), (1, 1), (3, 0))] == [0, sign, 2 * sign, 3 * sign]
        assert pool.isnan().sum() == pool.numel() - 4 * 16
    assert all(pool.isnan().all() for pool in cache.tokens[1].values())


def test_a_table_may_be_longer_than_needed():
    layout = make().layout(Batch.build([[1], [2]], [4, 0], [[2, 0, 5], [1, 3]]))
    assert [t.tolist() for t in layout.tables] == [[2, 0], [1]] and layout.slots.tolist() == [0, 4]


def test_a_table_too_short_is_an_error():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens but only 2 blocks of 4"):
        make().layout(Batch.build([[1], [2]], [0, 8], [[0], [1, 2]]))


STATES = [{"tail": ((3, 5), torch.float16), "memory": ((2, 4), torch.float32)}, {}, {"memory": ((7,), torch.float32)}]


def stateful() -> PagedCache:
    """Three layers, of which the second keeps tokens only."""
    return PagedCache([{}, {"keys": (1, 8)}, {}], 6, 4, torch.device("cpu"), torch.float16, STATES)


def pools(cache: PagedCache) -> list[torch.Tensor]:
    return [pool for layer in cache.sequences for pool in layer.values()]


def fill(cache: PagedCache, slot: int, value: float) -> None:
    for pool in pools(cache):
        pool[slot] = value


def found(cache: PagedCache, slot: int) -> set[float]:
    return {v for pool in pools(cache) for v in pool[slot].flatten().tolist()}


def test_slots_keep_their_states_while_others_come_and_go():
    cache = stateful()
    assert all(len(pool) == 0 for pool in pools(cache)), "nothing is kept before it is needed"
    slots = []
    for value in range(1, 6):
        slots.append(cache.allocate_slot())
        assert found(cache, slots[-1]) == {0.0}
        fill(cache, slots[-1], value)
    assert len(set(slots)) == 5 and [found(cache, slot) for slot in slots] == [{float(v)} for v in range(1, 6)]
    assert [(pool.shape[1:], pool.dtype) for pool in pools(cache)] == [s for layer in STATES for s in layer.values()]
    cache.free_slot(slots[1])
    cache.free_slot(slots[3])
    size = len(pools(cache)[0])
    again = [cache.allocate_slot() for _ in range(2)]
    assert set(again) <= set(range(size)) and len(pools(cache)[0]) == size, "places are used again"
    assert all(found(cache, slot) == {0.0} for slot in again), "a sequence starts from zeros"
    assert [found(cache, slots[i]) for i in (0, 2, 4)] == [{1.0}, {3.0}, {5.0}]


def test_a_slot_cannot_be_freed_twice():
    cache = stateful()
    slot = cache.allocate_slot()
    cache.free_slot(slot)
    for wrong in (slot, 99):
        with pytest.raises(ValueError, match="not in use"):
            cache.free_slot(wrong)


def test_a_snapshot_outlives_what_happens_to_its_slot():
    cache = stateful()
    first = cache.allocate_slot()
    fill(cache, first, 7)
    kept = cache.snapshot(first)
    fill(cache, first, 8)
    second, third = cache.allocate_slot(), cache.allocate_slot()  # the pools are other ones now
    cache.restore(second, kept)
    assert [found(cache, slot) for slot in (first, second, third)] == [{8.0}, {7.0}, {0.0}]
    cache.restore(first, kept)
    assert found(cache, first) == {7.0}


def test_states_larger_than_the_memory():
    cache = PagedCache([{}], 1, 4, torch.device("cpu"), torch.float32, [{"memory": ((1 << 46,), torch.float32)}])
    with pytest.raises(ResourceError, match="The states of 1 sequences take [0-9.]+ GB, which the device does not have"):
        cache.allocate_slot()
    assert len(pools(cache)[0]) == 0


def test_a_layout_names_the_slot_of_every_sequence():
    cache = stateful()
    assert sorted(cache.allocate_slot() for _ in range(3)) == [0, 1, 2]
    build = {"new": [[7], [], [5]], "past": [3, 2, 0], "block_tables": [[4], [0], [3]]}
    assert cache.layout(Batch.build(**build, slots=(2, 0, 1))).states.tolist() == [2, 0, 1]
    for slots in ((), (2, 0), (2, 0, 2), (0, 1, 2, 3), (2, 0, 3), (2, 0, -1)):  # of which 3 is not taken
        with pytest.raises(ValueError, match="3 sequences need a state slot each"):
            cache.layout(Batch.build(**build, slots=slots))
    assert make().layout(Batch.build(**build)).states is None, "nobody asks where nothing is kept"


def test_slots_cost_nothing_where_nothing_is_kept():
    cache = make()
    slots = [cache.allocate_slot() for _ in range(3)]
    assert len(set(slots)) == 3 and not pools(cache) and cache.snapshot(slots[0]) == []
    cache.restore(slots[1], [])
    for slot in slots:
        cache.free_slot(slot)
