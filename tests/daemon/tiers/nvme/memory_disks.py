"""Disks in memory: what a directory keeps from life to life, and all that can go wrong with it.

A disk does nothing by itself: blocks move and rows are committed when the test says so, in the order that it chooses.

    runner ─► MemoryDirectory    segment files      ┐
              MemoryCatalog      the durable index  ├ of one life; what they keep is the MemoryDisk's
              MemoryQueue        blocks on their way┘
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState, Done, SavedNamespace, Tombstone
from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, Row, RowBatch, RowFields
from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority
from tiercache.daemon.tiers.nvme.disk.block_io import (
    AnyOp,
    BlockForms,
    BlockOp,
    DiskOutcome,
    DiskTransfer,
    TaskOp,
    WriteOp,
    fail,
    view_of,
)
from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.disk.superblock import Superblock
from tiercache.daemon.tiers.nvme.disk.tally import COUNTERS
from tiercache.daemon.tiers.nvme.shelf.parts import OpenDirectory, SavedNames
from tiercache.daemon.tiers.nvme.shelf.slots import slot_of
from tiercache.daemon.tiers.nvme.worker.opening import Plan
from tiercache.errors import DirectoryUnavailable
from tiercache.ground.histograms import Histogram, LatencyHistogram
from tiercache.protocol.checksums import block_checksum, block_seed
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

T = TypeVar("T")

DEPTH = 4
"""Operations of one queue that the kernel has at a time; the others can still be cancelled."""
RETRY_S = 1.0
"""How long a catalog that could not write waits before it tries again."""


@dataclass
class Database:
    """What is committed. All values are immutable, so that a copy of each dict is a snapshot."""

    namespaces: dict[int, SavedNamespace] = field(default_factory=dict)
    rows: dict[int, RowFields] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)
    tombstones: dict[tuple[int, bytes], int] = field(default_factory=dict)
    sequence: int = 0
    key: tuple[bytes, int] = b"", 0

    def copy(self) -> Database:
        return replace(
            self,
            namespaces=dict(self.namespaces),
            rows=dict(self.rows),
            segments=dict(self.segments),
            tombstones=dict(self.tombstones),
        )


class MemoryDisk:
    """The disk of one directory. It outlives its directory's lives.

    What the test may set at any time:
        away: why the directory cannot be used; empty if it can.
        failing: calls that fail with EIO: "read", "write", "segment", "commit".
        hung: nothing comes back any more, and what runs at the end of a life is abandoned.
    """

    def __init__(
        self,
        number: int,
        clock_s: Callable[[], float],
        segments: int = 64,
        segment_bytes: int = 32 << 10,
        most_pending: int = 1 << 30,
    ) -> None:
        """Room for so many segments; its catalog is full with so many changes that are not committed."""
        self.most_segments, self.most_pending = segments, most_pending
        self.segment_bytes = segment_bytes
        self.directory_id = hashlib.blake2b(number.to_bytes(4, "little"), digest_size=16).digest()
        self.clock_s = clock_s
        self.segments: dict[int, bytearray] = {}
        self.database = Database()
        self.away = ""
        self.failing: set[str] = set()
        self.hung = False
        self.is_sound = True
        """Nothing that was committed has been lost or damaged by the test."""
        self.rows_refused = False
        """Rows could not be written at some time, and what hangs below them may have been."""
        self.written: list[bytes] = []
        """Keys of the blocks written in this life."""
        self.read: list[bytes] = []
        self.is_open = False
        self.catalog: MemoryCatalog | None = None
        self.queue: MemoryQueue | None = None
        self._history = [self.database.copy()]  # since the last commit that was synced, that one included

    # --- what the test makes it do -------------------------------------------------------------------

    def step(self, moves: int = 1 << 30, at: int = 0, commits: bool = True) -> bool:
        """End so many operations, beginning with the one at `at` of those in the kernel, and commit what is posted.

        Returns whether anything happened.
        """
        happened = False
        if self.queue is not None:
            happened = self.queue.run(moves, at)
        if commits and self.catalog is not None:
            happened = self.catalog.commit() or happened
        return happened

    def committed(self, synced: bool) -> None:
        """A transaction has ended."""
        if synced:
            self._history.clear()
        self._history.append(self.database.copy())

    def crash(self, landed: int = 0) -> None:
        """As kill -9: nothing waits any more. Bits of `landed`: writes in the kernel that reach the disk."""
        if self.queue is not None:
            self.queue.crash(landed)
        self.catalog = self.queue = None
        self.is_open = False
        self.written, self.read = [], []

    def lose_power(self, commits: int, pages: int) -> None:
        """After a crash: up to so many commits since the last synced one are lost, and some pages have other bytes."""
        del self._history[max(1, len(self._history) - commits) :]
        self.database = self._history[-1].copy()
        self.is_sound = self.is_sound and not commits and not pages
        for segment in self.segments.values():
            for page in range(len(segment) >> 12):
                if pages >> (page % 16) & 1:
                    self._spoil(segment, page << 12)

    def damage(self, which: int) -> bool:
        """Flip a bit of one block that a row is about; False when there is none."""
        places = sorted(self.database.rows)
        if not places:
            return False
        slot = slot_of(places[which % len(places)])
        self._spoil(self.segments[slot >> REGION_SHIFT], (slot & OFFSET_MASK) + which % 4096)
        self.is_sound = False
        return True

    @staticmethod
    def _spoil(segment: bytearray, at: int) -> None:
        segment[at] ^= 1 << at % 8

    # --- what the parts do ---------------------------------------------------------------------------

    def asked(self, name: str) -> None:
        """A call comes; raises OSError if it fails."""
        if name in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def move(self, transfer: DiskTransfer) -> None:
        """Move the bytes of one transfer."""
        self.asked("write" if transfer.writes else "read")
        segment, at = self.segments[transfer.fd], transfer.offset
        for address, size in transfer.pieces:
            if transfer.writes:
                segment[at : at + size] = view_of(address, size)
            else:
                view_of(address, size)[:] = segment[at : at + size]
            at += size
        (self.written if transfer.writes else self.read).extend(transfer.op.keys[transfer.first : transfer.end])

    def check(self) -> list[str]:
        """What a daemon that starts now would find wrong."""
        database, findings = self.database, list[str]()
        if not self.is_sound:
            return []
        names = {(row[2], row[0]) for row in database.rows.values()}
        live = [(row[2], row[0]) for row in database.rows.values() if self._is_live(row)]
        if len(set(live)) != len(live) and not self.rows_refused:
            findings.append("two rows of one block")
        for place, fields in database.rows.items():
            row, slot = Row._make(fields), slot_of(place)
            saved = database.namespaces.get(row.namespace)
            if saved is None:
                findings.append(f"a row of namespace {row.namespace}, which is unknown")
                continue
            if slot >> REGION_SHIFT not in database.segments:
                findings.append(f"a row in segment {slot >> REGION_SHIFT}, whose slots have no size")
            before = row.namespace, row.parent
            alone = row.parent != ROOT_KEY and before not in names and before not in database.tombstones
            if alone and self._is_live(fields) and not self.rows_refused:
                findings.append(f"block {row.key.hex()} without the one before it")
            segment, at = self.segments[slot >> REGION_SHIFT], slot & OFFSET_MASK
            seed = block_seed(row.key, saved.fingerprint, row.length, row.codec, row.kind)
            if block_checksum(memoryview(segment)[at : at + row.stored_length], seed, row.kind) != row.checksum:
                findings.append(f"the slot of block {row.key.hex()} has other bytes")
        return findings

    def _is_live(self, row: RowFields) -> bool:
        """A row that was not flushed."""
        its = self.database
        return row[2] in its.namespaces and row[3] >= max(
            its.namespaces[row[2]].epoch, its.tombstones.get((row[2], row[0]), 0)
        )


class MemoryRunner:
    """Implements `Runner` on disks in memory, by path. The test may put another disk at a path."""

    def __init__(self, disks: dict[Path, MemoryDisk]) -> None:
        self.disks = disks

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        return partial(self._open, plan)

    async def blocking(self, name: str, call: Callable[[], T]) -> T:
        return call()

    def _open(self, plan: Plan, before: Home | None) -> OpenDirectory:
        disk = self.disks[plan.path]
        if disk.away:
            raise DirectoryUnavailable(f"nvme directory {plan.path} cannot be used: {disk.away}")
        if disk.is_open:
            raise DirectoryUnavailable(f"nvme directory {plan.path} cannot be used: its lock is taken, at another path")
        directory = MemoryDirectory(plan, disk, self.disks, before)
        catalog = disk.catalog = MemoryCatalog(disk)
        state = catalog.state()
        return OpenDirectory(directory, catalog, state, SavedNames.read(state), lambda: MemoryQueue(directory, disk))


class MemoryDirectory:
    """Implements `DirectoryFiles`."""

    direct, direct_reason, kept_bytes, trouble = True, "", 0, ""
    worker_pid = worker_starts = 0

    def __init__(self, plan: Plan, disk: MemoryDisk, disks: dict[Path, MemoryDisk], before: Home | None) -> None:
        self.path = plan.path
        self.cap_bytes = plan.cap_bytes
        self.segment_bytes = disk.segment_bytes  # an existing directory keeps its own
        self.cipher: Cipher | None = plan.cipher
        self.superblock = Superblock(disk.directory_id, disk.segment_bytes, 0)
        former = frozenset() if before is None else before.former | {before.directory_id}
        self.home: Home | None = Home(disk.directory_id, None, former - {disk.directory_id})
        self.disk, self._disks = disk, disks
        disk.is_open = True

    @property
    def segments(self) -> list[int]:
        return sorted(self.disk.segments)

    @property
    def segment_count(self) -> int:
        return len(self.disk.segments)

    @property
    def max_segments(self) -> int:
        return self.disk.most_segments

    def fd(self, segment_id: int) -> int:
        """In memory a segment's number does as its descriptor."""
        return segment_id

    def create_segment(self, segment_id: int) -> None:
        self.disk.asked("segment")
        self.disk.segments[segment_id] = bytearray(self.segment_bytes)

    def look(self) -> str:
        return self.disk.away or ("" if self._disks[self.path] is self.disk else "another one is there")

    def close(self) -> None:
        self.disk.is_open = False


