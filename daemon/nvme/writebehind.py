"""DRAM to NVMe: new blocks are written behind, parents first, and stay in DRAM as long as they may.

    published ─┐
    matched  ──┼─► queue ─► slot, I/O ─► (parent is here?) ─► index, row
    shutdown ─┘                              └ no: parked until it is

A block is written once: one that is here already is clean. Whatever cannot be written now (no
parent here, no budget, a full queue) stays in DRAM and has another chance when it is asked for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tiercache.arena import Region
from tiercache.checksum import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.daemon.allocator import NO_FRAME
from tiercache.daemon.nvme import codecs
from tiercache.daemon.nvme.blockio import Outcome, WriteOp
from tiercache.daemon.nvme.budget import WriteBudget
from tiercache.daemon.nvme.directory import PAGE_BYTES
from tiercache.daemon.nvme.io import Priority
from tiercache.daemon.nvme.shelf import Shelf, Stored
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.space import Namespace, Space
from tiercache.messages import OFFSET_MASK, REGION_SHIFT

MAX_QUEUED = 65_536
MAX_IN_FLIGHT_BYTES = 64 << 20
AT_ONCE = 64
"""Blocks looked at before others are served."""

Name = tuple[int, bytes]
"""Namespace number and key."""


class _Write(NamedTuple):
    """One block on its way to a slot."""

    namespace: Namespace
    key: bytes
    parent: bytes
    shelf: Shelf
    slot: int
    frame: int
    epoch: int


class WriteBehind:
    """Event loop only; nothing here blocks."""

    def __init__(
        self, shelves: list[Shelf], space: Space, regions: dict[int, Region], budget: WriteBudget,
        codec: str = "raw",
    ) -> None:  # fmt: skip
        self.budget = budget
        self.codec = codec
        self.written_blocks = 0
        self.written_bytes = 0
        self.saved_bytes = 0  # that a codec has kept from the disk
        self.skipped_by_budget = 0
        self.skipped_without_parent = 0
        self.skipped_queue_full = 0
        self.failed_blocks = 0
        self.in_flight_bytes = 0
        self._shelves = shelves
        self._space = space
        self._regions = regions
        self._queue: deque[tuple[Namespace, bytes, bool]] = deque()
        self._queued: set[Name] = set()
        self._flying: dict[Name, _Write] = {}
        self._parked: dict[Name, list[tuple[_Write, Stored]]] = {}
        self._taken: dict[Shelf, list[WriteOp]] = {}
        self._rest: Iterator[tuple[Namespace, bytes]] = iter(())

    # --- what is to be written -------------------------------------------------------------------

    def add(self, namespace: Namespace, key: bytes, asked_again: bool) -> None:
        """A block of DRAM that may be worth writing."""
        name = namespace.number, key
        if name in self._queued or name in self._flying:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.skipped_queue_full += 1
            return
        self._queued.add(name)
        self._queue.append((namespace, key, asked_again))

    def slots_of(self, shelf: Shelf) -> list[int]:
        """Slots of writes that are under way or wait for their parent's."""
        return [write.slot for write in self._flying.values() if write.shelf is shelf]

    def add_rest(self, blocks: Iterable[tuple[Namespace, bytes]]) -> None:
        """At the end: everything else, parents first; taken when the queue is empty."""
        self._rest = iter(blocks)

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._queue and not self._flying and not self._parked

    def _next(self) -> tuple[Namespace, bytes, bool] | None:
        if self._queue:
            namespace, key, asked_again = self._queue.popleft()
            self._queued.discard((namespace.number, key))
            return namespace, key, asked_again
        for namespace, key in self._rest:
            return namespace, key, True
        return None

    # --- writing ---------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Begin writes as far as there is room for them; True when it stopped for others' sake."""
        more = True
        for _ in range(AT_ONCE):
            following = self._next() if self.in_flight_bytes < MAX_IN_FLIGHT_BYTES else None
            if following is None:
                more = False
                break
            if not self._begin(*following):
                namespace, key, _ = following
                self._queue.appendleft(following)
                self._queued.add((namespace.number, key))
                more = False
                break
        self._submit()
        return more

    def _begin(self, namespace: Namespace, key: bytes, asked_again: bool) -> bool:
        """Begin one write, or pass over it; False when it should be tried again later."""
        index, size = self._space.index, namespace.spec.frame_bytes
        entry = namespace.table.get(key)
        if entry == NO_ENTRY or namespace.table.windowed:
            return True  # gone from DRAM before its turn
        parent = index.key[index.parent[entry]]
        shelf = self._shelf_of(namespace, key, parent)
        if shelf is None:
            self.skipped_without_parent += 1
            return True
        if shelf.has(namespace, key):
            return True
        if not self.budget.admits(size, asked_again):
            self.skipped_by_budget += 1
            return True
        if shelf.loading or shelf.catalog.full or not shelf.health.may_write:
            return False
        slot = shelf.take_slot(namespace)
        if slot == NO_FRAME:
            return False
        self._take(_Write(namespace, key, parent, shelf, slot, index.frame[entry], shelf.epoch(namespace)))
        return True

    def _shelf_of(self, namespace: Namespace, key: bytes, parent: bytes) -> Shelf | None:
        """Where the parent is or is going; a root's child goes by its key. None: nowhere."""
        if not parent:
            return self._shelves[int.from_bytes(key[:4], "little") % len(self._shelves)]
        flying = self._flying.get((namespace.number, parent))
        if flying is not None:
            return flying.shelf
        for shelf in self._shelves:
            if shelf.has(namespace, parent):
                return shelf
        return None

    def _take(self, write: _Write) -> None:
        """Put a write down for `_submit`, with both of its ends held.

        They are the kernel's until the op is done, whatever becomes of the block meanwhile.
        """
        spec, region = write.namespace.spec, self._regions[write.frame >> REGION_SHIFT]
        # What clients read on the disk themselves is as it is, with a checksum that a GPU computes.
        direct = write.namespace.direct and spec.block_bytes % PAGE_BYTES == 0
        codec = codecs.RAW if direct else codecs.codec_number(self.codec, codecs.element_bytes(spec.dtype))
        self._space.allocator.hold(write.frame)
        op = WriteOp(
            done=lambda op: self._done(write, op), slot=write.slot,
            address=region.address + (write.frame & OFFSET_MASK), length=spec.block_bytes,
            key=write.key, fingerprint=write.namespace.fingerprint, codec=codec,
            kind=CHECKSUM_LANES if direct else CHECKSUM_XXH3,
        )  # fmt: skip
        self._flying[write.namespace.number, write.key] = write
        self.in_flight_bytes += spec.frame_bytes
        self.budget.charge(spec.frame_bytes)
        self._taken.setdefault(write.shelf, []).append(op)

    def _submit(self) -> None:
        """Hand over what was taken, together, so that neighbouring slots share a system call."""
        for shelf, ops in self._taken.items():
            for op in ops[shelf.queue.submit_many(ops, Priority.WRITE) :]:
                op.outcome = Outcome.CANCELLED
                op.done(op)
        self._taken.clear()

    def _done(self, write: _Write, op: WriteOp) -> None:
        self._space.allocator.unhold(write.frame)
        self.in_flight_bytes -= write.namespace.spec.frame_bytes
        if op.outcome is Outcome.ABANDONED:
            return  # only at the end: the kernel may still write to the slot
        if op.outcome is not Outcome.OK:
            self.failed_blocks += 1
            if op.outcome is Outcome.IO_ERROR:
                write.shelf.health.failed(os.strerror(op.errno))
            self._lose(write)
            return
        write.shelf.health.worked()
        saved = write.namespace.spec.frame_bytes - op.moved_bytes
        self.saved_bytes += saved
        self.budget.charge(-saved)
        stored = Stored(NO_ENTRY, write.slot, op.stored_length, op.codec, op.checksum, op.kind)
        if write.parent and (write.namespace.number, write.parent) in self._flying:
            self._parked.setdefault((write.namespace.number, write.parent), []).append((write, stored))
        else:
            self._settle(write, stored)

    def _settle(self, first: _Write, stored: Stored) -> None:
        """A write is complete and its parent settled: it becomes visible, and those that waited for it."""
        ready = [(first, stored)]
        while ready:
            write, stored = ready.pop()
            shelf, name = write.shelf, (write.namespace.number, write.key)
            flushed = write.epoch != shelf.epoch(write.namespace)
            table = shelf.table(write.namespace)
            parent = table.get(write.parent) if write.parent else table.root
            here = shelf.has(write.namespace, write.key)
            if flushed or here or parent == NO_ENTRY or not shelf.index.attached(parent):
                self._lose(write)
                continue
            shelf.add(write.namespace, write.key, write.parent, write.slot, stored)
            self.written_blocks += 1
            self.written_bytes += stored.stored_length
            del self._flying[name]
            ready.extend(self._parked.pop(name, ()))

    def _lose(self, first: _Write) -> None:
        """A write came to nothing, and with it those that wait for it."""
        doomed = [first]
        while doomed:
            write = doomed.pop()
            name = write.namespace.number, write.key
            del self._flying[name]
            write.shelf.allocator.give_back(write.slot)
            doomed.extend(waiting for waiting, _ in self._parked.pop(name, ()))
