"""Blocks between reserve and publication: they become visible from the root on, or are dropped with those below."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import CpuLimit
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import REGION_SHIFT

from .space import Namespace, Space
from .write_lease import BlockPhase, PendingBlock, WriteLease, complete_run

BLOCKS_AT_ONCE = 1024
"""Published or dropped in one go: a millisecond or two of the event loop. Not less than one commit may name."""
RUN_BLOCKS, TOLD_BLOCKS = 128, 16
"""Blocks published before the next look at the time, and those that events tell of, which may be very long."""
LOOKED_AT_ONCE = 4096
"""Pending blocks checked in one go when a region is emptied."""
_DROP = 3
"""Dropping one takes as long as checking this many."""

# Members by short names: looking one up on its class costs as much as the rest of a step in a loop.
_HELD, _DROPPED, _VISIBLE = BlockPhase.HELD, BlockPhase.DROPPED, BlockPhase.VISIBLE


class PendingBlocks:
    """All pending blocks, by namespace number and key. Event loop only.

    `settled(lease, count)` is called when `count` complete blocks of a lease were published, or dropped.
    """

    def __init__(
        self,
        space: Space,
        published: Callable[[Namespace, Sequence[bytes], bytes], None],
        events: Events | None,
        settled: Callable[[WriteLease, int], None],
    ) -> None:
        self.by_key: dict[tuple[int, bytes], PendingBlock] = {}
        self.publish_ns = math.inf
        """CPU time of this thread after which a slice of publishing ends."""
        self._space = space
        self._published = published
        self._events = events
        self._settled = settled
        self._ready: deque[PendingBlock] = deque()  # complete, below published blocks: to be published
        self._doomed: list[PendingBlock] = []  # dropped, with blocks below them still to be dropped
        self._in_namespace: dict[int, dict[PendingBlock, None]] = {}  # by number, since it was flushed
        self._taken_back: dict[int, list[PendingBlock]] = {}  # pending blocks to check, by the region that is emptied
        self._flushed: list[dict[PendingBlock, None]] = []  # pending blocks of flushed namespaces

    def add(
        self,
        lease: WriteLease,
        namespace: Namespace,
        fresh: Mapping[bytes, int],
        frames: Sequence[int],
        entry: int,
        block: PendingBlock | None,
    ) -> None:
        """A pending block for each of `frames`, with the key and place that `fresh` has for it.

        The first hangs below `entry` or `block`, and of a chain the others below the one before.
        """
        table, number, pending = namespace.table, namespace.number, self.by_key
        among = self._in_namespace.setdefault(number, {})
        for (key, place), frame in zip(fresh.items(), frames, strict=False):
            new = lease.blocks[place] = pending[number, key] = PendingBlock(table, key, frame, lease, place, among)
            among[new] = None
            if block is not None:
                new.parent_block = block
                block.children[new] = None
            else:
                new.parent_entry = entry
                self._space.index.pin(entry)
            if not table.windowed:
                block = new
        namespace.use.pending_blocks += len(frames)

    def is_orphan(self, block: PendingBlock) -> bool:
        """True if it hangs below a block that was dropped meanwhile: its commit will drop it too."""
        while block.parent_block is not None:
            block = block.parent_block
        if block.phase is _DROPPED:
            return True
        return block.parent_entry != NO_ENTRY and not self._space.index.attached(block.parent_entry)

    # --- published -------------------------------------------------------------------------------

    def publish(self, complete: Iterable[PendingBlock]) -> None:
        """Make blocks that are complete now visible, a slice of them; `work` the others."""
        ready = deque(block for block in complete if block.parent_block is None)
        try:
            self._publish_some(ready)  # its own before those that wait: a commit sees its own
        finally:
            self._ready.extend(ready)

    @property
    def publishing(self) -> bool:
        """True if complete blocks wait for `work` to publish them."""
        return bool(self._ready)

    def _publish_some(self, ready: deque[PendingBlock]) -> None:
        """Publish a slice of `ready`."""
        done, limit, look = 0, CpuLimit(self.publish_ns), RUN_BLOCKS
        while ready and done < BLOCKS_AT_ONCE:
            if done >= look or self._tells(ready[0]):
                if done and limit.over:
                    return
                look = done + RUN_BLOCKS
            done += self._publish_run(ready)

    def _tells(self, block: PendingBlock) -> bool:
        """True if events tell of a block, perhaps at length: then few are published between two looks at the time."""
        return self._events is not None and block.lease.named is not None

    def _publish_run(self, ready: deque[PendingBlock]) -> int:
        """Make the first block of `ready` visible, and a run of the HELD ones below it; returns how many.

        HELD → VISIBLE, or DROPPED if the parent has gone. The HELD blocks below the run then end `ready`.
        """
        index = self._space.index
        block = ready.popleft()
        if block.phase is not _HELD:
            return 1  # dropped meanwhile
        parent = block.parent_entry
        if not index.attached(parent) or self.is_taken_back(block):
            self.drop(block)
            return 1
        run = complete_run(block, 1 if self._taken_back else TOLD_BLOCKS if self._tells(block) else RUN_BLOCKS)
        last = run[-1]
        keys, frames = [block.key for block in run], [block.frame for block in run]
        events = self._events
        said = [] if events is None else [(block.lease.named, block.place) for block in run]
        stored = not last.lease.owner.internal
        self._space.policies.turnover.comes(len(run) * last.lease.frame_bytes, stored)
        entries = index.insert_run(last.table, keys, parent, frames, pins=len(last.children), stored=stored)
        self._show(run, entries)
        index.unpin(parent)
        if not last.children and not last.table.windowed and stored:
            self._space.tails.stored(last.lease.owner.instance, entries[-1])
        for child in last.children:
            child.parent_block, child.parent_entry = None, entries[-1]  # one of the pins belongs to it
            if child.phase is _HELD:
                ready.append(child)  # behind what others have stored: they take turns
        last.children = {}
        if events is not None:  # last: whatever this raises, each frame has its one owner
            for key, (named, place) in zip(keys, said, strict=True):
                events.arrived(events.dram, last.table.number, key, named and named(place))
        return len(run)

    def _show(self, run: Sequence[PendingBlock], entries: Sequence[int]) -> None:
        """Blocks of one namespace are in the index: no longer pending; tells the tier below."""
        table, pending = run[0].table, self.by_key
        number, namespace = table.number, self._space.namespaces[table.number]
        self._space.allocator.set_entries([block.frame for block in run], entries)
        for block in run:
            block.frame, block.parent_entry, block.phase = NO_FRAME, NO_ENTRY, _VISIBLE
            del pending[number, block.key], block.among[block]
        assert len(run) == 1 or not table.windowed, "blocks of windows hang below nothing"
        before = run[0].lease.before(run[0].place) if table.windowed else b""
        self._published(namespace, [block.key for block in run], before)
        namespace.use.pending_blocks -= len(run)
        for lease, count in Counter([block.lease for block in run]).items():
            if not lease.owner.internal:
                self._space.counters.stored_blocks += count
                self._space.counters.stored_bytes += count * namespace.spec.block_bytes
                namespace.use.stored_blocks += count
            self._settled(lease, count)

    # --- dropped ---------------------------------------------------------------------------------

    def drop(self, block: PendingBlock) -> None:
        """Drop a pending block; `drop_some` drops those below it.

        Complete blocks give their frame back; frames being written stay their writer's.
        """
        if block.parent_block is not None:
            block.parent_block.children.pop(block, None)
            block.parent_block = None
        if block.parent_entry != NO_ENTRY:
            self._space.index.unpin(block.parent_entry)
            block.parent_entry = NO_ENTRY
        if block.children:
            self._doomed.append(block)
        del self.by_key[block.table.number, block.key]
        block.among.pop(block, None)
        self._space.namespaces[block.table.number].use.pending_blocks -= 1
        self._space.counters.dropped_blocks += 1
        complete = block.phase is _HELD
        block.phase = _DROPPED
        if complete:
            self._space.allocator.give_back(block.frame)
            block.frame = NO_FRAME
            self._settled(block.lease, 1)

    def drop_some(self) -> None:
        """Drop a slice of the blocks below dropped ones, and of those pending in flushed namespaces."""
        done = 0
        while done < BLOCKS_AT_ONCE and (self._doomed or self._flushed):
            done += 1
            blocks = self._doomed[-1].children if self._doomed else self._flushed[-1]
            if blocks:
                self.drop(blocks.popitem()[0])  # the last one: a dict whose first items go is slow to find the next
            else:
                (self._doomed or self._flushed).pop()

    def drop_namespaces(self, numbers: Set[int]) -> None:
        """Drop all pending blocks of these namespaces. Meanwhile none is published: their root is not attached."""
        self._flushed.extend(blocks for number in numbers if (blocks := self._in_namespace.pop(number, None)))
        self.drop_some()

    def drop_key(self, number: int, key: bytes) -> None:
        """Drop the block of a key, if it is pending."""
        block = self.by_key.get((number, key))
        if block is not None:
            self.drop(block)

    # --- a region is emptied ---------------------------------------------------------------------

    def take_back(self, region_id: int) -> None:
        """Check all that is pending for what is written in this region by clients without the mapping.

        Meanwhile none of these is published.
        """
        self._taken_back[region_id] = list(self.by_key.values())

    @property
    def emptying(self) -> bool:
        """True if a region is emptied for which there is more to check."""
        return bool(self._taken_back)

    def is_taken_back(self, block: PendingBlock) -> bool:
        """True if it belongs to a client without the mapping, in a region that is emptied."""
        regions = self._taken_back
        return bool(regions) and block.frame >> REGION_SHIFT in regions and not block.lease.owner.mapped

    def take_back_some(self) -> Iterable[WriteLease]:
        """Drop a slice of what is to be checked; returns leases of clients without the mapping that lost a block."""
        state, left, leases = self._space.index.state, LOOKED_AT_ONCE, dict[WriteLease, None]()
        while self._taken_back and left > 0:
            region_id, blocks = next(iter(self._taken_back.items()))
            while blocks and left > 0:
                block = blocks.pop()
                left -= 1
                lost = block.parent_entry != NO_ENTRY and state[block.parent_entry] != LIVE
                if block.phase is _VISIBLE or not (lost or self.is_taken_back(block)):
                    continue
                left -= _DROP
                if block.phase is not _DROPPED:  # it hung below another one of them
                    self.drop(block)
                if not block.lease.owner.mapped:
                    leases[block.lease] = None
            if not blocks:
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
