"""Commits that publish much: in slices, and answered once their blocks are visible."""

from __future__ import annotations

from typing import Any

import pytest
from cache_at_once import CacheAtOnce
from cache_rig import FRAME_BYTES, CacheRig, Kept, finish
from chains import chain_of

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.events.events import Events, NamedBlocks
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.pending_blocks import RUN_BLOCKS, TOLD_BLOCKS
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.dram.writes import VISIBLE_WITHIN_S
from tiercache.protocol.messages import MAX_RESERVE, BlockState, CommitState, EventRun

VISIBLE, DROPPED = [CommitState.VISIBLE] * MAX_RESERVE, [CommitState.DROPPED] * MAX_RESERVE
KEYS = chain_of(1, MAX_RESERVE)
TOKENS = 4096  # four blocks make a batch


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


def named_as(tag: int) -> NamedBlocks:
    """The event fields of a chain with the most blocks that one request may have."""
    names: list[int | bytes] = [tag * MAX_RESERVE + place for place in range(MAX_RESERVE)]
    return NamedBlocks(EventRun(names, None, bytes(4 * TOKENS * MAX_RESERVE)), TOKENS)


class Told(CacheRig):
    """A cache whose events are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        self.events = Events(self.kept)
        self.cache = CacheAtOnce(lambda: self.now_s, CacheLimits(), events=self.events)
        self.cache.space.allocator.add_region(0, 8 * MAX_RESERVE * FRAME_BYTES)

    def commit(self, namespace: Namespace, tag: int) -> Steps[list[CommitState]]:
        """Store a chain with the most blocks that one request may have, up to the answer to its commit."""
        got = self.cache.reserve(self.owner, namespace, b"", chain_of(tag, MAX_RESERVE), 10, named_as(tag))
        assert set(got.states) == {BlockState.FRAME}
        return self.cache.writes.commit_in_slices(self.owner, got.lease_id, range(MAX_RESERVE))

    def names(self) -> list[Any]:
        self.events.flush()
        told = [event for batch in self.kept.published for event in batch if event["type"] == "BlockStored"]
        return [name for event in told for name in event["block_hashes"]]


def test_what_events_tell_of_at_length_becomes_visible_a_few_blocks_at_a_time() -> None:
    h = Told()
    h.cache.writes.pending.publish_ns = 0
    namespace = h.space()
    steps = h.commit(namespace, 1)
    next(steps)
    assert namespace.table.blocks == TOLD_BLOCKS
    assert end_of(h, steps) == VISIBLE
    assert h.names() == [*range(MAX_RESERVE, 2 * MAX_RESERVE)]
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


def test_what_could_not_be_published_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    h = wide()
    namespace, keys = h.space(), chain_of(1, 1)
    lease = h.cache.reserve(h.owner, namespace, b"", keys, 10).lease_id
    for tag in (2, 3):
        below = h.cache.reserve(h.owner, namespace, keys, chain_of(tag, 1), 10).lease_id
        assert h.cache.writes.commit(h.owner, below, [0]) == [CommitState.HELD]
    show, times = h.cache.writes.pending._show, []

    def once(*arguments: Any) -> None:
        show(*arguments)
        times.append(1)
        if len(times) == 1:
            monkeypatch.setattr(h.cache.writes.pending, "_publish_run", broken)

    def broken(ready: Any) -> int:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(h.cache.writes.pending, "_show", once)
    with pytest.raises(MemoryError):
        h.cache.writes.commit(h.owner, lease, [0])
    finish(h)
    assert namespace.table.blocks == 3
