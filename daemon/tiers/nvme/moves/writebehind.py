"""Write-behind, DRAM to NVMe: new blocks are written later, parents first, and stay in DRAM while there is room.

    published ─┐
    matched  ──┼─► queue ─► slot, I/O ─► (parent is here?) ─► index, row
    shutdown ─┘     └ not now: lane             └ no: parked until it is

A block is written once: a block that is here already is clean. A block that cannot be written (no parent here, no
budget, a full queue) stays in DRAM and is considered again when it is asked for. A block that only has to wait (for its
disk, for a slot of its size) does so in a lane of its directory and size, in order and with what follows it, and delays
no other lane. Blocks of windows have no parent and wait for none.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Block, Events
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies.fresh_stores import is_below
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, WriteOp
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.fairness import Fairness, Room
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.placement import ShelfPlacement, near
from tiercache.daemon.tiers.nvme.shelf import Shelf, StoredBlock
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

MAX_QUEUED = 65_536
MAX_LANE = 16_384
"""Blocks waiting in one lane; further ones are passed over."""
MAX_IN_FLIGHT_BYTES = 64 << 20
MAX_IN_FLIGHT = 1024
"""Writes in progress on one shelf, and their bytes."""
AT_ONCE = 64
"""Blocks considered before the loop serves others."""
SETTLED_WITH_EACH = 16
"""Written blocks made visible with each one that the disk has written: a run, nearly always all that waited for it."""
SETTLED_AT_ONCE = 64
SETTLE_NS = 1_000_000
"""Those that are left: so many in one go, or for so long plus the one in progress."""

Name = tuple[int, bytes]
"""Namespace number and key."""


class WantedWrite(NamedTuple):
    """A block to be written. `before`: of a windowed one the key of the block before it, if known."""

    namespace: Namespace
    key: bytes
    asked_again: bool
    before: bytes = b""


class _Write(NamedTuple):
    """One block being written to a slot."""

    namespace: Namespace
    key: bytes
    parent: bytes
    shelf: Shelf
    slot: int
    frame: int
    epoch: int
    said: Block | None


class WriteBehind:
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
        self.pump_ns = math.inf
        """`pump` stops after so much of this thread's CPU time, when the block in progress is done."""
        self.budget = budget
        self.codec = codec
        self._sealed = codecs.SEALED if sealed else 0
        self.written_blocks = 0
        self.written_bytes = 0
        self.saved_bytes = 0  # bytes saved by a codec
        self.skipped_by_budget = 0
        self.skipped_by_worth = 0
        self.skipped_by_quota = 0
        self.skipped_without_parent = 0
        self.skipped_queue_full = 0
        self.failed_blocks = 0
        self.skipped_too_large = 0  # blocks that no segment can hold
        self.coming_bytes = 0
        """Bytes of the blocks that are being written, or are written and not visible yet."""
        self._events = events
        self._soon = soon  # asks for a `pump` before the next tick
        self._placement = placement
        self._fairness = fairness
        self._space = space
        self._regions = regions
        self._queue: deque[WantedWrite] = deque()
        self._queued: set[Name] = set()
        self._lanes: dict[tuple[Shelf, int], deque[WantedWrite]] = {}  # by shelf and slot size
        self._in_lane: dict[Name, Shelf] = {}
        self._loads: dict[Shelf, tuple[int, int]] = {}  # writes in progress, and their bytes
        self._flying: dict[Name, _Write] = {}
        self._parked: dict[Name, list[tuple[_Write, StoredBlock]]] = {}  # complete, by the parent that is not
        self._complete: deque[tuple[_Write, StoredBlock]] = deque()  # those whose parent has come or was lost
        self._held: dict[Name, int] = {}  # the entry there that a write in progress holds: its parent
        self._below: dict[Name, dict[Name, None]] = {}  # writes whose parent is being written itself
        self._taken: dict[Shelf, list[WriteOp]] = {}
        self._writable: dict[Shelf, bool] = {}
        self._forms: dict[tuple[int, bool], tuple[int, int]] = {}
        self._rest: Iterator[tuple[Namespace, bytes]] | None = None
        self._end_s = math.inf

    # --- what is to be written -------------------------------------------------------------------

    def add(self, namespace: Namespace, key: bytes, asked_again: bool, before: bytes = b"") -> None:
        """A block in DRAM that may be worth writing; see `WantedWrite`."""
        name = namespace.number, key
        if name in self._queued or name in self._flying or name in self._in_lane:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.skipped_queue_full += 1
            return
        self._queued.add(name)
        self._queue.append(WantedWrite(namespace, key, asked_again, before))
        self._soon()

    def slots_of(self, shelf: Shelf) -> list[int]:
        """Slots of writes that are in progress or wait for their parent's."""
        return [write.slot for write in self._flying.values() if write.shelf is shelf]

    def pending(self) -> Counter[int]:
        """Number of writes in progress or waiting for their parent's, by namespace number."""
        return Counter(number for number, _ in self._flying)

    def add_rest(self, blocks: Iterable[tuple[Namespace, bytes]], end_s: float) -> None:
        """At shutdown: everything else, parents first; taken when the queue is empty.

        Blocks that cannot be written before `end_s` (time.monotonic()) are given up.
        """
        self._rest, self._end_s = iter(blocks), end_s

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return len(self._queue) + len(self._in_lane)

    @property
    def room(self) -> int:
        """How many more may wait."""
        return MAX_QUEUED - len(self._queue)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the writes in progress."""
        return sum(size for _, size in self._loads.values())

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._queue or self._in_lane or self._flying or self._parked or self._rest)

    def give_up(self, shelf: Shelf) -> None:
        """A directory has gone: blocks that wait for it stay in DRAM; writes in progress end by themselves."""
        for place in [place for place in self._lanes if place[0] is shelf]:
            del self._lanes[place]
        self._in_lane = {name: other for name, other in self._in_lane.items() if other is not shelf}
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
        done, until_ns = 0, time.thread_time_ns() + self.pump_ns
        self._writable.clear()
        self._fairness.look_again()
        for (lanes_shelf, _), lane in self._lanes.items():
            while lane and done < AT_ONCE and not self._is_full(lanes_shelf):
                done += 1
                if self._begin(lane[0]) is not None:
                    break
                gone = lane.popleft()
                del self._in_lane[gone.namespace.number, gone.key]
                if time.thread_time_ns() >= until_ns:
                    done = AT_ONCE
        # Blocks that cannot start on any shelf stay in the queue: moving them to a lane first would cost as much again.
        while done < AT_ONCE and not all(map(self._is_full, self._placement.shelves)):
            following = self._next()
            if following is None:
                break
            done += 1
            shelf = self._begin(following)
            if shelf is not None:
                self._wait(shelf, following)
            if time.thread_time_ns() >= until_ns:
                done = AT_ONCE
        self._submit()
        return done == AT_ONCE

    def _is_full(self, shelf: Shelf) -> bool:
        """Whether enough writes are in progress on a shelf."""
        writes, size_bytes = self._loads.get(shelf, (0, 0))
        return writes >= MAX_IN_FLIGHT or size_bytes >= MAX_IN_FLIGHT_BYTES

    def _may_write(self, shelf: Shelf) -> bool:
        """Whether a shelf can be written to, asked once per `pump`."""
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

    def _begin(self, wanted: WantedWrite) -> Shelf | None:
        """Start one write, or pass over it; returns the shelf to wait for, if any."""
        namespace, key = wanted.namespace, wanted.key
        index, size, name = self._space.index, namespace.size_class.frame_bytes, (namespace.number, key)
        entry = namespace.table.get(key)
        if entry == NO_ENTRY or not index.attached(entry):
            return None  # evicted from DRAM before its turn
        parent = index.key[index.parent[entry]]
        if name not in self._in_lane and (namespace.number, parent) in self._in_lane:
            return self._in_lane[namespace.number, parent]  # a lane keeps the order
        shelf = self._shelf_of(wanted, parent)
        if shelf is None:
            self.skipped_without_parent += 1
            return None
        if shelf.has(namespace, key) or name in self._flying:
            return None
        if shelf.slot_bytes(namespace) > shelf.directory.segment_bytes:
            self.skipped_too_large += 1
            return None
        if not self.budget.admits(size, wanted.asked_again):
            self.skipped_by_budget += 1
            return None
        if self._is_full(shelf) or not self._may_write(shelf):
            return shelf
        if self.budget.bytes_per_day and not shelf.admits(namespace, namespace.table.policy.worth(entry)):
            self.skipped_by_worth += 1
            return None
        room = self._fairness.room(shelf, namespace, parent)
        if room is not Room.HERE:
            self.skipped_by_quota += room is Room.NONE
            return shelf if room is Room.SOON else None
        slot = shelf.take_slot(namespace, parent)
        if slot == NO_FRAME:
            return shelf
        said = None if self._events is None else self._events.known(namespace.number, key)[0]
        self._take(_Write(namespace, key, parent, shelf, slot, index.frame[entry], shelf.epoch(namespace), said))
        return None

    def _shelf_of(self, wanted: WantedWrite, parent: bytes) -> Shelf | None:
        """Where the parent is or is being written; a root's child goes where it is, or by its key. None: nowhere."""
        namespace, key, placement = wanted.namespace, wanted.key, self._placement
        if parent:
            flying = self._flying.get((namespace.number, parent))
            return flying.shelf if flying is not None else placement.with_block(namespace, parent)
        found = placement.with_block(namespace, key)
        if found is not None or not namespace.table.windowed:
            return found or placement.home(key)
        return placement.window(namespace, key, wanted.before, partial(self._going, namespace))

    def _going(self, namespace: Namespace, key: bytes) -> Shelf | None:
        """Where a block of that key is being written or waits for its disk, of this namespace or else of a near one."""
        for number in (namespace.number, *near(namespace)):
            name = number, key
            if name in self._flying:
                return self._flying[name].shelf
            if name in self._in_lane:
                return self._in_lane[name]
        return None

    def _take(self, write: _Write) -> None:
        """Queue a write for `_submit`, holding its frame and its slot.

        Both belong to the kernel until the op is done, whatever becomes of the block meanwhile.
        """
        namespace, region = write.namespace, self._regions[write.frame >> REGION_SHIFT]
        frame_bytes = namespace.size_class.frame_bytes
        codec, kind = self._form(namespace)
        self._space.allocator.hold(write.frame)
        op = WriteOp(
            done=lambda op: self._done(write, op),
            slot=write.slot,
            address=region.address + (write.frame & OFFSET_MASK),
            length=namespace.spec.block_bytes,
            key=write.key,
            fingerprint=namespace.fingerprint,
            codec=codec,
            kind=kind,
        )
        self._keep_parent(write)
        self._flying[namespace.number, write.key] = write
        self.coming_bytes += frame_bytes
        self._fairness.took(write.shelf, namespace)
        self._count(write.shelf, 1, frame_bytes)
        self.budget.charge(frame_bytes)
        self._taken.setdefault(write.shelf, []).append(op)

    def _keep_parent(self, write: _Write) -> None:
        """Keep the parent of a block from being evicted before the block is there."""
        number, shelf = write.namespace.number, write.shelf
        name, parent_name = (number, write.key), (number, write.parent)
        if parent_name in self._flying:
            self._below.setdefault(parent_name, {})[name] = None  # perhaps again: an earlier try may have failed
        elif write.parent and (parent := shelf.table(write.namespace).get(write.parent)) != NO_ENTRY:
            self._hold(shelf, name, parent)

    def _hold(self, shelf: Shelf, name: Name, parent: int) -> None:
        shelf.index.pin(parent)
        self._held[name] = parent

    def _let_go(self, shelf: Shelf, name: Name) -> None:
        """A write is over."""
        namespace = self._flying.pop(name).namespace
        namespace.use.pending_below_blocks -= 1
        self.coming_bytes -= namespace.size_class.frame_bytes
        parent = self._held.pop(name, NO_ENTRY)
        if parent != NO_ENTRY:
            shelf.index.unpin(parent)

    def _form(self, namespace: Namespace) -> tuple[int, int]:
        """Codec and kind of checksum for a namespace's blocks."""
        name = namespace.number, namespace.direct
        form = self._forms.get(name)
        if form is None:
            spec = namespace.spec
            form = codecs.codec_number(self.codec, codecs.element_bytes(spec.dtype)) | self._sealed, CHECKSUM_XXH3
            # Blocks that clients read on the disk themselves are stored raw, with a checksum that a GPU computes.
            if namespace.direct and not self._sealed and spec.block_bytes % PAGE_BYTES == 0:
                form = codecs.RAW, CHECKSUM_LANES
            self._forms[name] = form
        return form

    def _count(self, shelf: Shelf, writes: int, size_bytes: int) -> None:
        before = self._loads.get(shelf, (0, 0))
        self._loads[shelf] = before[0] + writes, before[1] + size_bytes

    def _submit(self) -> None:
        """Submit the queued writes together, so that neighbouring slots share a system call."""
        for shelf, ops in self._taken.items():
            for op in ops[shelf.queue.submit_many(ops, DiskPriority.WRITE) :]:
                op.outcome = DiskOutcome.CANCELLED
                op.done(op)
        self._taken.clear()

    def _done(self, write: _Write, op: WriteOp) -> None:
        frame_bytes = write.namespace.size_class.frame_bytes
        self._space.allocator.unhold(write.frame)
        self._count(write.shelf, -1, -frame_bytes)
        if write.shelf.retired and not self._loads[write.shelf][0]:
            del self._loads[write.shelf]
        elif self._loads[write.shelf][1] < MAX_IN_FLIGHT_BYTES // 2 and (self._queue or self._in_lane):
            self._soon()  # not at each one: blocks that start together share system calls
        if op.outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still read the frame
        if op.outcome is not DiskOutcome.OK:
            self.failed_blocks += 1
            if op.outcome is DiskOutcome.IO_ERROR:
                write.shelf.health.failed(os.strerror(op.errno))
            self._lose(write, failed=op.outcome is DiskOutcome.IO_ERROR)
            if self._complete:  # those that waited for it
                self._soon()
            return
        write.shelf.slots.write_worked()
        if op.codec != codecs.RAW:
            saved = frame_bytes - op.moved_bytes  # negative where encryption takes a page more
            self.saved_bytes += max(0, saved)
            self.budget.charge(-saved)
        stored = StoredBlock(NO_ENTRY, write.slot, op.stored_length, op.codec, op.checksum, op.kind)
        if write.parent and (write.namespace.number, write.parent) in self._flying:
            self._parked.setdefault((write.namespace.number, write.parent), []).append((write, stored))
        else:
            self._complete.append((write, stored))
            if self.settle(SETTLED_WITH_EACH):
                self._soon()

    def settle(self, most: int = SETTLED_AT_ONCE) -> bool:
        """Make a slice of complete blocks visible; True while there is more."""
        done, until_ns = 0, time.perf_counter_ns() + SETTLE_NS
        while self._complete and done < most:
            self._settle(*self._complete.popleft())
            done += 1
            if time.perf_counter_ns() >= until_ns:
                break
        return bool(self._complete)

    def _settle(self, write: _Write, stored: StoredBlock) -> None:
        """A write is complete, and not parked: make the block visible if its parent is."""
        shelf, name = write.shelf, (write.namespace.number, write.key)
        flushed = write.epoch != shelf.epoch(write.namespace)
        table = shelf.table(write.namespace)
        parent = table.get(write.parent) if write.parent else table.root
        here = shelf.has(write.namespace, write.key)
        if flushed or here or shelf.retired or parent == NO_ENTRY or not shelf.index.attached(parent):
            self._lose(write)
            return
        shelf.add(write.namespace, write.key, write.parent, write.slot, stored, write.said)
        if (entry := write.namespace.table.get(write.key)) != NO_ENTRY:
            is_below(self._space.index, entry)
        self.written_blocks += 1
        self.written_bytes += stored.stored_length
        for below in self._below.pop(name, ()):
            other = self._flying.get(below)
            # It may have failed and be rewritten below another block: keys that clients make up are no chains.
            if other is not None and other.parent == write.key and other.shelf is shelf:
                self._hold(shelf, below, table.get(write.key))
        self._let_go(shelf, name)
        self._complete.extend(self._parked.pop(name, ()))

    def _lose(self, write: _Write, failed: bool = False) -> None:
        """A write has failed, perhaps on the disk (`failed`). Those that wait for it will not find their parent."""
        name = write.namespace.number, write.key
        self._below.pop(name, None)
        self._let_go(write.shelf, name)
        if failed:
            write.shelf.slots.put_aside(write.slot)
        else:
            write.shelf.allocator.give_back(write.slot)
        self._complete.extend(self._parked.pop(name, ()))
