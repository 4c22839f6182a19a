"""Write-behind, DRAM to NVMe: new blocks are written later, parents first, and stay in DRAM while there is room.

    published ─┐
    matched  ──┼─► queue ─► slot, I/O ─► (parent is here?) ─► index, row
    shutdown ─┘     └ not now: lane             └ no: parked until it is

A chain's blocks begin by the run: slot, shelf, form and quota are looked up once for all of it. A run ends before the
first block about which there is anything else to decide.

A block is written once: a block that is here already is clean. A block that cannot be written (no parent here, no
budget, a full queue) stays in DRAM and is considered again when it is asked for. A block that only has to wait (for its
disk, for a slot of its size) does so in a lane of its directory and size, in order and with what follows it, and delays
no other lane. Blocks of windows have no parent and wait for none.

A branch may go to another directory than its head (see `placement`). The head is then written there too, before it:
DRAM has it, since DRAM has all blocks before each that it has.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import CpuLimit
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

from .budget import WriteBudget
from .fairness import Fairness, Room
from .flights import Flight, Flights, Name
from .placement import ShelfPlacement, near

MAX_QUEUED = 65_536
MAX_RUN = 1024
"""Blocks of a queued run to which others are added that follow it."""
MAX_LANE = 16_384
"""Blocks waiting in one lane; further ones are passed over."""
AT_ONCE = 128
"""Blocks considered before the loop serves others."""


class WantedRun:
    """Blocks of a chain to be written, in its order; those before `at` have been taken off.

    `before`: of a windowed block, which is a run by itself, the key of the block before it, if known.
    """

    __slots__ = ("asked_again", "at", "before", "keys", "namespace")

    def __init__(self, namespace: Namespace, keys: list[bytes], asked_again: bool, before: bytes = b"") -> None:
        self.namespace = namespace
        self.keys = keys
        self.asked_again = asked_again
        self.before = before
        self.at = 0

    def names(self, first: int, end: int | None = None) -> list[Name]:
        """Those of some of its blocks."""
        return list(zip(repeat(self.namespace.number), self.keys[first:end]))


class _Begun(NamedTuple):
    """What became of a run: the shelf that it has to wait for, if any, and how many blocks were seen to."""

    waits_for: Shelf | None
    blocks: int


_PASSED = _Begun(None, 1)


class WriteBehind(Flights):
    """Event loop only; never blocks."""

    def __init__(
        self,
        placement: ShelfPlacement,
        space: Space,
        regions: dict[int, Region],
        budget: WriteBudget,
        fairness: Fairness,
        codec: str = "raw",
        soon: Callable[[], None] = lambda: None,
        events: Events | None = None,
        sealed: bool = False,
    ) -> None:
        super().__init__(space, regions, budget, fairness, placement.copies, codec, soon, events, sealed)
        self.pump_ns = math.inf
        """CPU time of this thread after which `pump` stops, when the block in progress is done."""
        self.skipped_by_budget = 0
        self.skipped_by_worth = 0
        self.skipped_by_quota = 0
        self.skipped_without_parent = 0
        self.skipped_queue_full = 0
        self.skipped_too_large = 0  # blocks that no segment can hold
        self._placement = placement
        self._queue: deque[WantedRun] = deque()
        self._queued: set[Name] = set()
        self._ends: dict[Name, WantedRun] = {}  # queued runs by their last blocks, for what hangs below these
        self._lanes: dict[tuple[Shelf, int], deque[WantedRun]] = {}  # by shelf and slot size
        self._waiting_in: Counter[tuple[Shelf, int]] = Counter()  # blocks in each lane
        self._in_lane: dict[Name, Shelf] = {}
        self._writable: dict[Shelf, bool] = {}
        self._rest: Iterator[tuple[Namespace, bytes]] | None = None
        self._end_s = math.inf

    # --- what is to be written -------------------------------------------------------------------

    def add_many(self, namespace: Namespace, keys: Sequence[bytes], asked_again: bool, before: bytes = b"") -> None:
        """Blocks in DRAM that may be worth writing: a run of a chain, or one block of a window; see `WantedRun`."""
        number, queued = namespace.number, self._queued
        names = list(dict.fromkeys(zip(repeat(number), keys)))
        for known in (queued, self._flying.keys(), self._in_lane.keys()):
            if known and not known.isdisjoint(names):
                names = [name for name in names if name not in known]
        room = self.room
        if len(names) > room:
            self.skipped_queue_full += len(names) - room
            del names[room:]
        if not names:
            return
        queued.update(names)
        keys = [key for _, key in names]
        above = self._ends.pop((number, self._parent_of(namespace, keys[0])), None)
        if above is not None and above.asked_again is asked_again and len(above.keys) < MAX_RUN:
            above.keys += keys
        else:
            above = WantedRun(namespace, keys, asked_again, before)
            self._queue.append(above)
        self._ends[names[-1]] = above
        self._soon()

    def _parent_of(self, namespace: Namespace, key: bytes) -> bytes:
        """The key of the block before one in DRAM; empty if that is none, or it has gone."""
        entry, index = namespace.table.get(key), self._space.index
        return b"" if entry == NO_ENTRY else index.key[index.parent[entry]]

    def slots_of(self, shelf: Shelf) -> list[int]:
        """Slots of writes that are in progress or wait for their parent's."""
        return [
            slot
            for flight in set(self._flying.values())
            if flight.shelf is shelf
            for key, slot in zip(flight.keys, flight.slots, strict=True)
            if self._flying.get((flight.namespace.number, key)) is flight  # else it is over already
        ]

    def pending(self) -> Counter[int]:
        """Number of writes in progress or waiting for their parent's, by namespace number."""
        return Counter(number for number, _ in self._flying)

    def add_rest(self, blocks: Iterable[tuple[Namespace, bytes]], end_s: float) -> None:
        """At shutdown: everything else, parents first; taken when the queue is empty.

        Blocks that cannot be written before `end_s` (on the clock of `NvmeTier`) are given up.
        """
        self._rest, self._end_s = iter(blocks), end_s

    def _lose(self, flight: Flight, failed: bool = False) -> None:
        super()._lose(flight, failed)
        if self._end_s < math.inf and not failed:  # perhaps a flush of others was in between: they are still dirty
            self.add_many(flight.namespace, flight.keys, asked_again=True)

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return len(self._queued) + len(self._in_lane)

    @property
    def room(self) -> int:
        """How many more may wait."""
        return MAX_QUEUED - len(self._queued)

    @property
    def waiting(self) -> bool:
        """True if blocks wait to be written; at shutdown, whether any before the rest do."""
        return bool(self._queue or self._in_lane)

    @property
    def has_work(self) -> bool:
        """True if `pump` has something to begin, if there is room, or to hand over."""
        return bool(self._queue or self._in_lane or self._rest or self._taken)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._queue or self._in_lane or self._flying or self._parked or self._rest)

    def give_up(self, shelf: Shelf) -> None:
        """A directory has gone: blocks that wait for it stay in DRAM; writes in progress end by themselves."""
        for place in [place for place in self._lanes if place[0] is shelf]:
            del self._lanes[place], self._waiting_in[place]
        self._in_lane = {name: other for name, other in self._in_lane.items() if other is not shelf}
        if self._loads.get(shelf) == (0, 0):
            del self._loads[shelf]
        self._writable.pop(shelf, None)

    def _first(self) -> WantedRun | None:
        """The first run of the queue; at the end one of the rest, which then waits there."""
        if not self._queue and self._rest is not None and len(self._in_lane) < MAX_LANE:
            following = next(self._rest, None)
            if following is None:
                self._rest = None
            else:
                self._queue.append(WantedRun(following[0], [following[1]], asked_again=True))
        return self._queue[0] if self._queue else None

    def _take_off(self, run: WantedRun, end: int) -> None:
        """Blocks of the first run of the queue up to `end` do not wait there any more."""
        self._queued.difference_update(run.names(run.at, end))
        run.at = end
        if end >= len(run.keys) and self._queue and self._queue[0] is run:
            self._queue.popleft()
            self._ends.pop((run.namespace.number, run.keys[-1]), None)

    # --- writing ---------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Start as many writes as there is room for; True when it stopped to let others run."""
        done, limit = 0, CpuLimit(self.pump_ns)
        self._writable.clear()
        self._fairness.look_again()
        for place, lane in list(self._lanes.items()):
            lanes_shelf = place[0]
            while lane and done < AT_ONCE and not self._is_full(lanes_shelf):
                run = lane[0]
                shelf, blocks = self._begin(run, run.at, AT_ONCE - done, lanes_shelf)
                done += blocks
                if shelf is lanes_shelf:
                    break
                first = run.at
                run.at = first + blocks if shelf is None else len(run.keys)
                for name in run.names(first, run.at):
                    del self._in_lane[name]
                self._waiting_in[place] -= run.at - first
                if run.at == len(run.keys):
                    lane.popleft()
                if shelf is not None:
                    self._wait(shelf, run, first)  # it goes elsewhere now, and must not keep these waiting
                if limit.over:
                    done = AT_ONCE
        # Blocks that cannot start on any shelf stay in the queue: moving them to a lane first would cost as much again.
        while done < AT_ONCE and not all(map(self._is_full, self._placement.shelves)):
            following = self._first()
            if following is None:
                break
            first = following.at
            self._take_off(following, first + 1)  # whatever comes up now
            shelf, blocks = self._begin(following, first, AT_ONCE - done, None)
            done += blocks
            if shelf is not None:
                blocks = len(following.keys) - first
                self._wait(shelf, following, first)
            if blocks > 1:
                self._take_off(following, first + blocks)
            if limit.over:
                done = AT_ONCE
        self._submit()
        return done == AT_ONCE

    def _may_write(self, shelf: Shelf) -> bool:
        """True if a shelf can be written to, asked once per `pump`."""
        may = self._writable.get(shelf)
        if may is None:
            may = self._writable[shelf] = shelf.may_write
        return may

    def _wait(self, shelf: Shelf, run: WantedRun, first: int) -> None:
        """Put what is left of a run, which cannot be written now, into its lane."""
        # At shutdown a waiting block comes by again.
        keys = [name[1] for name in run.names(first) if name not in self._in_lane]
        if shelf.offline or shelf.health.off_until_s > self._end_s:
            return  # the deadline comes first
        place = shelf, run.namespace.size_class.frame_bytes
        room = MAX_LANE - self._waiting_in[place]
        if len(keys) > room:
            self.skipped_queue_full += len(keys) - room
            del keys[room:]
        if keys:
            waiting = WantedRun(run.namespace, keys, run.asked_again, run.before)
            self._lanes.setdefault(place, deque()).append(waiting)
            self._in_lane.update(zip(waiting.names(0), repeat(shelf)))
            self._waiting_in[place] += len(keys)

    def _begin(self, run: WantedRun, at: int, most: int, lane: Shelf | None) -> _Begun:
        """Start to write block `at` of a run, or pass over it; with it at most `most` that go on in the same chain.

        `lane`: of which shelf it is in a lane.
        """
        namespace, key = run.namespace, run.keys[at]
        index, size, name = self._space.index, namespace.size_class.frame_bytes, (namespace.number, key)
        entry = namespace.table.get(key)
        if entry == NO_ENTRY or not index.attached(entry):
            return _PASSED  # evicted from DRAM before its turn
        parent = index.key[index.parent[entry]]
        waits_for = self._in_lane.get((namespace.number, parent))
        if waits_for is not None and self._in_lane.get(name) is not waits_for:
            return _Begun(waits_for, 1)  # a lane keeps the order
        shelf, head = self._shelf_of(run, key, entry, parent)
        if shelf is None:
            self.skipped_without_parent += 1
            return _PASSED
        if shelf.has(namespace, key):  # perhaps it was flushed, and is yet to be unlinked
            return _Begun(shelf, 1) if shelf.find(namespace, key) is None else _PASSED
        if name in self._flying:
            return _PASSED
        if shelf.slot_bytes(namespace) > shelf.directory.segment_bytes:
            self.skipped_too_large += 1
            return _PASSED
        if not self.budget.admits(size, run.asked_again):
            self.skipped_by_budget += 1
            return _PASSED
        if self._is_full(shelf) or not self._may_write(shelf):
            return _Begun(shelf, 1)
        if self.budget.bytes_per_day and namespace.table.policy.worth(entry) < shelf.least_worth(namespace):
            self.skipped_by_worth += 1
            return _PASSED
        room = self._fairness.room(shelf, namespace, parent)
        if room is not Room.HERE:
            self.skipped_by_quota += room is Room.NONE
            return _Begun(shelf if room is Room.SOON else None, 1)
        if head and not self._copy(shelf, namespace, head):
            return _Begun(shelf, 1)
        entries = [entry, *self._going_on(run, at, most, entry, shelf, lane)]
        slots = shelf.take_slots(namespace, parent, len(entries))
        if not slots:
            return _Begun(shelf, 1)
        self._take(shelf, namespace, parent, entries[: len(slots)], slots)
        return _Begun(None, len(slots))

    def _going_on(
        self, run: WantedRun, at: int, most: int, entry: int, shelf: Shelf, lane: Shelf | None
    ) -> Sequence[int]:
        """The entries in DRAM of the blocks after `at` that go on in its chain, each below the one before it.

        They begin with it. They end before the first about which there is anything else to decide.
        """
        namespace = run.namespace
        if namespace.table.windowed or at + 1 == len(run.keys):
            return ()  # of a window, any may go elsewhere
        size, flying, in_lane = namespace.size_class.frame_bytes, self._flying, {} if lane else self._in_lane
        most = int(min(most, self._room(shelf, size), self._fairness.spare(shelf, namespace)))
        keys, table, here = run.keys[at + 1 : at + most], namespace.table, shelf.table(namespace)
        entries, parent, above = table.leading(keys), self._space.index.parent, entry
        for count, below in enumerate(entries):
            if parent[below] != above:
                del entries[count:]
                break
            above = below
        names = list(zip(repeat(namespace.number), keys[: len(entries)]))
        known = not (flying.keys().isdisjoint(names) and in_lane.keys().isdisjoint(names))
        if known or len(here.missing(keys[: len(entries)])) < len(entries):
            free = (name not in flying and name not in in_lane and here.get(name[1]) == NO_ENTRY for name in names)
            del entries[list(free).index(False) :]
        if self.budget.bytes_per_day:
            del entries[self._affordable(run, entries, shelf) :]
        return entries

    def _affordable(self, run: WantedRun, entries: Sequence[int], shelf: Shelf) -> int:
        """How many blocks the budget admits after a first one, and are worth the slots that they would take."""
        namespace, size = run.namespace, run.namespace.size_class.frame_bytes
        spare, worth = shelf.slots.spare(shelf.slot_bytes(namespace)), namespace.table.policy.worth
        least = shelf.least_worth(namespace)
        for count, entry in enumerate(entries, 1):
            if not self.budget.admits(size, run.asked_again, before_bytes=count * size) or count == spare:
                return count - 1
            if worth(entry) < least:
                return count - 1
        return len(entries)

    def _shelf_of(self, run: WantedRun, key: bytes, entry: int, parent: bytes) -> tuple[Shelf | None, list[int]]:
        """Where a block goes, and what has to be copied there before it, first blocks first; None: nowhere.

        It goes where its parent is or is being written, except for a branch; a root's child where it is, or by its key.
        """
        namespace, placement = run.namespace, self._placement
        found = placement.with_block(namespace, key)
        if found is not None:
            return found, []
        if namespace.table.windowed:
            return placement.window(namespace, key, run.before, partial(self._going, namespace)), []
        if not parent:
            return placement.home(namespace, key), []
        holders = placement.holders(namespace, parent)
        flying = self._flying.get((namespace.number, parent))
        if flying is not None and flying.shelf not in holders:
            holders.append(flying.shelf)
        if not holders:
            return None, []
        branch = placement.branch(namespace, key, parent, holders)
        head = None if branch is None else self._head(branch.shelf, namespace, entry, branch.most_copied)
        if branch is None or head is None:
            return placement.home(namespace, key, holders), []
        return branch.shelf, head

    def _head(self, shelf: Shelf, namespace: Namespace, entry: int, most: int) -> list[int] | None:
        """The blocks before `entry` that a shelf lacks, as entries in DRAM, the first one first.

        None if they are more than `most`, if one of them is being written to another shelf, or if a copy of them would
        cost too much.
        """
        index, table, number, root = self._space.index, shelf.table(namespace), namespace.number, namespace.table.root
        missing, above = list[int](), index.parent[entry]
        while above != root and len(missing) <= most:
            key = index.key[above]
            flying, there = self._flying.get((number, key)), table.get(key)
            if flying is not None:
                if flying.shelf is not shelf:
                    return None
                break
            if there != NO_ENTRY:
                if not shelf.index.attached(there):
                    return None
                break
            missing.append(above)
            above = index.parent[above]
        count, size = len(missing), namespace.size_class.frame_bytes
        if missing and (
            count > most
            or not self.budget.admits(count * size, asked_again=True)
            or self._fairness.spare(shelf, namespace) <= count
            or shelf.slot_bytes(namespace) > shelf.directory.segment_bytes
        ):
            return None
        return missing[::-1]

    def _copy(self, shelf: Shelf, namespace: Namespace, head: list[int]) -> bool:
        """Begin to write blocks of a head to a further shelf; True when all of them are under way."""
        index, size = self._space.index, namespace.size_class.frame_bytes
        parent = index.key[index.parent[head[0]]]
        most = min(len(head), self._room(shelf, size), AT_ONCE)
        slots = shelf.take_slots(namespace, parent, most) if most > 0 else []
        if slots:
            self._take(shelf, namespace, parent, head[: len(slots)], slots)
            self._copies.copied(len(slots), len(slots) * size)
        return len(slots) == len(head) and not self._is_full(shelf)

    def _going(self, namespace: Namespace, key: bytes) -> Shelf | None:
        """Where a block of that key is being written or waits for its disk, of this namespace or else of a near one."""
        for number in (namespace.number, *near(namespace)):
            name = number, key
            if name in self._flying:
                return self._flying[name].shelf
            if name in self._in_lane:
                return self._in_lane[name]
        return None
