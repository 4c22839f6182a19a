"""Long chains of blocks that are being stored: published and dropped in slices, and right in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, finish
from chains import chain_of

from tiercache.daemon.tiers import store_leases
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.pending_blocks import BLOCKS_AT_ONCE, PendingBlocks
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.dram.writes import Writes
from tiercache.daemon.tiers.store_leases import LEASE_STEPS
from tiercache.protocol.messages import MAX_RESERVE, BlockState, CommitState

BLOCKS = 6000


def waiting(fan: int = 1) -> tuple[CacheRig, Namespace, bytes, list[int]]:
    """A chain that is complete but for its first block; `fan` above 1 makes as many chains below that block."""
    h = CacheRig(region_bytes=2 * BLOCKS * FRAME_BYTES)
    namespace, leases = h.space(), list[int]()
    first = chain_of(1, MAX_RESERVE)
    leases.append(h.cache.reserve(h.owner, namespace, b"", first, 10).lease_id)
    keys = first
    for tag in range(2, 2 + fan):
        parent, its = first[-16:], chain_of(tag, BLOCKS // fan)
        keys += its
        for at in range(0, len(its), 16 * MAX_RESERVE):
            part = its[at : at + 16 * MAX_RESERVE]
            got = h.cache.reserve(h.owner, namespace, parent, part, 10)
            states = h.cache.writes.commit(h.owner, got.lease_id, range(len(part) // 16))
            assert set(states) == {CommitState.HELD}
            parent = part[-16:]
    h.check()
    return h, namespace, keys, leases


def worked(h: CacheRig, calls: Callable[[], int]) -> int:
    """Do all deferred work; returns the most calls in one slice."""
    most = calls()
    while True:
        more = h.cache.work()
        most = max(most, calls())
        h.check()
        if not more:
            return most


@pytest.mark.parametrize("fan", [1, 40])
def test_what_waits_for_a_block_is_published_in_slices(monkeypatch: pytest.MonkeyPatch, fan: int) -> None:
    h, namespace, keys, (lease,) = waiting(fan)
    shown = counted(monkeypatch, PendingBlocks, "_show")
    assert set(h.cache.writes.commit(h.owner, lease, range(MAX_RESERVE))) == {CommitState.VISIBLE}
    assert namespace.table.blocks < MAX_RESERVE + BLOCKS
    assert 0 < worked(h, shown) <= BLOCKS_AT_ONCE + MAX_RESERVE
    assert namespace.table.blocks == MAX_RESERVE + BLOCKS // fan * fan
    assert not h.cache.writes.pending.by_key
    if fan == 1:
        assert h.cache.match(h.owner, [namespace], keys, 0).dram == MAX_RESERVE + BLOCKS


@pytest.mark.parametrize("fan", [1, 40])
@pytest.mark.parametrize("how", ["abort", "flush", "flush_key", "expiry", "session"])
def test_what_hangs_below_a_lost_block_is_dropped_in_slices(
    monkeypatch: pytest.MonkeyPatch, fan: int, how: str
) -> None:
    h, namespace, keys, (lease,) = waiting(fan)
    dropped = counted(monkeypatch, PendingBlocks, "drop")
    if how == "abort":
        h.cache.writes.abort(h.owner, lease, finished=True)
    elif how == "flush":
        h.cache.flush_dram([namespace.number], b"")
    elif how == "flush_key":
        h.cache.flush_dram([namespace.number], keys[:16])
    elif how == "expiry":
        h.now_s += 11
        h.cache.expire()
    else:
        h.cache.process_gone(h.owner)
    assert h.cache.writes.pending.by_key
    assert h.cache.match(h.owner, [namespace], keys, 0).dram == 0
    assert 0 < worked(h, dropped) <= BLOCKS_AT_ONCE + MAX_RESERVE
    assert not h.cache.writes.pending.by_key
    assert set(h.cache.writes.commit(h.owner, lease, range(MAX_RESERVE))) == {CommitState.DROPPED}
    finish(h)
    assert h.cache.space.allocator.used_bytes == 0
    h.store(namespace, chain_of(1, 3))
    assert h.cache.match(h.owner, [namespace], chain_of(1, 3), 0).dram == 3


def test_a_flush_drops_what_is_about_to_be_published() -> None:
    h, namespace, keys, (lease,) = waiting()
    h.cache.writes.commit(h.owner, lease, range(MAX_RESERVE))
    published = namespace.table.blocks
    assert published < BLOCKS
    h.cache.flush_dram([namespace.number], b"")
    finish(h)
    assert (namespace.table.blocks, h.cache.space.allocator.used_bytes) == (0, 0)
    assert h.cache.match(h.owner, [namespace], keys, 0).dram == 0


def test_what_is_stored_below_a_block_that_is_to_be_dropped_is_dropped_too() -> None:
    h, namespace, keys, (lease,) = waiting()
    h.cache.writes.abort(h.owner, lease, finished=True)
    assert (namespace.number, keys[-16:]) in h.cache.writes.pending.by_key
    late = h.cache.reserve(h.owner, namespace, keys[-16:], chain_of(9, 3), 10)
    assert late.states == [BlockState.FRAME] * 3
    states = h.cache.writes.commit(h.owner, late.lease_id, range(3))
    assert CommitState.VISIBLE not in states
    assert h.cache.reserve(h.owner, namespace, keys[-32:-16], keys[-16:], 10).states != [BlockState.FRAME]
    finish(h)
    assert h.cache.space.index.invariant_failures == 0
    assert h.cache.space.allocator.used_bytes == 0


def test_leases_with_many_blocks_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    h, leases = CacheRig(region_bytes=2 * BLOCKS * FRAME_BYTES), 12
    namespace = h.space()
    for tag in range(leases):
        h.cache.reserve(h.owner, namespace, b"", chain_of(tag, MAX_RESERVE), 10)
    dropped, given_back = counted(monkeypatch, PendingBlocks, "drop"), counted(monkeypatch, Writes, "_give_back")
    h.cache.session_lost(h.owner)
    assert 0 < worked(h, dropped) < BLOCKS_AT_ONCE + MAX_RESERVE
    h.cache.process_gone(h.owner)
    assert 0 < worked(h, given_back) < BLOCKS_AT_ONCE + MAX_RESERVE
    finish(h)
    assert h.cache.space.allocator.used_bytes == 0


def test_many_leases_of_a_session_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_leases, "PLACES_AT_ONCE", 4 * (LEASE_STEPS + 2))
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    namespace, other = h.space(), Owner(b"b" * 16)
    for tag in range(50):
        h.cache.reserve(h.owner, namespace, b"", chain_of(tag, 2), 10)
    kept = h.cache.reserve(other, namespace, b"", chain_of(99, 1), 10)
    given_up = counted(monkeypatch, Writes, "give_up")
    h.cache.session_lost(h.owner)
    assert h.cache.has_quarantine(h.owner)
    assert 0 < worked(h, given_up) <= 4
    assert len(h.cache.writes.quarantined) == 50
    finished = counted(monkeypatch, Writes, "finish")
    h.cache.process_gone(h.owner)
    assert 0 < worked(h, finished) <= 4
    assert not h.cache.writes.quarantined
    assert not h.cache.has_quarantine(h.owner)
    assert h.cache.writes.commit(other, kept.lease_id, [0]) == [CommitState.VISIBLE]
    finish(h)


def test_leases_that_expire_together_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_leases, "PLACES_AT_ONCE", 4 * (LEASE_STEPS + 1))
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    namespace = h.space()
    h.store(namespace, chain_of(1, 1))
    reads = [h.cache.match(h.owner, [namespace], chain_of(1, 1), 5).lease for _ in range(1500)]
    for tag in range(2, 22):
        h.cache.reserve(h.owner, namespace, b"", chain_of(tag, 1), 5)
    h.now_s = 6
    counts = []
    while h.cache.reads.leases or h.cache.writes.leases:
        before = len(h.cache.reads.leases), len(h.cache.writes.leases)
        h.cache.expire()
        counts.append((before[0] - len(h.cache.reads.leases), before[1] - len(h.cache.writes.leases)))
        h.check()
    assert max(writes for _, writes in counts) <= 4
    assert max(reads for reads, _ in counts) < 1500
    assert all(lease is not None and lease.over for lease in reads)


@pytest.mark.parametrize("gone", [False, True])
def test_leases_that_others_end_between_two_slices_keep_nothing_back(
    monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(store_leases, "PLACES_AT_ONCE", 4 * (LEASE_STEPS + 1))
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    namespace, same = h.space(), Owner(h.owner.instance)
    leases = [h.cache.reserve(h.owner, namespace, b"", chain_of(tag, 1), 10).lease_id for tag in range(30)]
    (h.cache.process_gone if gone else h.cache.session_lost)(h.owner)
    states = [h.cache.writes.commit(same, lease, [0])[0] for lease in leases[::2]]
    assert CommitState.VISIBLE in states
    while h.cache.work():
        pass
    h.cache.process_gone(h.owner)
    finish(h)
    assert not h.cache.has_quarantine(h.owner)
    assert h.cache.space.allocator.used_bytes == states.count(CommitState.VISIBLE) * FRAME_BYTES


def test_flushes_remember_no_more_than_what_is_pending() -> None:
    h, _, keys, _ = waiting()
    other = h.space(rank=1)
    for number in range(20):
        h.cache.reserve(h.owner, other, b"", chain_of(number, 1), 10)
        h.cache.flush_dram([other.number], b"")
        assert sum(map(len, h.cache.writes.pending._flushed)) <= 1
    assert len(h.cache.writes.pending.by_key) == len(keys) // 16
    finish(h)
