"""Nothing that a client can ask for takes more than a bounded number of steps in one go: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_cache_edges import FRAME_BYTES, Harness, chain

from tiercache.daemon.index import Index
from tiercache.daemon.reads import Reads
from tiercache.daemon.space import ROOM_STEPS, SLICE
from tiercache.messages import BlockState

BLOCKS = 6000


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Callable[[], int]:
    """How often these methods of a class were called since this was asked the last time."""
    calls = 0
    for name in names:
        method = getattr(owner, name)

        def call(*arguments: Any, _method: Callable[..., Any] = method, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return _method(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    def since() -> int:
        nonlocal calls
        asked, calls = calls, 0
        return asked

    return since


def fill(h: Harness, namespace: Any, tag: int, blocks: int) -> bytes:
    """A chain of so many blocks."""
    keys = chain(tag, blocks)
    for first in range(0, blocks, 500):
        parent = keys[16 * (first - 1) : 16 * first] if first else b""
        h.store(namespace, keys[16 * first : 16 * min(first + 500, blocks)], parent)
    return keys


def finish(h: Harness) -> None:
    while h.cache.work():
        pass
    h.check()


def test_a_store_unlinks_a_part_of_what_others_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(regions=2, region_bytes=BLOCKS // 2 * FRAME_BYTES)
    small, large = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    unlinked = counted(monkeypatch, Index, "_unlink")
    h.cache.flush([small.number], b"")
    unlinked()
    assert h.cache.reserve(h.owner, large, b"", chain(2, 1), 10).states == [BlockState.NONE]
    assert 0 < unlinked() <= ROOM_STEPS
    assert small.table.unlinking
    finish(h)
    assert h.cache.reserve(h.owner, large, b"", chain(2, 1), 10).states == [BlockState.FRAME]


def test_a_store_into_what_was_flushed_finds_room_at_once() -> None:
    h = Harness(region_bytes=BLOCKS * FRAME_BYTES)
    namespace = h.space()
    fill(h, namespace, 1, BLOCKS)
    h.cache.flush([namespace.number], b"")
    h.store(namespace, chain(2, 500))
    finish(h)


def test_a_store_under_a_quota_evicts_a_part_of_many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(region_bytes=BLOCKS * FRAME_BYTES, regions=2, quota={"t": BLOCKS * FRAME_BYTES})
    small, large = h.space(tenant="t"), h.space(rank=1, tenant="t", block_bytes=BLOCKS * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    evicted = 0
    for _ in range(20):
        states = h.cache.reserve(h.owner, large, b"", chain(2, 1), 10).states
        gone = h.cache.counters.evicted_blocks - evicted
        evicted += gone
        assert gone <= ROOM_STEPS
        if states == [BlockState.FRAME]:
            break
    assert states == [BlockState.FRAME]
    assert evicted == BLOCKS
    finish(h)


def test_a_flush_looks_at_a_part_of_the_leases_and_revokes_all_that_lost_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = Harness(region_bytes=4000 * FRAME_BYTES)
    namespace = h.space()
    keys, other = fill(h, namespace, 1, 3000), fill(h, namespace, 2, 10)
    lost = [h.cache.match(h.owner, [namespace], keys[: 16 * (n + 1)], 10).lease for n in range(1500)]
    kept = [h.cache.match(h.owner, [namespace], other, 10).lease for _ in range(1500)]
    attached = counted(monkeypatch, Index, "attached")
    h.cache.flush([namespace.number], keys[:16])
    assert attached() <= SLICE
    assert all(lease is not None and not h.cache.reads.release(h.owner, lease.lease_id) for lease in lost[:50])
    assert all(lease is not None and h.cache.reads.release(h.owner, lease.lease_id) for lease in kept[:50])
    ended = counted(monkeypatch, Reads, "_end")
    while h.cache.work():
        assert ended() <= SLICE
    h.check()
    assert set(h.cache.reads.leases) == {lease.lease_id for lease in kept[50:] if lease is not None}


def test_what_hangs_below_a_dropped_block_is_out_of_sight_while_it_is_being_unlinked() -> None:
    h = Harness(region_bytes=BLOCKS * FRAME_BYTES)
    namespace = h.space()
    keys = fill(h, namespace, 1, 5000)
    lease = h.cache.match(h.owner, [namespace], keys, 10).lease
    assert lease is not None
    h.cache.flush([namespace.number], keys[16 * 100 : 16 * 101])
    assert namespace.table.unlinking
    for asked, found in ((5000, 100), (101, 100), (100, 100), (50, 50)):
        assert h.cache.match(h.owner, [namespace], keys[: 16 * asked], 0).dram == found
        assert h.cache.peek([namespace], keys[: 16 * asked])[0] == found
    assert h.cache.reads.find(h.owner, lease.lease_id) is None
    finish(h)
    assert not h.cache.reads.leases
