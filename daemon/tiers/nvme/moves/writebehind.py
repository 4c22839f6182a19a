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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
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
MAX_LANE = 16_384
"""Blocks waiting in one lane; further ones are passed over."""
AT_ONCE = 64
"""Blocks considered before the loop serves others."""


class WantedWrite(NamedTuple):
    """A block to be written. `before`: of a windowed one the key of the block before it, if known."""

    namespace: Namespace
    key: bytes
    asked_again: bool
    before: bytes = b""


class _Begun(NamedTuple):
    """What became of a wanted write: the shelf that it has to wait for, if any, and how many others began with it."""

    waits_for: Shelf | None
    more: int


_PASSED = _Begun(None, 0)


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
        self._queue: deque[WantedWrite] = deque()
        self._queued: set[Name] = set()
        self._lanes: dict[tuple[Shelf, int], deque[WantedWrite]] = {}  # by shelf and slot size
        self._in_lane: dict[Name, Shelf] = {}
        self._writable: dict[Shelf, bool] = {}
        self._rest: Iterator[tuple[Namespace, bytes]] | None = None
        self._end_s = math.inf

    # --- what is to be written -------------------------------------------------------------------

    def add(self, namespace: Namespace, key: bytes, asked_again: bool, before: bytes = b"") -> None:
        """A block in DRAM that may be worth writing; see `WantedWrite`."""
        self.add_many(namespace, (key,), asked_again, before)

    def add_many(self, namespace: Namespace, keys: Iterable[bytes], asked_again: bool, before: bytes = b"") -> None:
        """`add` each of them."""
        queue, queued, flying, in_lane = self._queue, self._queued, self._flying, self._in_lane
        number, before_these = namespace.number, len(queue)
        room = MAX_QUEUED - before_these
        for key in keys:
            name = number, key
            if name in queued or name in flying or name in in_lane:
                continue
            if room <= 0:
                self.skipped_queue_full += 1
                continue
            room -= 1
            queued.add(name)
            queue.append(WantedWrite(namespace, key, asked_again, before))
        if len(queue) > before_these:
            self._soon()

    def slots_of(self, shelf: Shelf) -> list[int]:
        """Slots of writes that are in progress or wait for their parent's."""
        return [write.slot for write in self._flying.values() if write.shelf is shelf]

    def pending(self) -> Counter[int]:
        """Number of writes in progress or waiting for their parent's, by namespace number."""
        return Counter(number for number, _ in self._flying)

    def add_rest(self, blocks: Iterable[tuple[Namespace, bytes]], end_s: float) -> None:
        """At shutdown: everything else, parents first; taken when the queue is empty.

        Blocks that cannot be written before `end_s` (on the clock of `NvmeTier`) are given up.
        """
        self._rest, self._end_s = iter(blocks), end_s

    def _lose(self, write: Flight, failed: bool = False) -> None:
        super()._lose(write, failed)
        if self._end_s < math.inf and not failed:  # perhaps a flush of other blocks was in between: it is still dirty
            self.add(write.namespace, write.key, asked_again=True)

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return len(self._queue) + len(self._in_lane)

    @property
    def room(self) -> int:
        """How many more may wait."""
        return MAX_QUEUED - len(self._queue)

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
            del self._lanes[place]
        self._in_lane = {name: other for name, other in self._in_lane.items() if other is not shelf}
        if self._loads.get(shelf) == (0, 0):
            del self._loads[shelf]
        self._writable.pop(shelf, None)

    def _next(self) -> WantedWrite | None:
        if self._queue:
            wanted = self._queue.popleft()
            self._queued.discard((wanted.namespace.number, wanted.key))
            return wanted
        if self._rest is not None and len(self._in_lane) < MAX_LANE:
            for namespace, key in self._rest:
                return WantedWrite(namespace, key, True)
            self._rest = None
        return None

    # --- writing ---------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Start as many writes as there is room for; True when it stopped to let others run."""
        done, limit = 0, CpuLimit(self.pump_ns)
        self._writable.clear()
        self._fairness.look_again()
        for (lanes_shelf, _), lane in list(self._lanes.items()):
            while lane and done < AT_ONCE and not self._is_full(lanes_shelf):
                shelf, more = self._begin(lane[0], islice(lane, 1, AT_ONCE - done), lanes_shelf)
                done += 1 + more
                if shelf is lanes_shelf:
                    break
                for _ in range(1 + more):
                    gone = lane.popleft()
                    del self._in_lane[gone.namespace.number, gone.key]
                if shelf is not None:
                    self._wait(shelf, gone)  # it goes elsewhere now, and must not keep these waiting
                if limit.over:
                    done = AT_ONCE
        # Blocks that cannot start on any shelf stay in the queue: moving them to a lane first would cost as much again.
        while done < AT_ONCE and not all(map(self._is_full, self._placement.shelves)):
            following = self._next()
            if following is None:
                break
            shelf, more = self._begin(following, islice(self._queue, AT_ONCE - done - 1), None)
            done += 1 + more
            if shelf is not None:
                self._wait(shelf, following)
            for _ in range(more):
                self._next()
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

    def _wait(self, shelf: Shelf, wanted: WantedWrite) -> None:
        """Put a block that cannot be written now into its lane."""
        name = wanted.namespace.number, wanted.key
        if name in self._in_lane:
            return  # at shutdown a waiting block comes by again
        if shelf.offline or shelf.health.off_until_s > self._end_s:
            return  # the deadline comes first
        lane = self._lanes.setdefault((shelf, wanted.namespace.size_class.frame_bytes), deque())
        if len(lane) >= MAX_LANE:
            self.skipped_queue_full += 1
            return
        lane.append(wanted)
        self._in_lane[name] = shelf

    def _begin(self, wanted: WantedWrite, others: Iterable[WantedWrite], lane: Shelf | None) -> _Begun:
        """Start one write, or pass over it; with it the leading ones of `others` that go on in the same chain.

        `lane`: of which shelf all of them are in a lane.
        """
        namespace, key = wanted.namespace, wanted.key
        index, size, name = self._space.index, namespace.size_class.frame_bytes, (namespace.number, key)
        entry = namespace.table.get(key)
        if entry == NO_ENTRY or not index.attached(entry):
            return _PASSED  # evicted from DRAM before its turn
        parent = index.key[index.parent[entry]]
        waits_for = self._in_lane.get((namespace.number, parent))
        if waits_for is not None and self._in_lane.get(name) is not waits_for:
            return _Begun(waits_for, 0)  # a lane keeps the order
        shelf, head = self._shelf_of(wanted, entry, parent)
        if shelf is None:
            self.skipped_without_parent += 1
            return _PASSED
        if shelf.has(namespace, key):  # perhaps it was flushed, and is yet to be unlinked
            return _Begun(shelf, 0) if shelf.find(namespace, key) is None else _PASSED
        if name in self._flying:
            return _PASSED
        if shelf.slot_bytes(namespace) > shelf.directory.segment_bytes:
            self.skipped_too_large += 1
            return _PASSED
        if not self.budget.admits(size, wanted.asked_again):
            self.skipped_by_budget += 1
            return _PASSED
        if self._is_full(shelf) or not self._may_write(shelf):
            return _Begun(shelf, 0)
        if self.budget.bytes_per_day and not shelf.admits(namespace, namespace.table.policy.worth(entry)):
            self.skipped_by_worth += 1
            return _PASSED
        room = self._fairness.room(shelf, namespace, parent)
        if room is not Room.HERE:
            self.skipped_by_quota += room is Room.NONE
            return _Begun(shelf if room is Room.SOON else None, 0)
        if head and not self._copy(shelf, namespace, head):
            return _Begun(shelf, 0)
        entries = [entry, *self._going_on(wanted, entry, shelf, others, lane)]
        slots = shelf.take_slots(namespace, parent, len(entries))
        if not slots:
            return _Begun(shelf, 0)
        self._take(shelf, namespace, parent, entries[: len(slots)], slots)
        return _Begun(None, len(slots) - 1)

    def _going_on(
        self, wanted: WantedWrite, entry: int, shelf: Shelf, others: Iterable[WantedWrite], lane: Shelf | None
    ) -> Iterator[int]:
        """The entries in DRAM of the leading `others` that hang below `wanted`, each below the one before it.

        They begin with it. The run ends before the first about which there is anything else to decide.
        """
        namespace, index, flying, in_lane = wanted.namespace, self._space.index, self._flying, self._in_lane
        table, here = namespace.table, shelf.table(namespace)
        if table.windowed:
            return  # any may go elsewhere
        size, number, parent = namespace.size_class.frame_bytes, namespace.number, index.parent
        most = min(self._room(shelf, size), self._fairness.spare(shelf, namespace))
        limited = self.budget.bytes_per_day > 0
        spare = shelf.slots.spare(shelf.slot_bytes(namespace)) if limited else 0
        for count, other in enumerate(others, 1):
            key = other.key
            below = table.get(key) if other.namespace is namespace else NO_ENTRY
            if count >= most or below == NO_ENTRY or parent[below] != entry:
                return
            name = number, key
            if name in flying or here.get(key) != NO_ENTRY or (lane is None and name in in_lane):
                return
            if limited:
                if not self.budget.admits(size, other.asked_again, before_bytes=count * size) or count == spare:
                    return
                if not spare and not shelf.admits(namespace, table.policy.worth(below)):
                    return
            entry = below
            yield below

    def _shelf_of(self, wanted: WantedWrite, entry: int, parent: bytes) -> tuple[Shelf | None, list[int]]:
        """Where a block goes, and what has to be copied there before it, first blocks first; None: nowhere.

        It goes where its parent is or is being written, except for a branch; a root's child where it is, or by its key.
        """
        namespace, key, placement = wanted.namespace, wanted.key, self._placement
        found = placement.with_block(namespace, key)
        if found is not None:
            return found, []
        if namespace.table.windowed:
            return placement.window(namespace, key, wanted.before, partial(self._going, namespace)), []
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
