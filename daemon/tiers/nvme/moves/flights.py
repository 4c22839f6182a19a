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
from dataclasses import dataclass
from itertools import count, takewhile

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
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

from .budget import WriteBudget
from .fairness import Fairness
from .placement import HeadCopies

MAX_IN_FLIGHT_BYTES = 64 << 20
MAX_IN_FLIGHT = 1024
"""Writes in progress on one shelf, and their bytes."""
SETTLED_AT_ONCE = 64
SETTLE_NS = 1_000_000
"""Written blocks made visible in one turn, and the time after which it ends with the run in progress."""

Name = tuple[int, bytes]
"""Namespace number and key."""


@dataclass(slots=True, eq=False, kw_only=True)
class Flight(WriteOp):
    """One block being written to a slot. Of two, the one that began later has the higher `number`."""

    namespace: Namespace
    parent: bytes
    shelf: Shelf
    frame: int
    epoch: int
    number: int
    said: Block | None


Run = list[Flight]
"""Written blocks of one namespace, shelf and epoch, each below the one before it."""


class Flights(ABC):
    """Event loop only; never blocks. `soon()` asks for work before the next tick."""

    def __init__(
        self,
        space: Space,
        regions: dict[int, Region],
        budget: WriteBudget,
        fairness: Fairness,
        copies: HeadCopies,
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
        self._copies = copies
        self._space = space
        self._regions = regions
        self._loads: dict[Shelf, tuple[int, int]] = {}  # writes in progress, and their bytes
        self._flying: dict[Name, Flight] = {}
        self._parked: dict[Name, list[Run]] = {}  # complete, by the parent that is not
        self._complete: deque[Run] = deque()  # those whose parent has come or was lost
        self._held: dict[Name, int] = {}  # the entry there that a write in progress holds: its parent
        self._below: dict[Name, dict[Name, None]] = {}  # writes whose parent is being written itself
        self._taken: dict[Shelf, list[Flight]] = {}
        self._on_done: Callable[[Sequence[Flight]], None] = self._done
        """One object for all, by which the queue knows what it may hand over together."""
        self._forms: dict[tuple[int, bool], tuple[int, int]] = {}
        self._numbers = count()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the writes in progress."""
        return sum(size for _, size in self._loads.values())

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """True if blocks wait to be written."""

    def _is_full(self, shelf: Shelf) -> bool:
        """True if enough writes are in progress on a shelf."""
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
        regions, done, flying, ops = self._regions, self._on_done, self._flying, self._taken.setdefault(shelf, [])
        self._space.allocator.hold_many(frames)
        below, above, numbers = self._below, None, self._numbers
        for key, frame, slot, known in zip(keys, frames, slots, said, strict=True):
            write = Flight(
                done=done,
                together=True,
                slot=slot,
                address=regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK),
                length=length,
                key=key,
                fingerprint=fingerprint,
                codec=codec,
                kind=kind,
                namespace=namespace,
                parent=parent,
                shelf=shelf,
                frame=frame,
                epoch=epoch,
                number=next(numbers),
                said=known,
            )
            ops.append(write)
            name = number, key
            if above is None:
                self._keep_parent(write)
            else:
                below.setdefault(above, {})[name] = None
            flying[name] = write
            above, parent = name, key
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
        if self._flies(parent_name, shelf):
            self._below.setdefault(parent_name, {})[name] = None  # perhaps again: an earlier try may have failed
        elif write.parent and (parent := shelf.table(write.namespace).get(write.parent)) != NO_ENTRY:
            self._hold(shelf, name, parent)

    def _flies(self, name: Name, shelf: Shelf) -> bool:
        """True if a block is being written to this shelf."""
        flying = self._flying.get(name)
        return flying is not None and flying.shelf is shelf

    def _hold(self, shelf: Shelf, name: Name, parent: int) -> None:
        shelf.index.pin(parent)
        self._held[name] = parent

    def _let_go(self, shelf: Shelf, namespace: Namespace, names: Sequence[Name]) -> None:
        """Writes are over."""
        flying, held = self._flying, self._held
        namespace.use.pending_below_blocks -= len(names)
        self.coming_bytes -= len(names) * namespace.size_class.frame_bytes
        for name in names:
            del flying[name]
            if name in held:
                shelf.index.unpin(held.pop(name))

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
            refused = ops[shelf.queue.submit_many(ops, DiskPriority.WRITE) :]
            for op in refused:
                op.outcome = DiskOutcome.CANCELLED
            if refused:
                self._done(refused)
        self._taken.clear()

    # --- done ------------------------------------------------------------------------------------

    def _done(self, ops: Sequence[Flight]) -> None:
        """The disk is done with writes of one shelf. What they make visible waits for `settle`."""
        shelf, frame_bytes = ops[0].shelf, [op.namespace.size_class.frame_bytes for op in ops]
        self._space.allocator.unhold_many([op.frame for op in ops])
        writes, size_bytes = self._loads[shelf]
        writes, size_bytes = self._loads[shelf] = writes - len(ops), size_bytes - sum(frame_bytes)
        if shelf.retired and not writes:
            del self._loads[shelf]
        elif size_bytes < MAX_IN_FLIGHT_BYTES // 2 and self.waiting:
            self._soon()  # not at each one: blocks that start together share system calls
        run, well = Run(), DiskOutcome.OK
        for op, size in zip(ops, frame_bytes, strict=True):
            if op.outcome is not well:
                self._failed(op)
                continue
            if op.codec != codecs.RAW:
                saved = size - op.moved_bytes  # negative where encryption takes a page more
                self.saved_bytes += max(0, saved)
                self.budget.charge(-saved)
            if run and _goes_on(run[-1], op):
                run.append(op)
            else:
                run = [op]
                self._park(run)
        if run:
            shelf.slots.growth.write_worked()
        if self._complete:
            self._soon()

    def _park(self, run: Run) -> None:
        """Keep written blocks, or those that become a run with them, until `settle` may make them visible.

        A block waits for a parent that began before it, never for one that began later: that could be a circle, since
        clients make up keys that are no chains. A parent that failed and is written again comes too late for it.
        """
        first = run[0]
        parent = first.namespace.number, first.parent
        if first.parent and self._flies(parent, first.shelf) and self._flying[parent].number < first.number:
            self._parked.setdefault(parent, []).append(run)
        else:
            self._complete.append(run)

    def _failed(self, op: Flight) -> None:
        """A write has not been carried out."""
        if op.outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still read the frame
        self.failed_blocks += 1
        failed = op.outcome is DiskOutcome.IO_ERROR
        if failed:
            op.shelf.health.failed(f"blocks cannot be written: {os.strerror(op.errno)}")
        self._lose(op, failed)

    def settle(self, most: int = SETTLED_AT_ONCE) -> bool:
        """Make a slice of complete blocks visible; True while there is more."""
        done, until_ns = 0, time.perf_counter_ns() + SETTLE_NS
        while self._complete and done < most:
            done += self._settle(self._complete.popleft(), most - done)
            if time.perf_counter_ns() >= until_ns:
                break
        return bool(self._complete)

    def _settle(self, run: Run, most: int) -> int:
        """Writes are complete, and not parked: make their blocks visible if the parent is, and those parked below.

        Returns how many writes are over, at most `most`.
        """
        first = run[0]
        shelf, namespace = first.shelf, first.namespace
        flushed = first.epoch != shelf.epoch(namespace)
        table = shelf.table(namespace)
        parent = table.get(first.parent) if first.parent else table.root
        here = shelf.has(namespace, first.key)
        if flushed or here or shelf.retired or parent == NO_ENTRY or not shelf.index.attached(parent):
            if run[1:]:
                self._complete.append(run[1:])
            self._lose(first)
            return 1
        run = self._longest(run, table, most)
        keys = [op.key for op in run]
        said = None if self._events is None else [op.said for op in run]
        entries = shelf.add_run(namespace, keys, first.parent, run, said)
        are_below(self._space.index, namespace.table.get_many(keys))
        self.written_blocks += len(run)
        self.written_bytes += sum([op.stored_length for op in run])
        self._copies.written_bytes += len(run) * self._bytes_of(namespace)
        number = namespace.number
        names = [(number, key) for key in keys]
        self._let_go(shelf, namespace, names)
        self._hold_for_those_below(shelf, names, entries)
        for name in names if self._parked else ():
            self._complete.extend(self._parked.pop(name, ()))
        return len(run)

    def _hold_for_those_below(self, shelf: Shelf, names: Sequence[Name], entries: Sequence[int]) -> None:
        """These blocks are visible: those below them that are still being written hold them."""
        flying, their_below = self._flying, self._below
        for name, entry in zip(names, entries, strict=True):
            for below in their_below.pop(name, ()):
                other = flying.get(below)
                # It may have failed and be rewritten below another block: keys that clients make up are not chains.
                if other is not None and other.parent == name[1] and other.shelf is shelf:
                    self._hold(shelf, below, entry)

    def _longest(self, run: Run, table: Table, most: int) -> Run:
        """The leading blocks of a run that become visible together, with parked ones below them.

        The others come next in `_complete`.
        """
        number = run[0].namespace.number
        longest = self._leading(run, table, most)
        while len(longest) < most and (waiting := self._parked.pop((number, longest[-1].key), None)):
            if table.get(waiting[0][0].key) != NO_ENTRY:
                self._complete.extend(waiting)
                break
            self._complete.extend(waiting[1:])
            longest = longest + self._leading(waiting[0], table, most - len(longest))
        return longest

    def _leading(self, run: Run, table: Table, most: int) -> Run:
        """The blocks of a run, whose first is not here, up to one that others have made visible meanwhile."""
        keys = [op.key for op in run[:most]]
        end = len(keys)
        if len(table.missing(keys)) < end:
            end = 1 + len(list(takewhile(lambda key: table.get(key) == NO_ENTRY, keys[1:])))
        if end < len(run):
            self._complete.append(run[end:])
        return run[:end]

    def _lose(self, write: Flight, failed: bool = False) -> None:
        """A write has failed, perhaps on the disk (`failed`). Those that wait for it will not find their parent."""
        name = write.namespace.number, write.key
        self._below.pop(name, None)
        self._let_go(write.shelf, write.namespace, (name,))
        if failed:
            write.shelf.slots.put_aside(write.slot)
        else:
            write.shelf.allocator.give_back(write.slot)
        self._complete.extend(self._parked.pop(name, ()))


def _goes_on(last: Flight, op: Flight) -> bool:
    """True if a block becomes visible together with the one before it: below it, and begun after it."""
    same = op.namespace is last.namespace and op.epoch == last.epoch
    return op.parent == last.key and same and op.number > last.number