class _Change(NamedTuple):
    """`kind`: "row" is refused on failure, "burial" too, and also after any row was refused; "kept" is tried again."""

    apply: Callable[[Database], object]
    done: Done | None
    kind: str
    rows: int = 1
    name: tuple[Any, ...] = ()
    synced: bool = False


class MemoryCatalog:
    """Implements `CatalogRows`; see `Catalog` for the contracts. `commit` does what its thread does."""

    written_bytes = 0

    def __init__(self, disk: MemoryDisk) -> None:
        self.error = ""
        self._disk = disk
        self._posted: list[_Change] = []
        self._kept: dict[tuple[Any, ...], _Change] = {}
        self._refused_rows = False
        self._since_s = self._again_s = 0.0

    def state(self) -> CatalogState:
        its = self._disk.database
        stones = [Tombstone(number, key, epoch) for (number, key), epoch in its.tombstones.items()]
        return CatalogState(
            False, list(its.namespaces.values()), dict(its.segments), stones, its.sequence + 1, its.key[0], its.key[1]
        )

    # --- changes -------------------------------------------------------------------------------------

    def _post(self, change: _Change) -> None:
        if not self._posted:
            self._since_s = self._disk.clock_s()
        self._posted.append(change)

    def insert(self, places: Sequence[int], rows: Sequence[RowFields], done: Done | None = None) -> None:
        def apply(its: Database) -> None:
            its.rows.update(zip(places, rows, strict=True))
            its.sequence = max(its.sequence, *(row[9] for row in rows))

        self._post(_Change(apply, done, "row", len(rows)))

    def delete(self, places: Sequence[int], done: Done | None = None) -> None:
        def apply(its: Database) -> None:
            for place in places:
                its.rows.pop(place, None)

        self._post(_Change(apply, done, "row", len(places)))

    def add_namespace(
        self, number: int, fingerprint: str, spec: bytes, epoch: int = 0, done: Done | None = None
    ) -> None:
        def apply(its: Database) -> None:
            for other in [one.number for one in its.namespaces.values() if one.fingerprint == fingerprint]:
                if other != number:  # it was to be forgotten, which the disk refused
                    assert all(row[2] != other for row in its.rows.values()), "rows of a namespace that is replaced"
                    del its.namespaces[other]
            its.namespaces[number] = SavedNamespace(number, fingerprint, spec, epoch)

        self._post(_Change(apply, done, "kept", name=("namespace", number, epoch)))

    def raise_epoch(self, namespace: int, epoch: int, done: Done | None = None) -> None:
        def apply(its: Database) -> None:
            saved = its.namespaces[namespace]
            its.namespaces[namespace] = saved._replace(epoch=max(saved.epoch, epoch))  # rule: a method of NamedTuple
            for stone in [one for one, of in its.tombstones.items() if one[0] == namespace and of <= epoch]:
                del its.tombstones[stone]

        self._post(_Change(apply, done, "kept", name=("epoch", namespace, epoch), synced=True))

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        self._post(
            _Change(lambda its: its.segments.update({segment: slot_bytes}), done, "kept", name=("segment", segment))
        )

    def set_key(self, key_id: bytes, since: int, done: Done | None = None) -> None:
        self._post(_Change(lambda its: setattr(its, "key", (key_id, since)), done, "kept", name=("key",)))

    def add_tombstone(self, namespace: int, key: bytes, epoch: int, done: Done | None = None) -> None:
        name = ("tombstone", namespace, key)
        change = _Change(lambda its: its.tombstones.update({(namespace, key): epoch}), done, "kept", 1, name, True)
        self._post(change)

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        self._post(_Change(lambda its: its.tombstones.pop((namespace, key), None), done, "burial"))

    def forget_namespaces(self, keep: Collection[int], done: Done | None = None) -> None:
        kept = set(keep)

        def apply(its: Database) -> None:
            for number in set(its.namespaces) - kept:
                del its.namespaces[number]
            for stone in [one for one in its.tombstones if one[0] not in kept]:
                del its.tombstones[stone]

        self._post(_Change(apply, done, "burial"))

    # --- committing ----------------------------------------------------------------------------------

    def commit(self) -> bool:
        """All that is posted, in one transaction; False when there is nothing to do."""
        disk = self._disk
        if disk.hung or not (self._posted or (self.error and disk.clock_s() >= self._again_s)):
            return False
        batch, self._posted = self._posted, []
        if self.error:
            self._put_off(batch)
            if disk.clock_s() >= self._again_s and self._write(list(self._kept.values())):
                self._kept.clear()
            return True
        burials = [change for change in batch if change.kind == "burial" and self._refused_rows]
        batch = [change for change in batch if change not in burials]
        _answer(burials, False)
        if self._write(batch):
            _answer(batch, True)
        else:
            self._put_off(batch)
        return True

    def _write(self, batch: Sequence[_Change]) -> bool:
        try:
            self._disk.asked("commit")
        except OSError as error:
            self.error, self._again_s = str(error), self._disk.clock_s() + RETRY_S
            return False
        for change in batch:
            change.apply(self._disk.database)
        self._disk.committed(synced=bool(self.error) or any(change.synced for change in batch))
        self.error = ""
        return True

    def _put_off(self, batch: Sequence[_Change]) -> None:
        for change in batch:
            if change.kind == "kept":
                self._kept.pop(change.name, None)
                self._kept[change.name] = change
            elif change.kind == "row":
                self._refused_rows = self._disk.rows_refused = True
        _answer(batch, False)

    @property
    def pending(self) -> int:
        return sum(change.rows for change in self._posted) + len(self._kept)

    @property
    def full(self) -> bool:
        return self.pending >= self._disk.most_pending

    def age_s(self) -> float:
        return self._disk.clock_s() - self._since_s if self._disk.hung and self._posted else 0.0

    def bytes_on_disk(self) -> int:
        return 0

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> MemoryRows:
        return MemoryRows(sorted(self._disk.database.rows.items()), on_ready)

    def join(self) -> None:
        """Nothing writes by itself."""

    def close(self, timeout_s: float) -> bool:
        while self.commit():
            pass
        self._disk.catalog = None
        return not self._posted and not self._kept


