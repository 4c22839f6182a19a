"""Stores into DRAM: reserve, commit, abort.

    reserve(parent, keys)   HAVE HAVE PENDING FRAME FRAME NONE
                            ├─ here ─┤ other's ├─ ours ─┤ └ no room
    copy                              into the frames, by the client
    commit(indices)                   FRAME → VISIBLE, or HELD until its parent is

A frame that was given to a writer is never reused before the writer says that it is finished: when its lease expires or
its session is lost, the frame waits in quarantine until that client says so or its process has exited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat

from tiercache.daemon.events.events import Events, Named
from tiercache.daemon.ground.slices import AnswerNow, Steps
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE, NO_LEASE, BlockState, CommitState

from .leases import Owner
from .pending_blocks import BLOCKS_AT_ONCE, PendingBlocks
from .space import Namespace, Space
from .store_leases import StoreLeases
from .unfinished import Unfinished
from .write_lease import BlockPhase, PendingBlock, Reservation, WriteLease

_COMMIT_STATE = {
    BlockPhase.VISIBLE: CommitState.VISIBLE,
    BlockPhase.HELD: CommitState.HELD,
    BlockPhase.DROPPED: CommitState.DROPPED,
}
VISIBLE_WITHIN_S = 0.1
"""How long a commit waits at most until its blocks are visible: clients wait half a second for an answer."""
LEASES_AT_ONCE = 4
"""Checked in one slice."""
MANY = 4
"""From so many keys on, it is worth asking first whether all of them are new."""

# Members by short names: looking one up on its class costs as much as the rest of a step in a loop.
_HAVE, _PENDING, _FRAME, _NONE = BlockState.HAVE, BlockState.PENDING, BlockState.FRAME, BlockState.NONE
_WRITING, _HELD, _VISIBLE, _DROPPED = BlockPhase.WRITING, BlockPhase.HELD, BlockPhase.VISIBLE, BlockPhase.DROPPED


class Writes(StoreLeases[WriteLease]):
    """All write leases, and the blocks being stored under them. Event loop only."""

    def __init__(
        self,
        space: Space,
        published: Callable[[Namespace, Sequence[bytes], bytes], None],
        clock_s: Callable[[], float],
        unfinished: Unfinished,
        events: Events | None = None,
    ) -> None:
        super().__init__(unfinished, space.counters, clock_s)
        self.waiting: dict[int, WriteLease] = {}
        """Ended leases with complete blocks that wait for those before them."""
        self.pending = PendingBlocks(space, published, events, self._settle)
        self.ages = LatencyHistogram()
        """How long clients took for their stores, quarantine included."""
        self._space = space

    # --- reserve ---------------------------------------------------------------------------------

    def reserve(
        self, owner: Owner, namespace: Namespace, parent: bytes, keys: bytes, ttl_s: float, named: Named | None = None
    ) -> Reservation:
        """Frames for those of `keys` that are neither here nor pending; `named`: what events say of them.

        May evict, so leases that lost a block are revoked on the way.
        """
        entry, block = namespace.table.root, None
        if parent and not namespace.table.windowed:
            entry = namespace.table.get(parent)
            if entry != NO_ENTRY and not self._space.index.attached(entry):
                return Reservation(NO_LEASE, [], [], parent_missing=True)  # flushed, with all that follows it
            block = self.pending.by_key.get((namespace.number, parent)) if entry == NO_ENTRY else None
            if entry == NO_ENTRY and block is None:
                return Reservation(NO_LEASE, [], [], parent_missing=True)
        states, entry = self._present(namespace, keys, entry) if block is None else ([], NO_ENTRY)
        lease = WriteLease(self, owner, self._clock_s(), ttl_s, namespace.size_class.frame_bytes)
        lease.named = named
        if namespace.table.windowed:
            lease.chain = parent, keys
        # Pinned before any eviction, so that room for a child is not made of its ancestors.
        if entry != NO_ENTRY:
            self._space.index.pin(entry)
        refused_by_quota = self._space.counters.refused_by_quota_blocks
        frames = self._reserve_rest(lease, namespace, keys, states, entry, block)
        if entry != NO_ENTRY:
            self._space.index.unpin(entry)
        self._count(states, namespace, self._space.counters.refused_by_quota_blocks - refused_by_quota)
        if not frames:
            return Reservation(NO_LEASE, states, [], parent_missing=False)
        self._begin(lease, len(frames))
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
    ) -> list[int]:
        """Continue from the deepest present ancestor, `entry` or `block`, until there is no room or no chain.

        Returns the frames of the lease.
        """
        first = len(states)
        split = [keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, len(keys), KEY_BYTES)]
        if len(split) >= MANY and self._are_new(namespace, split):
            fresh = dict(zip(split, range(first, first + len(split)), strict=True))  # keys that need a frame, and where
            states.extend([_FRAME] * len(split))
        else:
            fresh, entry, block = self._sort(lease, namespace, split, states, entry, block)
        most = self.unfinished.most_places(lease.owner, lease.frame_bytes)
        frames = self._space.take_frames(namespace, min(len(fresh), most))
        self.pending.add(lease, namespace, fresh, frames, entry, block)
        if len(frames) < len(fresh):  # no frame for this one, so none for those after it
            del states[list(fresh.values())[len(frames)] :]
        states.extend([_NONE] * (first + len(split) - len(states)))
        return frames

    def _are_new(self, namespace: Namespace, keys: Sequence[bytes]) -> bool:
        """True if none of these keys is here or pending, and none of them comes twice: nearly always."""
        if not self.pending.by_key.keys().isdisjoint(zip(repeat(namespace.number), keys)):
            return False
        return len(namespace.table.missing(keys)) == len(keys) == len(set(keys))

    def _sort(
        self,
        lease: WriteLease,
        namespace: Namespace,
        keys: Sequence[bytes],
        states: list[BlockState],
        entry: int,
        block: PendingBlock | None,
    ) -> tuple[dict[bytes, int], int, PendingBlock | None]:
        """See `_reserve_rest`. Returns the keys that need a frame, and the block that the first of them hangs below."""
        table, windowed, pending, fresh = (
            namespace.table,
            namespace.table.windowed,
            self.pending.by_key,
            dict[bytes, int](),
        )
        for key in keys:
            found = table.get(key)
            if found != NO_ENTRY:
                if not windowed or self._space.index.parent[found] != table.root:
                    # Here, but not after the block before it: it is being unlinked, or the list is not a chain.
                    if not table.unlinking:
                        self._count_broken(lease.owner)
                    break
                states.append(_HAVE)
                continue
            other = pending.get((namespace.number, key))
            if other is None and key not in fresh:
                fresh[key] = len(states)
                states.append(_FRAME)
                continue
            if not windowed:
                if other is None or fresh or other.parent_entry != entry or other.parent_block is not block:
                    # Its parent was dropped while it is being written, or the list is not a chain.
                    if other is None or not self.pending.is_orphan(other):
                        self._count_broken(lease.owner)
                    break
                entry, block = NO_ENTRY, other
            states.append(_PENDING)
        return fresh, entry, block

    def _count_broken(self, owner: Owner) -> None:
        """The keys of a client form no chain: nothing contradicts itself, and no other client is affected."""
        self._space.counters.broken_chains += 1
        owner.broken_chains += 1

    def _count(self, states: Sequence[BlockState], namespace: Namespace, by_quota: int) -> None:
        counters = self._space.counters
        reserved, refused = states.count(_FRAME), states.count(_NONE)
        counters.reserved_blocks += reserved
        counters.refused_blocks += refused
        if self._space.populating:
            counters.refused_populating_blocks += refused - by_quota
        namespace.use.refused_blocks += refused
        counters.dedup_blocks += len(states) - reserved - refused

    # --- commit and abort ------------------------------------------------------------------------

    def commit(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> list[CommitState]:
        """The copies into these blocks are complete. Blocks of a lease that is over are dropped."""
        return _states(self.complete(owner, lease_id, numbers))

    def commit_in_slices(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> Steps[list[CommitState]]:
        """`commit`, until all of these blocks are visible that can be; nearly always that is at once.

        After `VISIBLE_WITHIN_S` its next slice ends the wait: what is HELD then becomes visible all the same.
        """
        blocks = self.complete(owner, lease_id, numbers)
        until_s = self._clock_s() + VISIBLE_WITHIN_S
        with suppress(AnswerNow):
            while self.pending.publishing and self._clock_s() < until_s and _some_coming(blocks):
                yield  # `work` publishes them
        return _states(blocks)

    def complete(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> list[PendingBlock | None]:
        """Note that these blocks are complete, and publish a slice of them; None for those of no lease."""
        lease = self._find(owner, lease_id)
        if lease is None:
            return [None] * len(numbers)
        blocks, pending, complete = list(map(lease.blocks.get, numbers)), self.pending, list[PendingBlock]()
        emptying, mapped = pending.emptying, lease.owner.mapped
        for block in blocks:
            if block is None:
                continue
            if block.phase is _WRITING:
                if (mapped or self._is_whole(block)) and not (emptying and pending.is_taken_back(block)):
                    block.phase = _HELD
                    complete.append(block)
                    continue
                pending.drop(block)
            if block.phase is _DROPPED:
                self._give_back(lease, block)
        # All of them become complete before the first is published, so that runs become visible at once.
        if complete:
            self.unfinished.complete(lease, len(complete))
            self._space.namespaces[complete[0].table.number].use.used_s = self._clock_s()
            pending.publish(complete)
        pending.drop_some()
        self._end_if_done(lease)
        return blocks

    def abort(self, owner: Owner, lease_id: int, finished: bool) -> None:
        """Drop what was not committed. Unless `finished`, its frames go into quarantine."""
        super().abort(owner, lease_id, finished)
        self.pending.drop_some()

    def fail(self, owner: Owner, lease_id: int, number: int) -> None:
        """The copy into one block failed and has ended: drop it, and what hangs below it."""
        lease = self._find(owner, lease_id)
        block = lease.blocks.get(number) if lease is not None else None
        if lease is None or block is None:
            return
        if block.phase is BlockPhase.WRITING:
            self.pending.drop(block)
            self.pending.drop_some()
        self._give_back(lease, block)
        self._end_if_done(lease)

    def writable_block(self, owner: Owner, lease_id: int, number: int) -> PendingBlock | None:
        """A block that may still be written to."""
        lease = self._find(owner, lease_id)
        block = lease.blocks.get(number) if lease is not None and not lease.over else None
        return block if block is not None and block.phase is BlockPhase.WRITING else None

    def _is_whole(self, block: PendingBlock) -> bool:
        """True if a writer without the mapping has sent all of it. Its other bytes are a former owner's."""
        return block.written >= self._space.namespaces[block.table.number].spec.block_bytes

    def _settle(self, lease: WriteLease, blocks: int) -> None:
        """Count complete blocks of a lease that were published, or dropped."""
        self.unfinished.settle(lease, blocks)
        if not lease.frames and self.waiting.pop(lease.lease_id, None) is not None:
            lease.blocks = {}
        self._say_no_more(lease)

    def _say_no_more(self, lease: WriteLease) -> None:
        """Forget what events say of its blocks, once none of them can be published any more."""
        if not lease.frames or (lease.over and lease.frames == lease.writing):
            lease.named = None

    # --- deferred work ---------------------------------------------------------------------------

    def work(self) -> bool:
        """Run a slice of deferred work; True while there is more."""
        if not self.pending.busy:
            return False
        self.pending.work()
        self._take_back_some()
        return self.pending.busy

    def take_back(self, region_id: int) -> None:
        """A region is emptied: drop what clients without the mapping write there, and blocks below those.

        Very many pending blocks are checked in slices.
        """
        self.pending.take_back(region_id)
        self._take_back_some()

    def _take_back_some(self) -> None:
        for lease in self.pending.take_back_some():
            self._free(lease)
            self._end_if_done(lease)

    # --- the ends of leases ----------------------------------------------------------------------

    def expire(self) -> None:
        """Give up expired leases, a slice of them."""
        super().expire()
        self.pending.drop_some()

    def _close(self, lease: WriteLease) -> None:
        for block in lease.blocks.values():
            if block.phase is BlockPhase.WRITING:
                self.pending.drop(block)
        self._say_no_more(lease)

    def _free(self, lease: WriteLease) -> None:
        for block in lease.blocks.values():
            if block.phase is BlockPhase.DROPPED:
                self._give_back(lease, block)

    def _give_back(self, lease: WriteLease, block: PendingBlock) -> None:
        """Give back the frame of a dropped block whose writer is done with it."""
        if block.frame == NO_FRAME:
            return
        self.unfinished.count(lease, -1)
        self._space.allocator.give_back(block.frame)
        block.frame = NO_FRAME
        self._say_no_more(lease)

    def _end_if_done(self, lease: WriteLease) -> bool:
        ended = super()._end_if_done(lease)
        if ended:
            if lease.frames:
                self.waiting[lease.lease_id] = lease
            else:
                lease.blocks = {}  # they refer back to it: only the garbage collector would find them
            if not lease.owner.internal:
                self.ages.observe(int((self._clock_s() - lease.started_s) * 1e9))
        return ended

    # --- checking --------------------------------------------------------------------------------

    def _all(self) -> Iterator[WriteLease]:
        yield from super()._all()
        yield from self.waiting.values()

    def owners(self) -> Iterator[list[tuple[int, PendingBlock]]]:
        """Frames of pending blocks, and of dropped ones whose writer may still write to them, each with its block.

        In parts, of the state at the first of them. A block dropped meanwhile may come twice.
        """
        pending = list(self.pending.by_key.values())
        leases = [*self.leases.values(), *self.quarantined.values()]
        for first in range(0, len(pending), BLOCKS_AT_ONCE):
            part = pending[first : first + BLOCKS_AT_ONCE]
            yield [(block.frame, block) for block in part if block.frame != NO_FRAME]
        for first in range(0, len(leases), LEASES_AT_ONCE):
            blocks = (block for lease in leases[first : first + LEASES_AT_ONCE] for block in lease.blocks.values())
            dropped = (block for block in blocks if block.phase is _DROPPED)
            yield [(block.frame, block) for block in dropped if block.frame != NO_FRAME]


def _some_coming(blocks: Iterable[PendingBlock | None]) -> bool:
    """True if any of these blocks is to be published: it is complete, and so is each block before it.

    False if that takes very long to see.
    """
    waits: set[PendingBlock] = set()  # asked already, and below a block that is being written
    for block in blocks:
        while block is not None and block.phase is _HELD and block not in waits:
            if block.parent_block is None:
                return True
            if len(waits) >= MAX_RESERVE:
                return False
            waits.add(block)
            block = block.parent_block
    return False


def _states(blocks: Iterable[PendingBlock | None]) -> list[CommitState]:
    seen = CommitState.VISIBLE  # nearly always; a dict of enumeration members takes a call for each look
    return [seen if block and block.phase is _VISIBLE else _state(block) for block in blocks]


def _state(block: PendingBlock | None) -> CommitState:
    return _COMMIT_STATE[BlockPhase.DROPPED if block is None else block.phase]
