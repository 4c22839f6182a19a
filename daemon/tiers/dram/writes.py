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
from typing import NamedTuple

from tiercache.daemon.events.events import Events, Named
from tiercache.daemon.ground.slices import AnswerNow, Steps
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE, NO_LEASE, BlockState, CommitState

from .leases import Owner
from .pending_blocks import PendingBlocks
from .space import Namespace, Space
from .store_leases import StoreLeases
from .unfinished import Unfinished
from .write_lease import BlockPhase, PendingRun, Reservation, WriteLease

_COMMIT_STATE = {
    BlockPhase.VISIBLE: CommitState.VISIBLE,
    BlockPhase.HELD: CommitState.HELD,
    BlockPhase.DROPPED: CommitState.DROPPED,
}
VISIBLE_WITHIN_S = 0.1
"""How long a commit waits at most until its blocks are visible: clients wait half a second for an answer."""
LEASES_AT_ONCE, RUNS_AT_ONCE = 4, 16
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
        entry, above = namespace.table.root, None
        if parent and not namespace.table.windowed:
            entry = namespace.table.get(parent)
            if entry != NO_ENTRY and not self._space.index.attached(entry):
                return Reservation(NO_LEASE, [], [], parent_missing=True)  # flushed, with all that follows it
            above = self.pending.by_key.get((namespace.number, parent)) if entry == NO_ENTRY else None
            if entry == NO_ENTRY and above is None:
                return Reservation(NO_LEASE, [], [], parent_missing=True)
        states, entry = self._present(namespace, keys, entry) if above is None else ([], NO_ENTRY)
        lease = WriteLease(self, owner, self._clock_s(), ttl_s, namespace.size_class.frame_bytes)
        lease.named = named
        if namespace.table.windowed:
            lease.chain = parent, keys
        # Pinned before any eviction, so that room for a child is not made of its ancestors.
        if entry != NO_ENTRY:
            self._space.index.pin(entry)
        refused_by_quota = self._space.counters.refused_by_quota_blocks
        last = _Last(entry, above, 0 if above is None else above.keys.index(parent))
        frames = self._reserve_rest(lease, namespace, keys, states, last)
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
        last: _Last,
    ) -> list[int]:
        """Continue from `last`, the deepest present ancestor, until there is no room or no chain.

        Returns the frames of the lease.
        """
        first = len(states)
        split = [keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, len(keys), KEY_BYTES)]
        if len(split) >= MANY and self._are_new(namespace, split):
            fresh = dict(zip(split, range(first, first + len(split)), strict=True))  # keys that need a frame, and where
            states.extend([_FRAME] * len(split))
        else:
            fresh, last = self._sort(lease, namespace, split, states, last)
        most = self.unfinished.most_places(lease.owner, lease.frame_bytes)
        frames = self._space.take_frames(namespace, min(len(fresh), most))
        if frames and last.run is not None and last.at + 1 < last.run.count:
            self.pending.split(last.run, last.at + 1)  # new blocks hang below the last one of a run
        self.pending.add(lease, namespace, fresh, frames, last.entry, last.run)
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
        last: _Last,
    ) -> tuple[dict[bytes, int], _Last]:
        """See `_reserve_rest`. Returns the keys that need a frame, and what the first of them hangs below."""
        table, pending, fresh = namespace.table, self.pending.by_key, dict[bytes, int]()
        for key in keys:
            found = table.get(key)
            if found != NO_ENTRY:
                if not table.windowed or self._space.index.parent[found] != table.root:
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
            if not table.windowed:
                at = 0 if other is None else other.keys.index(key)
                if other is None or fresh or not last.is_above(other, at):
                    # Its parent was dropped while it is being written, or the list is not a chain.
                    if other is None or not self.pending.is_orphan(other):
                        self._count_broken(lease.owner)
                    break
                last = _Last(NO_ENTRY, other, at)
            states.append(_PENDING)
        return fresh, last

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
        runs = self.complete(owner, lease_id, numbers)
        until_s = self._clock_s() + VISIBLE_WITHIN_S
        with suppress(AnswerNow):
            while self.pending.publishing and self._clock_s() < until_s and _some_coming(runs):
                yield  # `work` publishes them
        return _states(runs)

    def complete(self, owner: Owner, lease_id: int, numbers: Sequence[int]) -> list[PendingRun | None]:
        """Note that these blocks are complete, and publish a slice of them. Returns the run of each; None for those of
        no lease."""
        lease = self._find(owner, lease_id)
        if lease is None:
            return [None] * len(numbers)
        pending, complete, at = self.pending, list[PendingRun](), 0
        while at < len(numbers):
            run = lease.blocks.get(numbers[at])
            first = 0 if run is None else numbers[at] - run.place
            end = first + (1 if run is None else _consecutive(numbers[at : at + run.count - first]))
            at += end - first
            if run is not None and run.phase is _WRITING:
                run, first, end = pending.alone(run, first, end), 0, end - first
                if self._is_whole(run) and not (pending.emptying and pending.is_taken_back(run)):
                    run.phase = _HELD
                    complete.append(run)
                else:
                    pending.drop(run)
            if run is not None and run.phase is _DROPPED:
                self._give_back(lease, run, first, end)
        runs = list(map(lease.blocks.get, numbers))
        # All of them become complete before the first is published, so that runs become visible at once.
        if complete:
            self.unfinished.complete(lease, sum([run.count for run in complete]))
            self._space.namespaces[complete[0].table.number].use.used_s = self._clock_s()
            pending.publish(complete)
        pending.drop_some()
        self._end_if_done(lease)
        return runs

    def abort(self, owner: Owner, lease_id: int, finished: bool) -> None:
        """Drop what was not committed. Unless `finished`, its frames go into quarantine."""
        super().abort(owner, lease_id, finished)
        self.pending.drop_some()

    def fail(self, owner: Owner, lease_id: int, number: int) -> None:
        """The copy into one block failed and has ended: drop it, and what hangs below it."""
        lease = self._find(owner, lease_id)
        run = lease.blocks.get(number) if lease is not None else None
        if lease is None or run is None:
            return
        if run.phase is _WRITING:
            run = self.pending.split(run, number - run.place)
            self.pending.drop(run)
            self.pending.drop_some()
        if run.phase is _DROPPED:
            self._give_back(lease, run, number - run.place, number - run.place + 1)
        self._end_if_done(lease)

    def writable_block(self, owner: Owner, lease_id: int, number: int) -> PendingRun | None:
        """A block that may still be written to, as a run by itself."""
        lease = self._find(owner, lease_id)
        run = lease.blocks.get(number) if lease is not None and not lease.over else None
        if run is None or run.phase is not _WRITING:
            return None
        return self.pending.alone(run, number - run.place, number - run.place + 1)

    def _is_whole(self, run: PendingRun) -> bool:
        """True if its writer can have written all of it. Bytes that did not come as payload are a former owner's."""
        mapped = run.lease.owner.mapped
        return mapped or run.written >= self._space.namespaces[run.table.number].spec.block_bytes

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
        for lease in self.pending.take_back_some():
            self._free(lease)
            self._end_if_done(lease)
        return self.pending.busy

    # --- the ends of leases ----------------------------------------------------------------------

    def expire(self) -> None:
        """Give up expired leases, a slice of them."""
        super().expire()
        self.pending.drop_some()

    def _close(self, lease: WriteLease) -> None:
        for run in dict.fromkeys(lease.blocks.values()):
            if run.phase is _WRITING:
                self.pending.drop(run)
        self._say_no_more(lease)

    def _free(self, lease: WriteLease) -> None:
        for run in dict.fromkeys(lease.blocks.values()):
            if run.phase is _DROPPED:
                self._give_back(lease, run, 0, run.count)

    def _give_back(self, lease: WriteLease, run: PendingRun, first: int, end: int) -> None:
        """Give back frames of dropped blocks whose writer is done with them."""
        frames = [frame for frame in run.frames[first:end] if frame != NO_FRAME]
        if not frames:
            return
        self.unfinished.count(lease, -len(frames))
        run.frames[first:end] = [NO_FRAME] * (end - first)
        for frame in frames:
            self._space.allocator.give_back(frame)
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

    def owners(self) -> Iterator[list[tuple[int, FrameOwner]]]:
        """Frames of pending blocks, and of dropped ones whose writer may still write to them, each with its owner.

        In parts, of the state at the first of them. A block dropped meanwhile may come twice.
        """
        pending = list(dict.fromkeys(self.pending.by_key.values()))
        leases = [*self.leases.values(), *self.quarantined.values()]
        for first in range(0, len(pending), RUNS_AT_ONCE):
            yield _frames(pending[first : first + RUNS_AT_ONCE])
        for first in range(0, len(leases), LEASES_AT_ONCE):
            runs = (run for lease in leases[first : first + LEASES_AT_ONCE] for run in lease.blocks.values())
            yield _frames(dict.fromkeys(run for run in runs if run.phase is _DROPPED))


