"""Room for blocks: no request takes more than a bounded number of steps to make it."""

from __future__ import annotations

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, finish
from chains import chain_of

from tiercache.daemon.index import entries
from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.space import ROOM_STEPS
from tiercache.protocol.messages import BlockState

BLOCKS = 6000


@pytest.mark.parametrize("what", ["flushed by others", "still being read"])
def test_a_store_makes_room_of_a_part_of_what_there_is(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Frames of blocks that are being read are not free at once."""
    h = CacheRig(regions=2, region_bytes=BLOCKS // 2 * FRAME_BYTES)
    small, large = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES)
    keys, held = fill(h, small, 1, BLOCKS), list[int]()
    allocator, index = h.cache.space.allocator, h.cache.space.index
    unlinked, wanted = counted(monkeypatch, Index, "_unlink"), large
    if what == "flushed by others":
        h.cache.flush_dram([small.number], b"")
    else:
        held = [index.frame[small.table.get(keys[at : at + 16])] for at in range(0, len(keys), 16)]
        allocator.hold_many(held)
        wanted = small
    unlinked()
    assert h.cache.reserve(h.owner, wanted, b"", chain_of(2, 1), 10).states == [BlockState.NONE]
    assert 0 < unlinked() + h.cache.counters.evicted_blocks <= ROOM_STEPS
    allocator.unhold_many(held)
    finish(h)
    assert h.cache.reserve(h.owner, wanted, b"", chain_of(2, 1), 10).states == [BlockState.FRAME]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_store_under_a_quota_evicts_a_part_of_many_small_blocks(
    monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """Or unlinks it."""
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES, regions=2, quota={"t": BLOCKS * FRAME_BYTES})
    small, large = h.space(tenant="t"), h.space(rank=1, tenant="t", block_bytes=BLOCKS * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    unlinked, evicted = counted(monkeypatch, Index, "_unlink"), 0
    if flushed:
        h.cache.flush_dram([small.number], b"")
        unlinked()
    for _ in range(20):
        states = h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states
        gone = h.cache.counters.evicted_blocks - evicted
        evicted += gone
        assert max(gone, unlinked() - gone) <= ROOM_STEPS
        if states == [BlockState.FRAME]:
            break
    assert states == [BlockState.FRAME]
    assert flushed or evicted == BLOCKS
    finish(h)


def test_blocks_of_another_size_get_no_region_that_a_pin_keeps() -> None:
    """A pin holds the last block of its chain, and the regions of those before it."""
    h = CacheRig(regions=2, pin_share=1.0)
    small, large, pinned = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES), chain_of(1, 10)
    h.store(small, chain_of(2, 1))  # the coldest, in one region with the first of those
    h.store(small, pinned)
    for _ in range(2):  # the second takes the place of the first
        assert h.cache.pin([small], pinned, 60.0) == 10
    for kept in (True, False):
        states = [h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10).states for _ in range(2)]
        finish(h)
        assert (h.length(small, pinned) == 10) == kept
        assert ([BlockState.FRAME] in states) != kept
        h.cache.reads.pins.unpin([small], pinned)


def test_where_the_coldest_region_is_kept_another_one_is_emptied() -> None:
    h = CacheRig(regions=3, pin_share=1.0)
    small, large, pinned = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES), chain_of(1, 7)
    for chain in (
        chain_of(2, 1),
        pinned,
        chain_of(4, 16),
    ):  # the first is the coldest, and shares a region with the pin
        h.store(small, chain)
    assert h.cache.pin([small], pinned, 60.0) == 7
    states = []
    for _ in range(4):
        states += h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10).states
        finish(h)
    assert BlockState.FRAME in states
    assert h.length(small, pinned) == 7


def test_a_region_is_emptied_of_its_own_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free frames in it are not blocks, not even the last one of the index."""
    monkeypatch.setattr(entries, "_GROW_ENTRIES", 1)
    h = CacheRig(regions=2)
    small, *others = (h.space(rank=rank, block_bytes=(rank + 1) * FRAME_BYTES) for rank in range(3))
    chain = chain_of(1, 2)
    h.store(small, chain)
    h.store(others[1], chain)
    assert h.cache.reserve(h.owner, others[0], b"", chain, 10).states == [BlockState.FRAME] * 2
    assert (h.length(small, chain), h.length(others[1], chain)) == (0, 2)
    finish(h)


def test_what_is_refused_while_memory_is_still_coming_is_counted_apart() -> None:
    h = CacheRig(quota={"t": FRAME_BYTES})
    h.cache.space.populating = True
    counters = h.cache.counters

    def refused(tenant: str, number: int) -> int:
        h.cache.reserve(h.owner, h.space(tenant=tenant), b"", chain_of(number, 12), 10)
        return counters.refused_blocks

    assert refused("t", 1) == 11
    by_quota, early = counters.refused_by_quota_blocks, counters.refused_populating_blocks
    assert (by_quota + early, by_quota > 0, early > 0) == (11, True, True)
    h.cache.space.populating = False
    assert refused("", 2) > 11
    assert counters.refused_populating_blocks == early