def _answer(batch: Sequence[_Change], ok: bool) -> None:
    for change in batch:
        if change.done is not None:
            change.done(ok)


ROWS_AT_ONCE = 3


class MemoryRows:
    """Implements `LoadingRows`: a few rows with each look."""

    damaged, error = 0, ""

    def __init__(self, rows: list[tuple[int, RowFields]], on_ready: Callable[[], None]) -> None:
        self.left = rows
        self._on_ready = on_ready

    def next_batch(self) -> RowBatch | None:
        some, self.left = self.left[:ROWS_AT_ONCE], self.left[ROWS_AT_ONCE:]
        return RowBatch.of([(place, Row._make(row)) for place, row in some]) if some else None

    @property
    def finished(self) -> bool:
        return not self.left

    def cancel(self) -> None:
        self.left = []


class MemoryQueue:
    """Implements `BlockQueue`. Operations end when `MemoryDisk.step` says so."""

    io, io_reason = "memory", ""

    def __init__(self, directory: MemoryDirectory, disk: MemoryDisk) -> None:
        self.errors: dict[int, int] = {}
        self.latency: dict[str, LatencyHistogram] = {}
        self.call_bytes: dict[str, Histogram] = {}
        self._disk = disk
        disk.queue = self
        self._forms = BlockForms(directory)  # type: ignore[arg-type]
        self._waiting: list[AnyOp] = []
        self._running: list[tuple[AnyOp, float]] = []  # and since when
        self._ended: list[AnyOp] = []
        self._stopping = False

    @property
    def in_flight(self) -> int:
        return sum(op.count for op in [*self._waiting, *(op for op, _ in self._running), *self._ended])

    @property
    def in_flight_bytes(self) -> int:
        return sum(op.moved_bytes for op in [*self._waiting, *(op for op, _ in self._running), *self._ended])

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        return self.submit_many([op], priority) == 1

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        if self._stopping:
            return 0
        for op in ops:
            op.priority = priority
        self._waiting += ops
        self._start()
        return len(ops)

    def _start(self) -> None:
        self._waiting.sort(key=lambda op: op.priority)
        while self._waiting and len(self._running) < DEPTH:
            self._running.append((self._waiting.pop(0), self._disk.clock_s()))

    def run(self, moves: int, at: int) -> bool:
        """End some operations; see `MemoryDisk.step`."""
        while self._running and moves > 0 and not self._disk.hung:
            moves -= 1
            op, _ = self._running.pop(at % len(self._running))
            self._move(op)
            self._ended.append(op)
            self._start()
        ended, self._ended = self._ended, []
        for op in ended:
            op.done(op)
        return bool(ended)

    def _move(self, op: AnyOp) -> None:
        if isinstance(op, TaskOp):
            self._try(op, 0, lambda: (op.call(), op.end(0, 1, DiskOutcome.OK)))
            return
        for place in range(op.count):
            self._try(op, place, partial(self._move_block, op, place))

    def _try(self, op: AnyOp, place: int, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            fail(op, place, error)
            self.errors[error.errno or 0] = self.errors.get(error.errno or 0, 0) + 1

    def _move_block(self, op: BlockOp, place: int) -> None:
        kept = list[Any]()

        def bounce(size: int) -> int:
            kept.append((ctypes.c_char * size)())
            return ctypes.addressof(kept[-1])

        transfer = self._forms.begin(op, place, place + 1, bounce)
        if transfer is not None:
            self._disk.move(transfer)
            self._forms.end(transfer, transfer.pieces[0][0])

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        cancelled = [op for op in self._waiting if priority in (None, op.priority)]
        self._waiting = [op for op in self._waiting if op not in cancelled]
        for op in cancelled:
            op.end(0, op.count, DiskOutcome.CANCELLED)
        self._ended += cancelled
        return sum(op.count for op in cancelled)

    def queued(self, priority: DiskPriority | None = None) -> int:
        return sum(op.count for op in self._waiting)

    def oldest_age_s(self) -> float:
        return self._disk.clock_s() - min((since_s for _, since_s in self._running), default=self._disk.clock_s())

    def stats(self) -> Mapping[str, Any]:
        return {
            **dict.fromkeys(COUNTERS, 0),
            "in_flight": self.in_flight,
            "in_flight_bytes": self.in_flight_bytes,
            "errors": {str(number): count for number, count in self.errors.items()},
            "latency": {},
            "io": self.io,
            "io_reason": "",
            "queued": self.queued(),
            "waiting": {},
            "oldest_age_s": self.oldest_age_s(),
        }

    def begin_stop(self) -> None:
        self._stopping = True
        self.cancel_queued()

    def stop(self, deadline_s: float) -> bool:
        self.begin_stop()
        self.run(len(self._running), 0)
        left, self._running = [op for op, _ in self._running], []
        for op in left:
            op.end(0, op.count, DiskOutcome.ABANDONED)
        self._ended += left
        self.run(0, 0)
        self._disk.queue = None
        return not left

    def crash(self, landed: int) -> None:
        """Blocks of writes in the kernel reach the disk, or not."""
        writes = [op for op, _ in self._running if isinstance(op, WriteOp)]
        for number, (write, place) in enumerate((op, place) for op in writes for place in range(op.count)):
            if landed >> number & 1 and "write" not in self._disk.failing:
                self._move_block(write, place)
