"""The block manager: small pools, exact block ids."""

from __future__ import annotations

from collections import Counter

import pytest

from tiercache.engine.blocks import BlockManager
from tiercache.protocol.keys import KeyChain, root_key

pytestmark = pytest.mark.engine
ROOT = root_key("blocks")


def chain_of(blocks: int, seed: int = 0) -> KeyChain:
    return KeyChain(ROOT, 2, [seed, *range(1, 2 * blocks)])


def fill(blocks: BlockManager, chain: KeyChain) -> list[int]:
    """Allocate, fill and register all blocks of a chain."""
    taken = blocks.allocate(len(chain))
    assert taken is not None
    for index, block_id in enumerate(taken):
        assert blocks.register(block_id, chain, index)
    return taken


def test_evicts_the_least_recently_used_chain_from_its_tail() -> None:
    blocks = BlockManager(6)
    old, new = chain_of(3, seed=1), chain_of(3, seed=2)
    for chain in (old, new):
        blocks.release(fill(blocks, chain))
    assert blocks.allocate(2) == [2, 1]
    assert (len(blocks.find(old, range(3))), len(blocks.find(new, range(3)))) == (1, 3)
    assert blocks.evictions == 2
    blocks.check_integrity(Counter([1, 2]))


def test_dirty_runs_begin_where_the_chain_was_stored_and_do_not_overlap() -> None:
    blocks = BlockManager(8, write_back=True)
    short = KeyChain(ROOT, 2, range(4))
    long = KeyChain(ROOT, 2, range(8))
    taken = fill(blocks, short)
    blocks.mark_stored(taken[:1])
    more = blocks.allocate(2) or []
    for index, block_id in zip((2, 3), more, strict=True):
        blocks.register(block_id, long, index)
    other = KeyChain(ROOT, 2, [*range(4), 9, 9])
    [branch] = blocks.allocate(1) or []
    blocks.register(branch, other, 2)
    blocks.release(more)
    blocks.release([branch])
    blocks.release(taken)
    runs = [(origin.position, run) for origin, run in blocks.dirty_blocks(8)]
    assert runs == [(1, [taken[1], *more]), (2, [branch])]
