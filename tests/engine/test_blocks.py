"""The block manager: small pools, exact block ids."""

from __future__ import annotations

import random
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


def test_allocates_runs_and_all_or_nothing() -> None:
    blocks = BlockManager(6)
    assert blocks.allocate(3) == [0, 1, 2]
    assert blocks.allocate(2) == [3, 4]
    assert blocks.allocate(2) is None
    assert blocks.clean_count == 1
    blocks.release([0, 1, 2])
    assert blocks.allocate(1, after=4) == [5]
    assert blocks.allocate(3) == [0, 1, 2]
    blocks.check_integrity(Counter(range(6)))


def test_a_hit_takes_blocks_out_of_the_free_queue() -> None:
    blocks = BlockManager(4)
    chain = chain_of(3)
    taken = fill(blocks, chain)
    blocks.release(taken)
    assert blocks.find(chain, range(3)) == taken
    assert blocks.find(chain, range(2)) == taken[:2]
    blocks.hold(taken[:2])
    assert blocks.clean_count == 2
    assert blocks.allocate(2) == [3, 2]  # the blank one first, then the idle one
    assert blocks.find(chain, range(3)) == taken[:2]
    blocks.check_integrity(Counter([0, 1, 2, 3]))


def test_evicts_the_least_recently_used_chain_from_its_tail() -> None:
    blocks = BlockManager(6)
    old, new = chain_of(3, seed=1), chain_of(3, seed=2)
    for chain in (old, new):
        blocks.release(fill(blocks, chain))
    assert blocks.allocate(2) == [2, 1]
    assert (len(blocks.find(old, range(3))), len(blocks.find(new, range(3)))) == (1, 3)
    assert blocks.evictions == 2
    blocks.check_integrity(Counter([1, 2]))


def test_the_same_block_twice_is_cached_once() -> None:
    blocks = BlockManager(4)
    chain = chain_of(1)
    [first] = fill(blocks, chain)
    [second] = blocks.allocate(1) or []
    assert not blocks.register(second, chain, 0)
    assert blocks.block_of(chain.key(0)) == first
    blocks.release([second])
    blocks.release([first])
    assert blocks.allocate(1) == [second]  # it holds nothing of value
    blocks.check_integrity(Counter([second]))


def test_write_back_gives_out_only_what_was_stored() -> None:
    blocks = BlockManager(4, write_back=True)
    chain = chain_of(3)
    taken = fill(blocks, chain)
    blocks.release(taken)
    assert blocks.clean_count == 1
    assert blocks.idle_count == 4
    assert blocks.allocate(2) is None
    [(origin, run)] = blocks.dirty_blocks(1)
    assert (origin.chain, origin.position, run) == (chain, 0, taken)  # its parents go with it
    blocks.hold(run)
    blocks.mark_stored(run)
    blocks.release(run)
    assert blocks.dirty_blocks(1) == []
    assert blocks.allocate(2) == [3, 2]
    blocks.check_integrity(Counter([2, 3]))


def test_dirty_runs_begin_where_the_chain_was_stored_and_do_not_overlap() -> None:
    blocks = BlockManager(8, write_back=True)
    short = KeyChain(ROOT, 2, range(4))
    long = KeyChain(ROOT, 2, range(8))
    taken = fill(blocks, short)
    blocks.mark_stored(taken[:1])
    more = blocks.allocate(2) or []
    for index, block_id in zip((2, 3), more, strict=True):
        blocks.register(block_id, long, index)
    blocks.release(more)
    blocks.release(taken)
    runs = [(origin.position, run) for origin, run in blocks.dirty_blocks(8)]
    assert runs == [(1, [taken[1], *more])]


def test_forgetting_all_leaves_used_blocks_alone() -> None:
    blocks = BlockManager(3, write_back=True)
    chain = chain_of(2)
    taken = fill(blocks, chain)
    blocks.release(taken[1:])
    blocks.forget_all()
    assert blocks.find(chain, range(2)) == []
    assert blocks.clean_count == 2
    blocks.check_integrity(Counter(taken[:1]))


def test_integrity_check_finds_a_lost_reference() -> None:
    blocks = BlockManager(2)
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="block 0 has 1 references, its owners hold 0"):
        blocks.check_integrity(Counter())
    with pytest.raises(AssertionError, match="released but not held"):
        blocks.release([1])


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_the_books_straight(seed: int) -> None:
    choose = random.Random(seed)
    blocks = BlockManager(12, write_back=seed % 2 == 1)
    owned: list[list[int]] = []
    for _ in range(200):
        chain = chain_of(choose.randint(1, 4), seed=choose.randrange(4))
        action = choose.random()
        if action < 0.5:
            found = blocks.find(chain, range(len(chain)))
            blocks.hold(found)
            new = blocks.allocate(len(chain) - len(found))
            if new is None:
                blocks.release(found)
            else:
                for index in range(len(found), len(chain)):
                    blocks.register(new[index - len(found)], chain, index)
                owned.append(found + new)
        elif action < 0.9 and owned:
            blocks.release(owned.pop(choose.randrange(len(owned))))
        else:
            for _, run in blocks.dirty_blocks(2):
                blocks.hold(run)
                blocks.mark_stored(run)
                blocks.release(run)
        blocks.check_integrity(Counter(block_id for table in owned for block_id in table))
