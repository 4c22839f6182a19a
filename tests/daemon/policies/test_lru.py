"""The order in which candidates go."""

from __future__ import annotations

from tiercache.daemon.index.policy import NO_ENTRY, USED, Columns
from tiercache.daemon.policies.lru import LeafLRU


def policy(entries: int) -> LeafLRU:
    columns = Columns()
    columns.grow(entries)
    return LeafLRU(columns)


def eat(lru: LeafLRU) -> list[int]:
    """All candidates, in the order in which they are evicted."""
    eaten = []
    while (victim := lru.victim()) != NO_ENTRY:
        lru.remove(victim)
        eaten.append(victim)
    return eaten


def test_numbers_of_empty_buckets_do_not_pile_up() -> None:
    lru = policy(1)
    lru.inserted(0)
    lru.add(0)
    for _ in range(64 * 1000):
        lru.touched(0, USED)
    assert len(lru._order) < 200
    assert lru.coldest_stamp() == 64_001
    assert eat(lru) == [0]
    assert lru.coldest_stamp() is None
