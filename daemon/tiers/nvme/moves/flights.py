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
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, groupby, repeat
from typing import Any

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Block, Events
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies.fresh_stores import are_below
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, WriteOp
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority, most_together
from tiercache.daemon.tiers.nvme.shelf.shelf import Forms, Shelf
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

from .budget import WriteBudget
from .fairness import Fairness
from .placement import HeadCopies

MAX_IN_FLIGHT_BYTES = 64 << 20
MAX_IN_FLIGHT = 1024
"""Writes in progress on one shelf, and their bytes."""
SETTLED_AT_ONCE = 128
SETTLE_NS = 1_000_000
"""Written blocks made visible in one turn, and the time after which it ends with the run in progress."""

Name = tuple[int, bytes]
"""Namespace number and key."""


_COLUMNS = "slots", "keys", "codecs", "kinds", "stored_lengths", "checksums", "outcomes", "sizes", "frames", "said"


@dataclass(slots=True, eq=False, kw_only=True)
class Flight(WriteOp):
    """Blocks of a chain being written, each below the one before it, the first below `parent`.

    Of two flights, the one that began later has the higher `number`.
    """

    namespace: Namespace
    parent: bytes
    shelf: Shelf
    frames: list[int]
    epoch: int
    number: int
    said: list[Block | None]

    def part(self, first: int, end: int) -> Flight:
        """Some of its blocks alone. The disk is done with it."""
        some = copy(self)
        for name in _COLUMNS:
            setattr(some, name, getattr(self, name)[first:end])
        some.parent = self.keys[first - 1] if first else self.parent
        return some


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
        self._parked: dict[Name, list[Flight]] = {}  # complete, by the parent that is not
        self._complete: deque[Flight] = deque()  # those whose parent has come or was lost
        self._held: dict[Name, int] = {}  # the entry there that a write in progress holds: its parent
        self._below: dict[Name, dict[Name, None]] = {}  # flights whose parent is being written itself, by their firsts
        self._taken: dict[Shelf, list[Flight]] = {}
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
        self, shelf: Shelf, namespace: Namespace, parent: bytes, entries: Sequence[int], slots: list[int]
    ) -> None:
        """Queue the writes of a run for `_submit`, holding their frames and slots.

        `entries` in DRAM, each below the one before it, the first below `parent`. Frames and slots belong to the kernel
        until the ops are done, whatever becomes of the blocks meanwhile.
        """
        number, count, frame_bytes = namespace.number, len(slots), self._bytes_of(namespace)
        codec, kind = self._form(namespace)
        all_keys = [self._space.index.key[entry] for entry in entries]
        all_frames = [self._space.index.frame[entry] for entry in entries]
        known: list[Block | None] = (
            [None] * count if self._events is None else self._events.known(number, b"".join(all_keys))
        )
        regions, taken, most = self._regions, self._taken.setdefault(shelf, []), most_together(frame_bytes)
        self._space.allocator.hold_many(all_frames)
        for first in range(0, count, most):
            keys, frames = all_keys[first : first + most], all_frames[first : first + most]
            flight = Flight(
                done=self._done,
                slots=slots[first : first + most],
                addresses=[regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK) for frame in frames],
                length=namespace.spec.block_bytes,
                keys=keys,
                fingerprint=namespace.fingerprint,
                codecs=[codec] * len(keys),
                kinds=[kind] * len(keys),
                namespace=namespace,
                parent=parent,
                shelf=shelf,
                frames=frames,
                epoch=shelf.epoch(namespace),
                number=next(self._numbers),
                said=known[first : first + most],
            )
            taken.append(flight)
            self._keep_parent(flight)
            self._flying.update(zip(zip(repeat(number), keys), repeat(flight)))
            parent = keys[-1]
        self.coming_bytes += count * frame_bytes
        self._fairness.took(shelf, namespace, count)
        self._count(shelf, count, count * frame_bytes)
        self.budget.charge(count * frame_bytes)

    @staticmethod
    def _bytes_of(namespace: Namespace) -> int:
        return namespace.size_class.frame_bytes

    def _keep_parent(self, flight: Flight) -> None:
        """Keep the parent of a flight from being evicted before its blocks are there."""
        number, shelf = flight.namespace.number, flight.shelf
        name, parent_name = (number, flight.keys[0]), (number, flight.parent)
        if self._flies(parent_name, shelf):
            self._below.setdefault(parent_name, {})[name] = None  # perhaps again: an earlier try may have failed
        elif flight.parent and (parent := shelf.table(flight.namespace).get(flight.parent)) != NO_ENTRY:
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
        for name in names if held else ():
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
        """Submit the queued writes together, those to adjoining slots as one operation: they share a system call."""
        for shelf, flights in self._taken.items():
            ops = [self._joined(some) if some[1:] else some[0] for some in _neighbours(flights)]
            for op in ops[shelf.queue.submit_many(ops, DiskPriority.WRITE) :]:
                op.end(0, op.count, DiskOutcome.CANCELLED)
                op.done(op)
        self._taken.clear()

    def _joined(self, flights: Sequence[Flight]) -> WriteOp:
        """One operation for flights of one namespace."""
        return WriteOp(
            done=partial(self._parted, flights),
            slots=_column(flights, "slots"),
            addresses=_column(flights, "addresses"),
            length=flights[0].length,
            keys=_column(flights, "keys"),
            fingerprint=flights[0].fingerprint,
            codecs=_column(flights, "codecs"),
            kinds=_column(flights, "kinds"),
        )

    def _parted(self, flights: Sequence[Flight], op: WriteOp) -> None:
        """The disk is done with flights that were joined."""
        first = 0
        for flight in flights:
            end = first + flight.count
            for name in ("codecs", "stored_lengths", "checksums", "outcomes", "sizes"):
                setattr(flight, name, getattr(op, name)[first:end])
            flight.errnos = {place - first: number for place, number in op.errnos.items() if first <= place < end}
            first = end
            self._done(flight)

    # --- done ------------------------------------------------------------------------------------

    def _done(self, flight: Flight) -> None:
        """The disk is done with writes. What they make visible waits for `settle`."""
        shelf = flight.shelf
        self._space.allocator.unhold_many(flight.frames)
        self._count(shelf, -flight.count, -flight.count * self._bytes_of(flight.namespace))
        writes, size_bytes = self._loads[shelf]
        if shelf.retired and not writes:
            del self._loads[shelf]
        elif size_bytes < MAX_IN_FLIGHT_BYTES // 2 and self.waiting:
            self._soon()  # not at each one: blocks that start together share system calls
        for well in [flight] if flight.is_well else self._what_is_well(flight):
            if well.codecs.count(codecs.RAW) < well.count:
                self._count_saved(well)
            self._park(well)
            shelf.slots.growth.write_worked()
        if self._complete:
            self._soon()

    def _count_saved(self, flight: Flight) -> None:
        """Count what a codec has saved; negative where encryption takes a page more."""
        frame_bytes = self._bytes_of(flight.namespace)
        for codec, size in zip(flight.codecs, flight.sizes, strict=True):
            if codec != codecs.RAW:
                self.saved_bytes += max(0, frame_bytes - size)
                self.budget.charge(size - frame_bytes)

    def _what_is_well(self, flight: Flight) -> Iterator[Flight]:
        """The blocks of a flight that were written, between those that were not."""
        for outcome, places in groupby(range(flight.count), key=flight.outcomes.__getitem__):
            first, *others = places
            part = flight.part(first, first + 1 + len(others))
            if outcome is DiskOutcome.OK:
                yield part
            elif outcome is not DiskOutcome.ABANDONED:  # only at shutdown: the kernel may still read the frame
                self._failed(part, outcome, flight.errnos.get(first, 0))

    def _park(self, flight: Flight) -> None:
        """Keep written blocks until `settle` may make them visible.

        They wait for a parent that began before them, never for one that began later: that could be a circle, since
        clients make up keys that are no chains. A parent that failed and is written again comes too late for them.
        """
        parent = flight.namespace.number, flight.parent
        if flight.parent and self._flies(parent, flight.shelf) and self._flying[parent].number < flight.number:
            self._parked.setdefault(parent, []).append(flight)
        else:
            self._complete.append(flight)

    def _failed(self, flight: Flight, outcome: DiskOutcome, number: int) -> None:
        """Writes have not been carried out, with this errno."""
        self.failed_blocks += flight.count
        failed = outcome is DiskOutcome.IO_ERROR
        if failed:
            flight.shelf.health.failed(f"blocks cannot be written: {os.strerror(number)}", flight.count)
        self._lose(flight, failed)

    def settle(self, most: int = SETTLED_AT_ONCE) -> bool:
        """Make a slice of complete blocks visible; True while there is more."""
        done, until_ns = 0, time.perf_counter_ns() + SETTLE_NS
        while self._complete and done < most:
            done += self._settle(self._complete.popleft(), most - done)
            if time.perf_counter_ns() >= until_ns:
                break
        return bool(self._complete)

    def _settle(self, first: Flight, most: int) -> int:
        """Writes are complete, and not parked: make their blocks visible if the parent is, and those parked below.

        Returns how many writes are over: at most `most`, and the rest of a flight.
        """
        shelf, namespace, number = first.shelf, first.namespace, first.namespace.number
        flushed = first.epoch != shelf.epoch(namespace)
        table = shelf.table(namespace)
        parent = table.get(first.parent) if first.parent else table.root
        void = flushed or shelf.retired or parent == NO_ENTRY or not shelf.index.attached(parent)
        if void or shelf.has(namespace, first.keys[0]):
            # A block that is here already is lost alone: what follows it hangs below the other copy.
            lost = first if void else first.part(0, 1)
            if lost.count < first.count:
                self._complete.append(first.part(lost.count, first.count))
            self._lose(lost)
            return lost.count
        run = self._longest(first, table, most)
        keys = _column(run, "keys")
        forms = Forms(*(_column(run, name) for name in Forms._fields))
        said = None if self._events is None else _column(run, "said")
        entries = shelf.add_run(namespace, keys, first.parent, forms, said)
        are_below(self._space.index, namespace.table.get_many(keys))
        self.written_blocks += len(keys)
        self.written_bytes += sum(forms.stored_lengths)
        self._copies.written_bytes += len(keys) * self._bytes_of(namespace)
        names = list(zip(repeat(number), keys))
        self._let_go(shelf, namespace, names)
        for name, entry in zip(names, entries, strict=True) if self._below else ():
            if name in self._below:
                self._hold_for_those_below(shelf, name, entry)
        for name in names if self._parked else ():
            self._complete.extend(self._parked.pop(name, ()))
        return len(keys)

    def _hold_for_those_below(self, shelf: Shelf, name: Name, entry: int) -> None:
        """A block is visible: flights below it hold it."""
        for below in self._below.pop(name):
            other = self._flying.get(below)
            # It may have failed and be rewritten below another block: keys that clients make up are not chains.
            if other is not None and other.parent == name[1] and other.shelf is shelf:
                self._hold(shelf, below, entry)

    def _longest(self, first: Flight, table: Table, most: int) -> list[Flight]:
        """Blocks that become visible together: those of a flight, and parked ones below them.

        The others come next in `_complete`.
        """
        number, run = first.namespace.number, [self._leading(first, table)]
        most -= run[0].count
        while most > 0:
            waiting = self._parked.pop((number, run[-1].keys[-1]), None)
            if waiting is None:
                break
            if table.get(waiting[0].keys[0]) != NO_ENTRY:
                self._complete.extend(waiting)
                break
            self._complete.extend(waiting[1:])
            run.append(self._leading(waiting[0], table))
            most -= run[-1].count
        return run

    def _leading(self, flight: Flight, table: Table) -> Flight:
        """The blocks of a flight, whose first is not here, up to one that others have made visible meanwhile."""
        if len(table.missing(flight.keys)) == flight.count:
            return flight
        end = next(place for place, key in enumerate(flight.keys) if table.get(key) != NO_ENTRY)
        self._complete.append(flight.part(end, flight.count))
        return flight.part(0, end)

    def _lose(self, flight: Flight, failed: bool = False) -> None:
        """Writes have failed, perhaps on the disk (`failed`). Those that wait for them will not find their parent."""
        shelf, names = flight.shelf, [(flight.namespace.number, key) for key in flight.keys]
        self._let_go(shelf, flight.namespace, names)
        for name, slot in zip(names, flight.slots, strict=True):
            self._below.pop(name, None)
            if failed:
                shelf.slots.put_aside(slot)
            else:
                shelf.allocator.give_back(slot)
            self._complete.extend(self._parked.pop(name, ()))


def _neighbours(flights: Sequence[Flight]) -> Iterator[list[Flight]]:
    """Those that follow one another to adjoining slots, no more than may be together."""
    some, blocks, end = list[Flight](), 0, 0
    for flight in flights:
        blocks += flight.count
        alike = bool(some) and flight.namespace is some[0].namespace and flight.slots[0] == end
        if some and not (alike and blocks <= most_together(flight.namespace.size_class.frame_bytes)):
            yield some
            some, blocks = [], flight.count
        some.append(flight)
        end = flight.slots[-1] + flight.sizes[-1]
    if some:
        yield some


def _column(run: Sequence[Flight], name: str) -> list[Any]:
    """A field of all blocks of a run."""
    if len(run) == 1:
        return list(getattr(run[0], name))
    return list(chain.from_iterable([getattr(flight, name) for flight in run]))
