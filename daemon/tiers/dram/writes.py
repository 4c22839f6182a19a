"""Stores into DRAM: reserve, commit, abort, and the quarantine.

    reserve(parent, keys)   HAVE HAVE PENDING FRAME FRAME NONE
                            ├─ here ─┤ other's ├─ ours ─┤ └ no room
    copy                              into the frames, by the client
    commit(indices)                   FRAME → VISIBLE, or HELD until its parent is

A frame that was given to a writer is never reused before the writer says that it is finished: when its lease expires or
its session is lost, the frame waits in quarantine until that client says so or its process has exited.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from itertools import islice

from tiercache.daemon.events.events import Events, Named
from tiercache.daemon.ground.slices import AnswerNow, Steps
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.index import LIVE
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.leases import (
    BlockPhase,
    Deadlines,
    Owner,
    PendingBlock,
    Reservation,
    WriteLease,
    complete_run,
    new_lease_id,
)
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.dram.unfinished import Unfinished
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE, NO_LEASE, REGION_SHIFT, BlockState, CommitState

_COMMIT_STATE = {
    BlockPhase.VISIBLE: CommitState.VISIBLE,
    BlockPhase.HELD: CommitState.HELD,
    BlockPhase.DROPPED: CommitState.DROPPED,
}
BLOCKS_AT_ONCE = 1024
"""Published or dropped in one go: a millisecond or two of the event loop. Not less than one commit may name."""
RUN_BLOCKS = 128
"""Published before the next look at the time."""
LOOKED_AT_ONCE = 4096
"""Pending blocks checked in one go when a region is emptied."""
_DROP = 3
"""Dropping one takes as long as checking so many."""
LEASE_STEPS = 8
"""What a lease that is given up costs of one go beside its blocks: it has up to `MAX_RESERVE` of those."""
LEASES_AT_ONCE = 4
"""Checked in one slice."""
NOTES_AT_ONCE = 512
"""Deadlines checked in one go; most belong to leases that have ended before."""

# Members by short names: looking one up on its class costs as much as the rest of a step in a loop.
_HAVE, _PENDING, _FRAME, _NONE = BlockState.HAVE, BlockState.PENDING, BlockState.FRAME, BlockState.NONE
_VISIBLE, _DROPPED = CommitState.VISIBLE, CommitState.DROPPED
_WRITING, _HELD, _PHASE_DROPPED = BlockPhase.WRITING, BlockPhase.HELD, BlockPhase.DROPPED
_PHASE_VISIBLE = BlockPhase.VISIBLE


class Writes:
    """All write leases, pending blocks and quarantined frames. Event loop only."""

    def __init__(
        self,
        space: Space,
        published: Callable[[Namespace, bytes, bytes], None],
        clock_s: Callable[[], float],
        unfinished: Unfinished,
        events: Events | None = None,
    ) -> None:
        self.leases: dict[int, WriteLease] = {}
        self.quarantined: dict[int, WriteLease] = {}
        self.waiting: dict[int, WriteLease] = {}
        """Ended leases with complete blocks that wait for those before them."""
        self.unfinished = unfinished
        self.pending: dict[tuple[int, bytes], PendingBlock] = {}
        self.ages = LatencyHistogram()
        """How long clients took for their stores, quarantine included."""
        self.publish_ns = math.inf
        """A slice of publishing ends after so much of this thread's CPU time."""
        self._space = space
        self._published = published
        self._clock_s = clock_s
        self._events = events
        self._deadlines = Deadlines(self.leases)
        self._ready: deque[PendingBlock] = deque()  # complete, below published blocks: to be published
        self._doomed: list[PendingBlock] = []  # dropped, with blocks below them still to be dropped
        self._pending_in: dict[int, dict[PendingBlock, None]] = {}  # by namespace, since it was flushed
        self._taken_back: dict[int, list[PendingBlock]] = {}  # pending blocks to check, by the region that is emptied
        self._flushed: list[dict[PendingBlock, None]] = []  # pending blocks of flushed namespaces

    # --- reserve ---------------------------------------------------------------------------------

    def reserve(
        self, owner: Owner, namespace: Namespace, parent: bytes, keys: bytes, ttl_s: float, named: Named | None = None
    ) -> Reservation:
        """Frames for those of `keys` that are neither here nor pending; `named`: what events say of them."""
        entry, block = namespace.table.root, None
        if parent and not namespace.table.windowed:
            entry = namespace.table.get(parent)
            block = self.pending.get((namespace.number, parent)) if entry == NO_ENTRY else None
            if entry == NO_ENTRY and block is None:
                return Reservation(NO_LEASE, [], [], parent_missing=True)
        states, entry = self._present(namespace, keys, entry) if block is None else ([], NO_ENTRY)
        lease = WriteLease(new_lease_id(), owner, self._clock_s(), ttl_s, namespace.size_class.frame_bytes)
        lease.named = named
        if namespace.table.windowed:
            lease.chain = parent, keys
        # Pinned before any eviction, so that room for a child is not made of its ancestors.
        if entry != NO_ENTRY:
            self._space.index.pin(entry)
        self._reserve_rest(lease, namespace, keys, states, entry, block)
        if entry != NO_ENTRY:
            self._space.index.unpin(entry)
        frames = [pending.frame for pending in lease.blocks.values()]
        self._count(states, namespace)
        if not frames:
            return Reservation(NO_LEASE, states, [], parent_missing=False)
        self.leases[lease.lease_id] = owner.writes[lease.lease_id] = lease
        self._deadlines.add(lease.deadline_s, lease.lease_id)
        if entry != NO_ENTRY:
            self._space.tails.went_on(owner.instance, entry)
        return Reservation(lease.lease_id, states, frames, parent_missing=False)

    def _present(self, namespace: Namespace, keys: bytes, entry: int) -> tuple[list[BlockState], int]:
        """The leading run that is here, and its last entry (or `entry`, the parent, if none is)."""
        index, table = self._space.index, namespace.table
        states: list[BlockState] = []
        if table.windowed:
            return states, entry
        for start in range(0, len(keys), KEY_BYTES):
            found = table.get(keys[start : start + KEY_BYTES])
            if found == NO_ENTRY or index.parent[found] != entry:
                break
            states.append(BlockState.HAVE)
            entry = found
        if states:
            index.touch(entry)
        return states, entry

    def _reserve_rest(
        self,
        lease: WriteLease,
        namespace: Namespace,
        keys: bytes,
        states: list[BlockState],
        entry: int,
        block: PendingBlock | None,
    ) -> None:
        """Continue from the deepest present ancestor, `entry` or `block`, until there is no room or no chain."""
        table, number_of_keys = namespace.table, len(keys) // KEY_BYTES
        windowed, get, pending = table.windowed, table.get, self.pending
        fresh: dict[bytes, int] = {}  # keys that need a frame, and their positions
        for number in range(len(states), number_of_keys):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            found = get(key)
            if found != NO_ENTRY:
                if not windowed or self._space.index.parent[found] != table.root:
                    # Here, but not after the block before it: it is being unlinked, or the list is no chain.
                    self._space.index.invariant_failures += 0 if table.unlinking else 1
                    break
                states.append(_HAVE)
                continue
            other = pending.get((namespace.number, key))
            if other is None and key not in fresh:
                fresh[key] = number
                states.append(_FRAME)
                continue
            if not windowed:
                if other is None or fresh or other.parent_entry != entry or other.parent_block is not block:
                    # Its parent was dropped while it is being written, or the list is no chain.
                    self._space.index.invariant_failures += 0 if other is not None and self._is_orphan(other) else 1
                    break
                entry, block = NO_ENTRY, other
            states.append(_PENDING)
        given = self._fill(lease, namespace, fresh, entry, block)
        if given < len(fresh):  # no frame for this one, so none for those after it
            del states[list(fresh.values())[given] :]
        states.extend([_NONE] * (number_of_keys - len(states)))

    def _is_orphan(self, block: PendingBlock) -> bool:
        """Whether it hangs below a block that was dropped meanwhile: its commit will drop it too."""
        while block.parent_block is not None:
            block = block.parent_block
        if block.phase is _PHASE_DROPPED:
            return True
        return block.parent_entry != NO_ENTRY and not self._space.index.attached(block.parent_entry)

    def _fill(
        self, lease: WriteLease, namespace: Namespace, fresh: dict[bytes, int], entry: int, block: PendingBlock | None
    ) -> int:
        """Take a frame and make a pending block for each of `fresh`, below `entry` or `block`; returns for how many."""
        most = self.unfinished.most_frames(lease)
        table, number, pending = namespace.table, namespace.number, self.pending
        frames = self._space.take_frames(namespace, min(len(fresh), most))
        among = self._pending_in.setdefault(number, {})
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
        self.unfinished.count(lease, len(frames))
        namespace.use.pending_blocks += len(frames)
        return len(frames)

    def _count(self, states: Sequence[BlockState], namespace: Namespace) -> None:
        counters = self._space.counters
        reserved, refused = states.count(_FRAME), states.count(_NONE)
        counters.reserved_blocks += reserved
        counters.refused_blocks += refused
        namespace.use.refused_blocks += refused
        counters.dedup_blocks += len(states) - reserved - refused

    # --- commit and abort ------------------------------------------------------------------------

    def commit(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> list[CommitState]:
        """The copies into these blocks are complete. Blocks of a lease that is over are dropped."""
        return _states(self._complete(owner, lease_id, numbers))

    def commit_in_slices(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> Steps[list[CommitState]]:
        """`commit`, until all of these blocks are visible that can be; nearly always that is at once."""
        blocks = self._complete(owner, lease_id, numbers)
        with suppress(AnswerNow):  # they become visible all the same
            while self._ready and any(map(_is_coming, blocks)):
                yield  # `work` publishes them
        return _states(blocks)

    def _complete(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> list[PendingBlock | None]:
        """Note that these blocks are complete, and publish a slice of them; None for those of no lease."""
        lease = self._find(owner, lease_id)
        if lease is None:
            return [None] * len(numbers)
        blocks = [lease.blocks.get(number) for number in numbers]
        complete, taken = list[PendingBlock](), self._taken_back
        for block in blocks:
            if block is None:
                continue
            if block.phase is _WRITING and (not self._is_whole(block) or (taken and self._is_taken_back(block))):
                self._drop(block)
            if block.phase is _WRITING:
                block.phase = _HELD
                complete.append(block)
            elif block.phase is _PHASE_DROPPED:
                self._give_back(lease, block)
        # All of them become complete before the first is published, so that runs become visible at once.
        if complete:
            self.unfinished.complete(lease, len(complete))
            self._space.namespaces[complete[0].table.number].use.used_s = self._clock_s()
            ready = deque(block for block in complete if block.parent_block is None)
            self._publish_some(ready)  # its own before those that wait: a commit sees its own
            self._ready.extend(ready)
        self.drop_some()
        self._end_if_done(lease)
        return blocks

    def abort(self, owner: Owner, lease_id: int, finished: bool) -> None:
        """Drop what was not committed. Unless `finished`, its frames go into quarantine."""
        lease = self._find(owner, lease_id)
        if lease is None:
            return
        self._give_up(lease, finished)
        self.drop_some()

    def fail(self, owner: Owner, lease_id: int, number: int) -> None:
        """The copy into one block failed and has ended: drop it, and what hangs below it."""
        lease = self._find(owner, lease_id)
        block = lease.blocks.get(number) if lease is not None else None
        if lease is None or block is None:
            return
        if block.phase is BlockPhase.WRITING:
            self._drop(block)
            self.drop_some()
        self._give_back(lease, block)
        self._end_if_done(lease)

    def writable_block(self, owner: Owner, lease_id: int, number: int) -> PendingBlock | None:
        """A block that may still be written to."""
        lease = self._find(owner, lease_id)
        block = lease.blocks.get(number) if lease is not None and not lease.over else None
        return block if block is not None and block.phase is BlockPhase.WRITING else None

    def _is_whole(self, block: PendingBlock) -> bool:
        """Whether its writer can have written all of it. Bytes that did not come as payload are a former owner's."""
        needed = self._space.namespaces[block.table.number].spec.block_bytes
        return block.lease.owner.mapped or block.written >= needed

    def renew(self, lease: WriteLease, ttl_s: float) -> None:
        """Move the deadline of a live lease."""
        lease.deadline_s = self._clock_s() + ttl_s
        self._deadlines.add(lease.deadline_s, lease.lease_id)

    def _find(self, owner: Owner, lease_id: int) -> WriteLease | None:
        """A live or quarantined lease of the same instance; the daemon's own leases are found by no client."""
        lease = self.leases.get(lease_id) or self.quarantined.get(lease_id)
        same = lease is not None and lease.owner.same_engine(owner)
        return lease if same else None

    def _publish_some(self, ready: deque[PendingBlock]) -> None:
        """Make complete blocks visible, each with the HELD ones below it, as deep as they go: a slice of `ready`.

        HELD → VISIBLE, or DROPPED if the parent has gone. None while events are behind.
        """
        index, done, until_ns = self._space.index, 0, time.thread_time_ns() + self.publish_ns
        turnover, events, look = self._space.policies.turnover, self._events, RUN_BLOCKS
        while ready and done < BLOCKS_AT_ONCE:
            if events is not None and events.behind:
                return
            if done >= look:
                if time.thread_time_ns() >= until_ns:
                    return
                look = done + RUN_BLOCKS
            block = ready.popleft()
            if block.phase is not _HELD:
                continue  # dropped meanwhile
            parent = block.parent_entry
            if not index.attached(parent) or self._is_taken_back(block):
                self._drop(block)
                continue
            run = complete_run(block, 1 if self._taken_back else RUN_BLOCKS)
            done += len(run)
            last = run[-1]
            keys, frames = [block.key for block in run], [block.frame for block in run]
            turnover.comes(len(run) * last.lease.frame_bytes, stored=not last.lease.owner.internal)
            entries = index.insert_run(last.table, keys, parent, frames, pins=len(last.children))
            turnover.came()
            self._show(run, entries)
            index.unpin(parent)
            if not last.children and not last.table.windowed and not last.lease.owner.internal:
                self._space.tails.stored(last.lease.owner.instance, entries[-1])
            for child in last.children:
                child.parent_block, child.parent_entry = None, entries[-1]  # one of the pins belongs to it
                if child.phase is _HELD:
                    ready.appendleft(child)
            last.children = {}

    def _show(self, run: Sequence[PendingBlock], entries: Sequence[int]) -> None:
        """Blocks of one namespace are in the index: no longer pending; tells the tier below and events."""
        table, pending, set_entry, events = run[0].table, self.pending, self._space.allocator.set_entry, self._events
        namespace = self._space.namespaces[table.number]
        for block, entry in zip(run, entries, strict=True):
            lease = block.lease
            set_entry(block.frame, entry)
            if events is not None:
                said = lease.named and lease.named(block.place)
                events.arrived(events.dram, table.number, block.key, said)
            self._published(namespace, block.key, lease.before(block.place) if table.windowed else b"")
            block.frame, block.parent_entry, block.phase = NO_FRAME, NO_ENTRY, _PHASE_VISIBLE
            del pending[table.number, block.key], block.among[block]
        namespace.use.pending_blocks -= len(run)
        for lease, count in Counter(block.lease for block in run).items():
            if not lease.owner.internal:
                self._space.counters.stored_blocks += count
                self._space.counters.stored_bytes += count * namespace.spec.block_bytes
                namespace.use.stored_blocks += count
            self._settle(lease, count)

    def _drop(self, block: PendingBlock) -> None:
        """Drop a pending block and those below it; `work` drops the latter if they are many.

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
        del self.pending[block.table.number, block.key]
        block.among.pop(block, None)
        self._space.namespaces[block.table.number].use.pending_blocks -= 1
        self._space.counters.dropped_blocks += 1
        complete = block.phase is BlockPhase.HELD
        block.phase = BlockPhase.DROPPED
        if complete:
            self._space.allocator.give_back(block.frame)
            block.frame = NO_FRAME
            self._settle(block.lease, 1)

    def _settle(self, lease: WriteLease, blocks: int) -> None:
        """So many complete blocks of a lease were published, or dropped."""
        self.unfinished.settle(lease, blocks)
        if not lease.frames and self.waiting.pop(lease.lease_id, None) is not None:
            lease.blocks = {}
        self._say_no_more(lease)

    def _say_no_more(self, lease: WriteLease) -> None:
        """Forget what events say of its blocks, once none of them can be published any more."""
        if not lease.frames or (lease.over and lease.frames == lease.writing):
            lease.named = None

    def drop_some(self) -> None:
        """Drop a slice of the blocks below dropped ones, and of those pending in flushed namespaces."""
        done = 0
        while done < BLOCKS_AT_ONCE and (self._doomed or self._flushed):
            done += 1
            blocks = self._doomed[-1].children if self._doomed else self._flushed[-1]
            if blocks:
                self._drop(blocks.popitem()[0])  # the last one: a dict whose first items go is slow to find the next
            else:
                (self._doomed or self._flushed).pop()

    def work(self) -> bool:
        """Run a slice of deferred work; True while there is more."""
        self._publish_some(self._ready)
        self.drop_some()
        self._take_back_some()
        return bool(self._ready or self._doomed or self._flushed or self._taken_back)

    def drop_namespaces(self, numbers: Set[int]) -> None:
        """Drop all pending blocks of these namespaces. Meanwhile none is published: their root is not attached."""
        self._flushed.extend(blocks for number in numbers if (blocks := self._pending_in.pop(number, None)))
        self.drop_some()

    def drop_key(self, number: int, key: bytes) -> None:
        """Drop a pending block; `drop_some` drops those below it."""
        block = self.pending.get((number, key))
        if block is not None:
            self._drop(block)

    def take_back(self, region_id: int) -> None:
        """A region is emptied: drop what clients without the mapping write there, and blocks below those.

        Very many pending blocks are checked in slices; meanwhile none of these is published.
        """
        self._taken_back[region_id] = list(self.pending.values())
        self._take_back_some()

    def _is_taken_back(self, block: PendingBlock) -> bool:
        """Whether it belongs to a client without the mapping, in a region that is emptied."""
        regions = self._taken_back
        return bool(regions) and block.frame >> REGION_SHIFT in regions and not block.lease.owner.mapped

    def _take_back_some(self) -> None:
        """Drop a slice of what was pending when a region was to be emptied."""
        state, left, leases = self._space.index.state, LOOKED_AT_ONCE, set[WriteLease]()
        while self._taken_back and left > 0:
            region_id, blocks = next(iter(self._taken_back.items()))
            while blocks and left > 0:
                block = blocks.pop()
                left -= 1
                lost = block.parent_entry != NO_ENTRY and state[block.parent_entry] != LIVE
                if block.phase is _PHASE_VISIBLE or not (lost or self._is_taken_back(block)):
                    continue
                left -= _DROP
                if block.phase is not _PHASE_DROPPED:  # it hung below another one of them
                    self._drop(block)
                if not block.lease.owner.mapped:
                    leases.add(block.lease)
            if not blocks:
                del self._taken_back[region_id]
        for lease in leases:
            for block in lease.blocks.values():
                if block.phase is _PHASE_DROPPED:
                    self._give_back(lease, block)
            self._end_if_done(lease)

    # --- the ends of leases ----------------------------------------------------------------------

    def expire(self) -> None:
        """Quarantine expired leases, a slice of them."""
        now_s, steps = self._clock_s(), 0
        for lease_id in islice(self._deadlines.due(now_s), NOTES_AT_ONCE):
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline_s <= now_s:
                self._space.counters.leases_expired += 1
                steps += _steps_of(lease)
                self._give_up(lease)
                if steps >= BLOCKS_AT_ONCE:
                    break
        self.drop_some()

    def session_lost(self, owner: Owner) -> Steps[None]:
        """The session is closed; its process may still be copying."""
        # Between two slices other sessions of its instance may end some of them.
        while owner.writes:
            for lease in _some(owner.writes.values()):
                self._give_up(lease)
            if owner.writes:
                yield

    def process_gone(self, owner: Owner) -> Steps[None]:
        """The process has exited, so it no longer writes to its frames."""
        yield from self.session_lost(owner)
        while owner.quarantined:
            for lease in _some(owner.quarantined.values()):
                self._finish(lease)
            if owner.quarantined:
                yield

    def has_quarantine(self, owner: Owner) -> bool:
        """Whether frames are quarantined until this session's process exits, or may be soon."""
        return bool(owner.writes or owner.quarantined)

    def _give_up(self, lease: WriteLease, finished: bool = False) -> None:
        """Publish nothing more of this lease; its frames wait in quarantine, unless its copies have `finished`.

        Clients without the mapping have no copies under way: the daemon wrote for them, and stops.
        """
        if lease.over:
            if finished:
                self._finish(lease)
            return
        self.unfinished.give_up(lease)
        for block in lease.blocks.values():
            if block.phase is BlockPhase.WRITING:
                self._drop(block)
        del self.leases[lease.lease_id], lease.owner.writes[lease.lease_id]
        self.quarantined[lease.lease_id] = lease.owner.quarantined[lease.lease_id] = lease
        self._say_no_more(lease)
        if finished or not lease.owner.mapped:
            self._finish(lease)
            return
        self._space.counters.quarantines += lease.writing > 0
        self._end_if_done(lease)

    def _finish(self, lease: WriteLease) -> None:
        """All copies of a lease that is over have ended."""
        for block in lease.blocks.values():
            if block.phase is BlockPhase.DROPPED:
                self._give_back(lease, block)
        self._end_if_done(lease)

    def _give_back(self, lease: WriteLease, block: PendingBlock) -> None:
        """Give back the frame of a dropped block whose writer is done with it."""
        if block.frame == NO_FRAME:
            return
        self.unfinished.count(lease, -1)
        self._space.allocator.give_back(block.frame)
        block.frame = NO_FRAME
        self._say_no_more(lease)

    def _end_if_done(self, lease: WriteLease) -> None:
        if lease.writing:
            return
        if lease.over:
            ended = self.quarantined.pop(lease.lease_id, None)
            lease.owner.quarantined.pop(lease.lease_id, None)
        else:
            ended = self.leases.pop(lease.lease_id, None)
            lease.owner.writes.pop(lease.lease_id, None)
        if lease.frames:
            self.waiting[lease.lease_id] = lease
        else:
            lease.blocks = {}  # they refer back to it: only the garbage collector would find them
        if ended is not None and not lease.owner.internal:
            self.ages.observe(int((self._clock_s() - lease.started_s) * 1e9))

    def owners(self) -> Iterator[list[tuple[int, PendingBlock]]]:
        """Frames of pending blocks, and of dropped ones whose writer may still write to them, each with its block.

        In parts, of the state at the first of them. A block dropped meanwhile may come twice.
        """
        pending = list(self.pending.values())
        leases = [*self.leases.values(), *self.quarantined.values()]
        for first in range(0, len(pending), BLOCKS_AT_ONCE):
            part = pending[first : first + BLOCKS_AT_ONCE]
            yield [(block.frame, block) for block in part if block.frame != NO_FRAME]
        for first in range(0, len(leases), LEASES_AT_ONCE):
            blocks = (block for lease in leases[first : first + LEASES_AT_ONCE] for block in lease.blocks.values())
            dropped = (block for block in blocks if block.phase is _PHASE_DROPPED)
            yield [(block.frame, block) for block in dropped if block.frame != NO_FRAME]


def _is_coming(block: PendingBlock | None) -> bool:
    """Whether a complete block is to be published: no block before it is still being written.

    False below a block of the same lease, which is asked itself, and below a very long run that is not visible yet.
    """
    if block is None or block.phase is not _HELD:
        return False
    above = block.parent_block
    if above is not None and above.lease is block.lease:
        return False
    for _ in range(MAX_RESERVE):
        if above is None:
            return True
        if above.phase is not _HELD:
            return False
        above = above.parent_block
    return False


def _states(blocks: Iterable[PendingBlock | None]) -> list[CommitState]:
    return [_DROPPED if block is None else _COMMIT_STATE[block.phase] for block in blocks]


def _steps_of(lease: WriteLease) -> int:
    """What giving a lease up costs, in dropped blocks."""
    return LEASE_STEPS + len(lease.blocks)


def _some(leases: Iterable[WriteLease]) -> list[WriteLease]:
    """As many leases as can be given up in one go."""
    some, steps = list[WriteLease](), 0
    for lease in leases:
        some.append(lease)
        steps += _steps_of(lease)
        if steps >= BLOCKS_AT_ONCE:
            break
    return some
