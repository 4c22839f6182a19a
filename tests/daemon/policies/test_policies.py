"""What all eviction policies owe the index, checked on those of the daemon, and what LRU keeps beside that."""

from __future__ import annotations

import pytest
from policy_rules import first_to_go_of_an_earlier_life, keeps_the_index_whole

from tiercache.daemon.index.policy import USED, Columns
from tiercache.daemon.policies import POLICIES
from tiercache.daemon.policies.lru import LeafLRU


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_index_stays_whole_whatever_happens(policy: str, seed: int) -> None:
    keeps_the_index_whole(POLICIES[policy], seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_an_earlier_life_go_as_others_do(policy: str) -> None:
    assert first_to_go_of_an_earlier_life(POLICIES[policy]) == 9, "the last block of the oldest chain"


def test_numbers_of_empty_buckets_do_not_pile_up() -> None:
    columns = Columns()
    columns.grow(1)
    lru = LeafLRU(columns)
    lru.inserted(0)
    lru.add(0)
    for _ in range(64 * 1000):
        lru.touched(0, USED)
    assert len(lru._order) < 200
    assert lru.coldest_stamp() == 64_001
    assert lru.victim() == 0
    lru.remove(0)
    assert lru.coldest_stamp() is None
