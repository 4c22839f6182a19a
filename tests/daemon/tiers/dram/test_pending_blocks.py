"""Long chains of blocks that are being stored: published and dropped in slices, and right in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, finish
from chains import chain_of

from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.pending_blocks import BLOCKS_AT_ONCE, PendingBlocks
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import MAX_RESERVE, REGION_SHIFT, BlockState, CommitState

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


def test_a_region_that_is_emptied_costs_only_what_is_written_there_without_the_mapping() -> None:
    """And what hangs below that."""
    h, remote = CacheRig(regions=2), Owner(b"r" * 16, mapped=False)
    namespace, writers = h.space(), [h.owner, remote, h.owner, remote, h.owner]
    chains = [chain_of(tag, 3) for tag in range(4)]
    below = chain_of("below", 2)
    stores = [
        h.cache.reserve(owner, namespace, chains[1][-16:] if keys is below else b"", keys, 10)
        for owner, keys in zip(writers, [*chains, below], strict=True)
    ]
    regions = [{frame >> REGION_SHIFT for frame in got.frames} for got in stores]
    assert (regions[0], regions[1], regions[3]) == ({0}, {0}, {1})
    for got in (stores[1], stores[3]):
        for number in range(3):
            block = h.cache.writes.writable_block(remote, got.lease_id, number)
            assert block is not None
            block.written = FRAME_BYTES
    h.cache.writes.pending.take_back(0)
    finish(h)
    assert h.cache.space.allocator.used_bytes == (3 * 3 + 2) * FRAME_BYTES, "writers with the mapping may still write"
    states = [
        set(h.cache.writes.commit(owner, got.lease_id, range(len(got.frames))))
        for owner, got in zip(writers, stores, strict=True)
    ]
    assert states == [{CommitState.VISIBLE if number not in (1, 4) else CommitState.DROPPED} for number in range(5)]
    finish(h)


def test_a_frame_has_one_owner_whatever_events_raise() -> None:
    h = CacheRig(regions=2)
    space = h.space()

    class Failing:
        dram = 0

        def arrived(self, *told: object) -> None:
            raise ZeroDivisionError

    h.cache.writes.pending._events = Failing()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        h.store(space, chain_of(1, 4))
    h.check()
    assert h.length(space, chain_of(1, 4)) == 4


@pytest.mark.parametrize("branch_first", [True, False])
def test_a_branch_below_the_middle_of_what_is_being_stored_hangs_below_that_block(branch_first: bool) -> None:
    h, chain = CacheRig(regions=4), chain_of(1, 6)
    space, branch = h.space(), chain_of("branch", 2, after=chain[: 3 * 16])
    main = h.cache.reserve(h.owner, space, b"", chain, 10)
    below = h.cache.reserve(h.owner, space, chain[2 * 16 : 3 * 16], branch[3 * 16 :], 10)
    assert (len(main.frames), len(below.frames)) == (6, 2)
    if branch_first:
        assert set(h.cache.writes.commit(h.owner, below.lease_id, range(2))) == {CommitState.HELD}
    # In two parts, the middle one last.
    assert set(h.cache.writes.commit(h.owner, main.lease_id, [5, 4, 0, 1])) == {CommitState.HELD, CommitState.VISIBLE}
    h.check()
    assert h.length(space, chain) == 2
    assert set(h.cache.writes.commit(h.owner, main.lease_id, [2, 3])) == {CommitState.VISIBLE}
    finish(h)
    assert (h.length(space, chain), h.length(space, branch)) == (6, 5 if branch_first else 3)
    if not branch_first:
        h.cache.writes.fail(h.owner, below.lease_id, 1)
        assert h.cache.writes.commit(h.owner, below.lease_id, [0]) == [CommitState.VISIBLE]
        assert h.length(space, branch) == 4
    h.check()
    assert not h.cache.writes.pending.by_key


def test_a_copy_that_fails_in_the_middle_costs_those_after_it_and_no_frame() -> None:
    h, chain = CacheRig(regions=4), chain_of(1, 6)
    space = h.space()
    got = h.cache.reserve(h.owner, space, b"", chain, 10)
    h.cache.writes.fail(h.owner, got.lease_id, 3)
    assert h.cache.space.allocator.used_bytes == 5 * FRAME_BYTES, "others may still be written to"
    h.check()
    states = h.cache.writes.commit(h.owner, got.lease_id, range(6))
    assert states == [CommitState.VISIBLE] * 3 + [CommitState.DROPPED] * 3
    assert h.cache.space.allocator.used_bytes == 3 * FRAME_BYTES
    assert h.store(space, chain) == [BlockState.HAVE] * 3 + [BlockState.FRAME] * 3
    h.check()
