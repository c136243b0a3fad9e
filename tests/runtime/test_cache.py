"""Blocks are never in two hands, and every token lands where its sequence's table says."""

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
