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


def test_the_longest_unused_goes_first() -> None:
    lru = policy(200)
    for entry in range(200):
        lru.inserted(entry)
        lru.add(entry)
    for entry in (0, 70, 199):
        lru.touched(entry, USED)
    assert eat(lru) == [entry for entry in range(200) if entry not in (0, 70, 199)] + [0, 70, 199]


def test_a_parent_follows_its_last_child_before_others_of_that_age() -> None:
    lru = policy(10)
    parent, child, stranger = 0, 1, 2
    for entry in (parent, child, stranger):
        lru.inserted(entry)
    lru.add(child)
    lru.add(stranger)
    lru.replaced(parent, child)
    assert eat(lru) == [parent, stranger]


def test_a_parent_used_later_than_its_child_keeps_its_own_age() -> None:
    lru = policy(300)
    parent, child = 298, 299
    lru.inserted(child)
    lru.add(child)
    for entry in range(100):
        lru.inserted(entry)
        lru.add(entry)
    lru.inserted(parent)
    lru.replaced(parent, child)
    assert eat(lru) == [*range(100), parent]


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
