"""What the least-recently-used order keeps beside its candidates."""

from __future__ import annotations

from tiercache.daemon.index.policy import USED, Columns
from tiercache.daemon.policies.lru import LeafLRU


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
