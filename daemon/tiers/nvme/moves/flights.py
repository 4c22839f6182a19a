"""Writes in progress: from a slot that was taken until the block is visible on its shelf, or lost.

    take ─► I/O ─► (parent is here?) ─► index, row
                       └ no: parked until it is

What becomes visible does so by the run, each block below the one before it: one step of the index, one change of the
catalog.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Block, Events
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies.fresh_stores import are_below
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, WriteOp
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.fairness import Fairness
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.shelf import Shelf, StoredBlock
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

MAX_IN_FLIGHT_BYTES = 64 << 20
MAX_IN_FLIGHT = 1024
"""Writes in progress on one shelf, and their bytes."""
SETTLED_AT_ONCE = 64
SETTLE_NS = 1_000_000
"""Written blocks made visible: so many in one go, or for so long plus the run in progress."""

Name = tuple[int, bytes]
"""Namespace number and key."""


class Flight(NamedTuple):
    """One block being written to a slot."""

    namespace: Namespace
    key: bytes
    parent: bytes
    shelf: Shelf
    slot: int
    frame: int
    epoch: int
    said: Block | None


class Flights(ABC):
    """Event loop only; never blocks. `soon()` asks for work before the next tick."""

    def __init__(
        self,
        space: Space,
        regions: dict[int, Region],
        budget: WriteBudget,
        fairness: Fairness,
        codec: str,
        soon: Callable[[], None],
        events: Events | None,
        sealed: bool,
    ) -> None:
        self.budget = budget
        self.codec = codec
        self.written_blocks = 0
        self.written_bytes = 0
        self.saved_bytes = 0  # bytes saved by a codec
        self.failed_blocks = 0
        self.coming_bytes = 0
        """Bytes of the blocks that are being written, or are written and not visible yet."""
        self._sealed = codecs.SEALED if sealed else 0
        self._events = events
        self._soon = soon
        self._fairness = fairness
        self._space = space
        self._regions = regions
        self._loads: dict[Shelf, tuple[int, int]] = {}  # writes in progress, and their bytes
        self._flying: dict[Name, Flight] = {}
        self._parked: dict[Name, list[tuple[Flight, StoredBlock]]] = {}  # complete, by the parent that is not
        self._complete: deque[tuple[Flight, StoredBlock]] = deque()  # those whose parent has come or was lost
        self._held: dict[Name, int] = {}  # the entry there that a write in progress holds: its parent
        self._below: dict[Name, dict[Name, None]] = {}  # writes whose parent is being written itself
        self._taken: dict[Shelf, list[WriteOp]] = {}
        self._forms: dict[tuple[int, bool], tuple[int, int]] = {}

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the writes in progress."""
        return sum(size for _, size in self._loads.values())

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether blocks wait to be written."""

    def _is_full(self, shelf: Shelf) -> bool:
        """Whether enough writes are in progress on a shelf."""
        writes, size_bytes = self._loads.get(shelf, (0, 0))
        return writes >= MAX_IN_FLIGHT or size_bytes >= MAX_IN_FLIGHT_BYTES

    def _room(self, shelf: Shelf, frame_bytes: int) -> int:
        """How many writes of that size may begin before the shelf is full; one that has begun is not divided."""
        writes, size_bytes = self._loads.get(shelf, (0, 0))
        return min(MAX_IN_FLIGHT - writes, -((size_bytes - MAX_IN_FLIGHT_BYTES) // frame_bytes))

    # --- taken -----------------------------------------------------------------------------------

    def _take(
        self, shelf: Shelf, namespace: Namespace, parent: bytes, entries: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Queue the writes of a run for `_submit`, holding their frames and slots.

        `entries` in DRAM, each below the one before it, the first below `parent`. Frames and slots belong to the kernel
        until the ops are done, whatever becomes of the blocks meanwhile.
        """
        number, epoch, count = namespace.number, shelf.epoch(namespace), len(slots)
        length, fingerprint, frame_bytes = namespace.spec.block_bytes, namespace.fingerprint, self._bytes_of(namespace)
        codec, kind = self._form(namespace)
        keys = [self._space.index.key[entry] for entry in entries]
        frames = [self._space.index.frame[entry] for entry in entries]
        said = [None] * count if self._events is None else self._events.known(number, b"".join(keys))
        regions, done, flying, ops = self._regions, self._done, self._flying, self._taken.setdefault(shelf, [])
        self._space.allocator.hold_many(frames)
        first = True
        for key, frame, slot, its in zip(keys, frames, slots, said, strict=True):
            write = Flight(namespace, key, parent, shelf, slot, frame, epoch, its)
            ops.append(
                WriteOp(
                    done=partial(done, write),
                    slot=slot,
                    address=regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK),
                    length=length,
                    key=key,
                    fingerprint=fingerprint,
                    codec=codec,
                    kind=kind,
                )
            )
            if first:
                self._keep_parent(write)
                first = False
            else:
                self._below.setdefault((number, parent), {})[number, key] = None
            flying[number, key] = write
            parent = key
        self.coming_bytes += count * frame_bytes
        self._fairness.took(shelf, namespace, count)
        self._count(shelf, count, count * frame_bytes)
        self.budget.charge(count * frame_bytes)

    @staticmethod
    def _bytes_of(namespace: Namespace) -> int:
        return namespace.size_class.frame_bytes

    def _keep_parent(self, write: Flight) -> None:
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

    # --- done ------------------------------------------------------------------------------------

    def _done(self, write: Flight, op: WriteOp) -> None:
        """The disk is done with a write. What it makes visible waits for `settle`, so that a run does so together."""
        namespace, shelf, outcome = write.namespace, write.shelf, op.outcome
        frame_bytes = namespace.size_class.frame_bytes
        self._space.allocator.unhold(write.frame)
        writes, size_bytes = self._loads[shelf]
        writes, size_bytes = self._loads[shelf] = writes - 1, size_bytes - frame_bytes
        if shelf.retired and not writes:
            del self._loads[shelf]
        elif size_bytes < MAX_IN_FLIGHT_BYTES // 2 and self.waiting:
            self._soon()  # not at each one: blocks that start together share system calls
        if outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still read the frame
        if outcome is not DiskOutcome.OK:
            self.failed_blocks += 1
            if outcome is DiskOutcome.IO_ERROR:
                shelf.health.failed(os.strerror(op.errno))
            self._lose(write, failed=outcome is DiskOutcome.IO_ERROR)
            if self._complete:  # those that waited for it
                self._soon()
            return
        shelf.slots.write_worked()
        if op.codec != codecs.RAW:
            saved = frame_bytes - op.moved_bytes  # negative where encryption takes a page more
            self.saved_bytes += max(0, saved)
            self.budget.charge(-saved)
        stored = StoredBlock(NO_ENTRY, write.slot, op.stored_length, op.codec, op.checksum, op.kind)
        parent = namespace.number, write.parent
        if write.parent and parent in self._flying:
            self._parked.setdefault(parent, []).append((write, stored))
        else:
            self._complete.append((write, stored))
            self._soon()

    def settle(self, most: int = SETTLED_AT_ONCE) -> bool:
        """Make a slice of complete blocks visible; True while there is more."""
        done, until_ns = 0, time.perf_counter_ns() + SETTLE_NS
        while self._complete and done < most:
            done += self._settle(*self._complete.popleft(), most - done)
            if time.perf_counter_ns() >= until_ns:
                break
        return bool(self._complete)

    def _settle(self, write: Flight, stored: StoredBlock, most: int) -> int:
        """A write is complete, and not parked: make the block visible if its parent is, and those parked below it.

        Returns how many writes are over, at most `most`.
        """
        shelf, namespace = write.shelf, write.namespace
        flushed = write.epoch != shelf.epoch(namespace)
        table = shelf.table(namespace)
        parent = table.get(write.parent) if write.parent else table.root
        here = shelf.has(namespace, write.key)
        if flushed or here or shelf.retired or parent == NO_ENTRY or not shelf.index.attached(parent):
            self._lose(write)
            return 1
        run = self._run_of(write, stored, table, most)
        keys = [one.key for one, _ in run]
        blocks = [block for _, block in run]
        entries = shelf.add_run(namespace, keys, write.parent, blocks, [one.said for one, _ in run])
        dram = namespace.table.get
        are_below(self._space.index, [entry for key in keys if (entry := dram(key)) != NO_ENTRY])
        self.written_blocks += len(run)
        self.written_bytes += sum(block.stored_length for block in blocks)
        names = [(namespace.number, key) for key in keys]
        for name in names:
            self._let_go(shelf, name)
        for name, entry in zip(names, entries, strict=True):
            for below in self._below.pop(name, ()):
                other = self._flying.get(below)
                # It may have failed and be rewritten below another block: keys that clients make up are no chains.
                if other is not None and other.parent == name[1] and other.shelf is shelf:
                    self._hold(shelf, below, entry)
        self._complete.extend(self._parked.pop(names[-1], ()))
        return len(run)

    def _run_of(self, write: Flight, stored: StoredBlock, table: Table, most: int) -> list[tuple[Flight, StoredBlock]]:
        """A block that becomes visible, and parked ones that can do so with it, each below the one before it.

        What is parked below any but the last of them comes next in `_complete`.
        """
        run, number = [(write, stored)], write.namespace.number
        while len(run) < most:
            waiting = self._parked.pop((number, run[-1][0].key), None)
            if waiting is None:
                break
            first = waiting[0][0]
            if first.shelf is not write.shelf or first.epoch != write.epoch or table.get(first.key) != NO_ENTRY:
                self._complete.extend(waiting)
                break
            run.append(waiting[0])
            self._complete.extend(waiting[1:])
        return run

    def _lose(self, write: Flight, failed: bool = False) -> None:
        """A write has failed, perhaps on the disk (`failed`). Those that wait for it will not find their parent."""
        name = write.namespace.number, write.key
        self._below.pop(name, None)
        self._let_go(write.shelf, name)
        if failed:
            write.shelf.slots.put_aside(write.slot)
        else:
            write.shelf.allocator.give_back(write.slot)
        self._complete.extend(self._parked.pop(name, ()))
