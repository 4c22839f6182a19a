"""Room for blocks: no request takes more than a bounded number of steps to make it."""

from __future__ import annotations

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, finish
from chains import chain_of

from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.space import ROOM_STEPS
from tiercache.protocol.messages import BlockState

BLOCKS = 6000


def test_a_store_unlinks_a_part_of_what_others_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(regions=2, region_bytes=BLOCKS // 2 * FRAME_BYTES)
    small, large = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    unlinked = counted(monkeypatch, Index, "_unlink")
    h.cache.flush_dram([small.number], b"")
    unlinked()
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.NONE]
    assert 0 < unlinked() <= ROOM_STEPS
    assert small.table.unlinking
    finish(h)
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.FRAME]


def test_a_store_under_a_quota_evicts_a_part_of_many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES, regions=2, quota={"t": BLOCKS * FRAME_BYTES})
    small, large = h.space(tenant="t"), h.space(rank=1, tenant="t", block_bytes=BLOCKS * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    evicted = 0
    for _ in range(20):
        states = h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states
        gone = h.cache.counters.evicted_blocks - evicted
        evicted += gone
        assert gone <= ROOM_STEPS
        if states == [BlockState.FRAME]:
            break
    assert states == [BlockState.FRAME]
    assert evicted == BLOCKS
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
