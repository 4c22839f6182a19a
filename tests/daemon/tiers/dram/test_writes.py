"""Commits that publish much: in slices, and answered once their blocks are visible."""

from __future__ import annotations

import pytest
from cache_rig import FRAME_BYTES, CacheRig, finish
from chains import chain_of

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.pending_blocks import RUN_BLOCKS
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.dram.writes import VISIBLE_WITHIN_S
from tiercache.protocol.messages import MAX_RESERVE, CommitState

VISIBLE, DROPPED = [CommitState.VISIBLE] * MAX_RESERVE, [CommitState.DROPPED] * MAX_RESERVE
KEYS = chain_of(1, MAX_RESERVE)


def slow(h: CacheRig) -> tuple[Namespace, int, Steps[list[CommitState]]]:
    """Begin a commit whose first slice ends after some blocks; returns its namespace, lease and other slices."""
    h.cache.writes.pending.publish_ns = 0
    namespace = h.space()
    lease = h.cache.reserve(h.owner, namespace, b"", KEYS, 10).lease_id
    steps = h.cache.writes.commit_in_slices(h.owner, lease, range(MAX_RESERVE))
    next(steps)
    assert namespace.table.blocks == RUN_BLOCKS
    h.check()
    return namespace, lease, steps


def wide() -> CacheRig:
    return CacheRig(region_bytes=4 * MAX_RESERVE * FRAME_BYTES)


def end_of(h: CacheRig, steps: Steps[list[CommitState]]) -> list[CommitState]:
    """Do deferred work between the slices of a commit; returns its answer."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            states: list[CommitState] = end.value
            return states
        h.cache.work()
        h.check()


def test_a_commit_publishes_a_part_at_a_time_and_is_answered_when_all_is_visible() -> None:
    h = wide()
    namespace, _, steps = slow(h)
    for parts in (2, 3):
        h.cache.work()
        assert namespace.table.blocks == parts * RUN_BLOCKS
        next(steps)
    assert end_of(h, steps) == VISIBLE
    assert h.cache.match(h.owner, [namespace], KEYS, 0).dram == MAX_RESERVE
    finish(h)


def test_a_commit_waits_only_a_moment_for_its_blocks() -> None:
    h = wide()
    namespace, _, steps = slow(h)
    h.now_s += VISIBLE_WITHIN_S
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert set(end.value.value) == {CommitState.VISIBLE, CommitState.HELD}
    finish(h)
    assert namespace.table.blocks == MAX_RESERVE


def test_nothing_goes_on_below_a_block_that_waits_to_be_unlinked() -> None:
    h = CacheRig()
    namespace, keys = h.space(), chain_of(1, 5)
    h.store(namespace, keys)
    h.cache.space.index.drop(namespace.table.get(keys[16:32]))
    assert h.cache.reserve(h.owner, namespace, keys[48:64], keys[64:], 10).parent_missing
    assert not h.cache.reserve(h.owner, namespace, keys[:16], keys[16:], 10).parent_missing
    finish(h)


def test_what_hangs_below_a_run_that_is_split_leaves_its_end() -> None:
    h, keys = CacheRig(), chain_of(1, 6)
    namespace = h.space()
    above = h.cache.reserve(h.owner, namespace, b"", keys[:64], 10).lease_id
    below = h.cache.reserve(h.owner, namespace, keys[48:64], keys[64:], 10).lease_id
    h.cache.writes.commit(h.owner, above, [0, 1])
    h.cache.writes.abort(h.owner, below, True)
    assert h.cache.writes.commit(h.owner, above, [2, 3]) == [CommitState.VISIBLE] * 2
    h.check()
    finish(h)


def test_what_is_committed_below_a_block_that_was_dropped_is_dropped() -> None:
    h, keys = CacheRig(), chain_of(1, 4)
    namespace = h.space()
    h.store(namespace, keys[:16])
    lease = h.cache.reserve(h.owner, namespace, keys[:16], keys[16:], 10).lease_id
    h.cache.space.index.drop(namespace.table.get(keys[:16]))
    assert h.cache.writes.commit(h.owner, lease, range(3)) == [CommitState.DROPPED] * 3
    h.check()
    assert h.cache.space.allocator.used_bytes == 0