class _Last(NamedTuple):
    """The block before the next one of a chain: `entry` in the index, or block `at` of a pending `run`."""

    entry: int
    run: PendingRun | None
    at: int

    def is_above(self, other: PendingRun, at: int) -> bool:
        """True if block `at` of a pending run hangs right below it."""
        if at:
            return other is self.run and at == self.at + 1
        last = self.run is None or self.at == self.run.count - 1
        return last and other.parent is self.run and other.parent_entry == self.entry


class FrameOwner(NamedTuple):
    """A block that a frame is written for."""

    run: PendingRun
    place: int


def _frames(runs: Iterable[PendingRun]) -> list[tuple[int, FrameOwner]]:
    places = [
        (frame, FrameOwner(run, place)) for run in runs for place, frame in zip(run.places, run.frames, strict=True)
    ]
    return [(frame, owner) for frame, owner in places if frame != NO_FRAME]


def _consecutive(numbers: Sequence[int]) -> int:
    """How many leading numbers follow one another."""
    if len(numbers) == 1 or list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return len(numbers)
    return next(place for place, number in enumerate(numbers) if number != numbers[0] + place)


def _some_coming(runs: Iterable[PendingRun | None]) -> bool:
    """True if any of these blocks is to be published: it is complete, and so is each block before it.

    False if that takes very long to see.
    """
    waits: set[PendingRun] = set()  # asked already, and below a block that is being written
    for run in runs:
        while run is not None and run.phase is _HELD and run not in waits:
            if run.parent is None:
                return True
            if len(waits) >= MAX_RESERVE:
                return False
            waits.add(run)
            run = run.parent
    return False


def _states(runs: Iterable[PendingRun | None]) -> list[CommitState]:
    seen = CommitState.VISIBLE  # nearly always; a dict of enumeration members takes a call for each look
    return [seen if run and run.phase is _VISIBLE else _state(run) for run in runs]


def _state(run: PendingRun | None) -> CommitState:
    return _COMMIT_STATE[BlockPhase.DROPPED if run is None else run.phase]
