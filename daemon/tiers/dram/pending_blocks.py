"""Blocks between reserve and publication: they become visible from the root on, or are dropped with those below."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain, repeat

from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import CpuLimit
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import REGION_SHIFT

from .space import Namespace, Space
from .write_lease import BlockPhase, PendingRun, WriteLease, complete_runs

BLOCKS_AT_ONCE = 1024
"""Published or dropped in one go: a millisecond or two of the event loop. Not less than one commit may name."""
RUN_BLOCKS, TOLD_BLOCKS = 128, 16
"""Blocks published before the next look at the time, and those that events tell of, which may be very long."""
LOOKED_AT_ONCE = 4096
"""Pending blocks checked in one go when a region is emptied."""
_DROP = 3
"""Dropping one takes as long as checking this many."""
FETCHED_BLOCKS = 16
"""Blocks of one run that the daemon itself stores: as many as a fetch from a disk brings."""

# Members by short names: looking one up on its class costs as much as the rest of a step in a loop.
_HELD, _DROPPED, _VISIBLE = BlockPhase.HELD, BlockPhase.DROPPED, BlockPhase.VISIBLE


class PendingBlocks:
    """All pending blocks: the run of each by namespace number and key. Event loop only.

    `settled(lease, count)` is called when `count` complete blocks of a lease were published, or dropped.
    """

    def __init__(
        self,
        space: Space,
        published: Callable[[Namespace, Sequence[bytes], bytes], None],
        events: Events | None,
        settled: Callable[[WriteLease, int], None],
    ) -> None:
        self.by_key: dict[tuple[int, bytes], PendingRun] = {}
        self.publish_ns = math.inf
        """CPU time of this thread after which a slice of publishing ends."""
        self._space = space
        self._published = published
        self._events = events
        self._settled = settled
        self._ready: deque[PendingRun] = deque()  # complete, below published blocks: to be published
        self._doomed: list[PendingRun] = []  # dropped, with others below them still to be dropped
        self._in_namespace: dict[int, dict[PendingRun, None]] = {}  # by number, since it was flushed
        self._taken_back: dict[int, dict[PendingRun, None]] = {}  # those to check, by the region that is emptied
        self._flushed: list[dict[PendingRun, None]] = []  # those of flushed namespaces

    def add(
        self,
        lease: WriteLease,
        namespace: Namespace,
        fresh: Mapping[bytes, int],
        frames: Sequence[int],
        entry: int,
        above: PendingRun | None,
    ) -> None:
        """Pending blocks for `frames`, with the keys and places that `fresh` has for them.

        The first hangs below `entry` or the last block of `above`, and of a chain the others below the one before.
        """
        table, keys, places = namespace.table, list(fresh), list(fresh.values())
        among = self._in_namespace.setdefault(namespace.number, {})
        most = FETCHED_BLOCKS if lease.owner.internal else TOLD_BLOCKS if lease.named is not None else RUN_BLOCKS
        if table.windowed or not lease.owner.mapped:
            most = 1
        for first in range(0, len(frames), most):
            its = list(frames[first : first + most])
            run = PendingRun(table, keys[first : first + len(its)], its, lease, places[first], among)
            among[run] = None
            self._enter(run)
            if above is not None:
                run.parent = above
                above.children[run] = None
            else:
                run.parent_entry = entry
                self._space.index.pin(entry)
            if not table.windowed:
                above = run
        namespace.use.pending_blocks += len(frames)

    def _enter(self, run: PendingRun) -> None:
        if len(run.keys) == 1:
            self.by_key[run.table.number, run.keys[0]] = run.lease.blocks[run.place] = run
            return
        self.by_key.update(zip(run.names, repeat(run)))
        run.lease.blocks.update(zip(run.places, repeat(run)))

    def split(self, run: PendingRun, at: int) -> PendingRun:
        """Make the blocks of a pending run from `at` on a run of their own, below the others; returns it."""
        if at == 0:
            return run
        rest = PendingRun(run.table, run.keys[at:], run.frames[at:], run.lease, run.place + at, run.among)
        del run.keys[at:], run.frames[at:]
        rest.phase, rest.parent, rest.children, run.children = run.phase, run, run.children, {rest: None}
        for child in rest.children:
            child.parent = rest
        if run in run.among:
            run.among[rest] = None
        self._enter(rest)
        return rest

    def alone(self, run: PendingRun, first: int, end: int) -> PendingRun:
        """Make blocks `first ..< end` of a pending run a run of their own."""
        run = self.split(run, first)
        if end - first < run.count:
            self.split(run, end - first)
        return run

    def is_orphan(self, run: PendingRun) -> bool:
        """True if it hangs below a block that was dropped meanwhile: its commit will drop it too."""
        while run.parent is not None:
            run = run.parent
        if run.phase is _DROPPED:
            return True
        return run.parent_entry != NO_ENTRY and not self._space.index.attached(run.parent_entry)

    # --- published -------------------------------------------------------------------------------

    def publish(self, complete: Iterable[PendingRun]) -> None:
        """Make runs that are complete now visible, a slice of them; `work` the others."""
        ready = deque(run for run in complete if run.parent is None)
        try:
            self._publish_some(ready)  # its own before those that wait: a commit sees its own
        finally:
            self._ready.extend(ready)

    @property
    def publishing(self) -> bool:
        """True if complete blocks wait for `work` to publish them."""
        return bool(self._ready)

    def _publish_some(self, ready: deque[PendingRun]) -> None:
        """Publish a slice of `ready`."""
        done, limit, look = 0, CpuLimit(self.publish_ns), RUN_BLOCKS
        while ready and done < BLOCKS_AT_ONCE:
            if done >= look or self._tells(ready[0]):
                if done and limit.over:
                    return
                look = done + RUN_BLOCKS
            done += self._publish_run(ready)

    def _tells(self, run: PendingRun) -> bool:
        """True if events tell of it, perhaps at length: then few blocks are published between two looks at the time."""
        return self._events is not None and run.lease.named is not None

    def _publish_run(self, ready: deque[PendingRun]) -> int:
        """Make the first run of `ready` visible, and the HELD ones below it; returns of how many blocks.

        HELD → VISIBLE, or DROPPED if the parent has gone. HELD runs below the last one then end `ready`.
        """
        index = self._space.index
        first = ready.popleft()
        if first.phase is not _HELD:
            return 1  # dropped meanwhile
        parent = first.parent_entry
        if not index.attached(parent) or self.is_taken_back(first):
            self.drop(first)
            return first.count
        runs = complete_runs(first, 1 if self._taken_back else TOLD_BLOCKS if self._tells(first) else RUN_BLOCKS)
        last = runs[-1]
        keys, frames = first.keys, first.frames
        if len(runs) > 1:
            keys = list(chain.from_iterable([run.keys for run in runs]))
            frames = list(chain.from_iterable([run.frames for run in runs]))
        events = self._events
        said = [] if events is None else [(run.lease.named, place) for run in runs for place in run.places]
        stored = not last.lease.owner.internal
        self._space.policies.turnover.comes(len(keys) * last.lease.frame_bytes, stored)
        entries = index.insert_run(last.table, keys, parent, frames, pins=len(last.children), stored=stored)
        self._show(runs, keys, frames, entries)
        index.unpin(parent)
        if not last.children and not last.table.windowed and stored:
            self._space.tails.stored(last.lease.owner.instance, entries[-1])
        for child in last.children:
            child.parent, child.parent_entry = None, entries[-1]  # one of the pins belongs to it
            if child.phase is _HELD:
                ready.append(child)  # behind what others have stored: they take turns
        last.children = {}
        if events is not None:  # last: whatever this raises, each frame has its one owner
            for key, (named, place) in zip(keys, said, strict=True):
                events.arrived(events.dram, last.table.number, key, named and named(place))
        return len(keys)

    def _show(
        self, runs: Sequence[PendingRun], keys: Sequence[bytes], frames: Sequence[int], entries: Sequence[int]
    ) -> None:
        """Blocks of one namespace are in the index: no longer pending; tells the tier below."""
        table, lease = runs[0].table, runs[0].lease
        namespace = self._space.namespaces[table.number]
        self._space.allocator.set_entries(frames, entries)
        for name in zip(repeat(table.number), keys):
            del self.by_key[name]
        for run in runs:
            run.frames, run.parent_entry, run.phase = [NO_FRAME] * run.count, NO_ENTRY, _VISIBLE
            del run.among[run]
        assert len(keys) == 1 or not table.windowed, "blocks of windows hang below nothing"
        self._published(namespace, keys, lease.before(runs[0].place) if table.windowed else b"")
        namespace.use.pending_blocks -= len(keys)
        for run in runs:
            if not run.lease.owner.internal:
                self._space.counters.stored_blocks += run.count
                self._space.counters.stored_bytes += run.count * namespace.spec.block_bytes
                namespace.use.stored_blocks += run.count
            self._settled(run.lease, run.count)

    # --- dropped ---------------------------------------------------------------------------------

    def drop(self, run: PendingRun) -> None:
        """Drop a pending run; `drop_some` drops those below it.

        Complete blocks give their frames back; frames being written stay their writer's.
        """
        if run.parent is not None:
            run.parent.children.pop(run, None)
            run.parent = None
        if run.parent_entry != NO_ENTRY:
            self._space.index.unpin(run.parent_entry)
            run.parent_entry = NO_ENTRY
        if run.children:
            self._doomed.append(run)
        for name in run.names:
            del self.by_key[name]
        run.among.pop(run, None)
        self._space.namespaces[run.table.number].use.pending_blocks -= run.count
        self._space.counters.dropped_blocks += run.count
        complete = run.phase is _HELD
        run.phase = _DROPPED
        if complete:
            frames, run.frames = run.frames, [NO_FRAME] * run.count
            for frame in frames:
                self._space.allocator.give_back(frame)
            self._settled(run.lease, run.count)

    def drop_some(self) -> None:
        """Drop a slice of the blocks below dropped ones, and of those pending in flushed namespaces."""
        done = 0
        while done < BLOCKS_AT_ONCE and (self._doomed or self._flushed):
            runs = self._doomed[-1].children if self._doomed else self._flushed[-1]
            if runs:
                run = runs.popitem()[0]  # the last one: a dict whose first items go is slow to find the next
                done += run.count
                self.drop(run)
            else:
                done += 1
                (self._doomed or self._flushed).pop()

    def drop_namespaces(self, numbers: Set[int]) -> None:
        """Drop all pending blocks of these namespaces. Meanwhile none is published: their root is not attached."""
        self._flushed.extend(blocks for number in numbers if (blocks := self._in_namespace.pop(number, None)))
        self.drop_some()

    def drop_key(self, number: int, key: bytes) -> None:
        """Drop the block of a key, if it is pending, with those of its run below it."""
        run = self.by_key.get((number, key))
        if run is not None:
            self.drop(self.split(run, run.keys.index(key)))

    # --- a region is emptied ---------------------------------------------------------------------

    def take_back(self, region_id: int) -> None:
        """Check all that is pending for what is written in this region by clients without the mapping, in slices.

        Those are dropped, with what hangs below them; until then none of them is published. Nothing is dropped in here:
        a store that makes room may be about to hang its blocks below one of these.
        """
        self._taken_back[region_id] = dict.fromkeys(self.by_key.values())

    @property
    def emptying(self) -> bool:
        """True if a region is emptied for which there is more to check."""
        return bool(self._taken_back)

    def is_taken_back(self, run: PendingRun) -> bool:
        """True if it belongs to a client without the mapping, in a region that is emptied and is to be checked.

        The region may be in use again by then: what has been reserved there since stays.
        """
        regions = self._taken_back
        return bool(regions) and not run.lease.owner.mapped and run in regions.get(run.frames[0] >> REGION_SHIFT, ())

    def take_back_some(self) -> Iterable[WriteLease]:
        """Drop a slice of what is to be checked; returns leases of clients without the mapping that lost a block."""
        state, left, leases = self._space.index.state, LOOKED_AT_ONCE, dict[WriteLease, None]()
        while self._taken_back and left > 0:
            region_id, runs = next(iter(self._taken_back.items()))
            while runs and left > 0:
                run = runs.popitem()[0]
                mapped = run.lease.owner.mapped
                left -= 1
                lost = run.parent_entry != NO_ENTRY and state[run.parent_entry] != LIVE
                taken = not mapped and run.frames[0] >> REGION_SHIFT == region_id
                if run.phase is _VISIBLE or not (lost or taken):
                    continue
                left -= _DROP * run.count
                if run.phase is not _DROPPED:  # it hung below another one of them
                    self.drop(run)
                if not mapped:
                    leases[run.lease] = None
            if not runs:
                del self._taken_back[region_id]
        return leases

    def work(self) -> None:
        """Publish and drop a slice of what waits for it."""
        self._publish_some(self._ready)
        self.drop_some()

    @property
    def busy(self) -> bool:
        """True if there is more to publish, drop or check."""
        return bool(self.publishing or self._doomed or self._flushed or self._taken_back)
