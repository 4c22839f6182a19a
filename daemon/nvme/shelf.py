"""One NVMe directory as the loop sees it: which block is in which slot, and whether the disk works.

The index is prefix-closed by itself, with slots where DRAM's has frames. A slot that is left is
free again only when the deletion of its row is committed, so that a crash never finds an old row
over new bytes:

    leave the index ─► delete the row ─► (committed) ─► slot free ─► write new bytes ─► insert a row

Rows of an earlier life come in while requests are answered already: a row is visible when its
parent is, and what has none at the end is deleted. Until then nothing is written here.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from tiercache.checksum import CHECKSUM_XXH3
from tiercache.daemon.allocator import NO_FRAME, Allocator, SizeClass
from tiercache.daemon.index import LIVE, Index, Table
from tiercache.daemon.nvme.blockio import Outcome, TaskOp
from tiercache.daemon.nvme.catalog import Catalog, CatalogState, Done, SavedNamespace
from tiercache.daemon.nvme.directory import Directory
from tiercache.daemon.nvme.health import WriteHealth
from tiercache.daemon.nvme.io import DiskQueue, Priority
from tiercache.daemon.nvme.rows import (
    MAX_SLOTS,
    PLACED_BYTES,
    ROOT_KEY,
    SLOT_BITS,
    Batch,
    Loading,
    Row,
    keys_of_placed,
    pack_placed,
    unpack_placed,
)
from tiercache.daemon.policy import NO_ENTRY, POLICIES, Policy
from tiercache.daemon.space import Namespace, NoRoom, Space
from tiercache.messages import OFFSET_MASK, REGION_SHIFT

log = logging.getLogger("tiercache.daemon")

EVICT_AT_ONCE = 64
"""Slots given up in one go of the loop."""
FREE_AHEAD_BYTES = 64 << 20
"""Kept free, or on the way there, in a directory that is full and written to: a slot that is given up is
free some milliseconds later, and writes should not wait for that."""
ROWS_AT_ONCE = 512
SCAN_AT_ONCE = 4096
"""Entries looked at in one go while a segment is emptied."""
GROW_AGAIN_S = 30.0
"""How long after a segment could not be made it is tried again."""
ASIDE_S = 600.0
"""How long a slot that could not be written to is not used: another one may be good."""
OFFLINE_AGE_S = 10.0
_LATEST = b""
"""The key of a tombstone that stays: its epoch is the latest of the namespace. Without it a flush while
rows are loading could choose an epoch that some of those rows have already."""
_SLOT_MASK = MAX_SLOTS - 1
_PAGE_SHIFT = 12  # a place counts pages of 4096 bytes inside its segment


class Stored(NamedTuple):
    """What is needed to read a block back."""

    entry: int
    slot: int
    stored_length: int
    codec: int
    checksum: int
    kind: int = CHECKSUM_XXH3


def place_of(slot: int) -> int:
    """The catalog's number of a slot: segment, then page inside it."""
    return (slot >> REGION_SHIFT) << SLOT_BITS | (slot & OFFSET_MASK) >> _PAGE_SHIFT


def slot_of(place: int) -> int:
    """Inverse of `place_of`."""
    return (place >> SLOT_BITS) << REGION_SHIFT | (place & _SLOT_MASK) << _PAGE_SHIFT


class Shelf:
    """Event loop only; nothing here blocks."""

    def __init__(
        self, directory: Directory, catalog: Catalog, queue: DiskQueue, state: CatalogState, space: Space,
        policy: str, soon: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.catalog = catalog
        self.queue = queue
        self.index = Index(self._slot_left)
        self.allocator = Allocator()
        self.health = WriteHealth(str(directory.path))
        self.directory_seed = int.from_bytes(directory.superblock.directory_id[:8], "little")
        self.loading = True
        self.loaded_rows = 0
        self.orphan_rows = 0
        self.no_growth = ""  # why no further segment could be made the last time
        self._leaving: set[int] = set()  # slots whose row is to be deleted, those of `_undeleted` too
        self._undeleted: deque[int] = deque()  # slots whose row could not be deleted: asked for again
        self._aside: deque[tuple[float, int]] = deque()  # until when, and slots that could not be written to
        self._grow_after_s = 0.0
        self._retiring: tuple[int, int] | None = None  # a segment that is emptied, next entry to look at
        self._pages_owned: dict[int, bytearray] = {}  # while loading: by segment, which slots have an owner
        self._space = space
        self._policy_name = policy
        self._soon = soon  # there is something to do before the next tick
        self._policies: dict[int, Policy] = {}
        self._checksum = array("Q")
        self._stored = array("I")
        self._codec = array("B")
        self._kind = array("B")
        self._catalog_numbers: dict[str, int] = {}
        self._epochs: dict[int, int] = {}  # by namespace number: that of rows written now
        self._oldest_epochs: dict[int, int] = {}
        self._by_catalog_number: dict[int, Namespace] = {}
        self._tombstones: dict[tuple[int, bytes], int] = {}
        self._stones: dict[int, tuple[tuple[int, bytes], int]] = {}  # by slot: whose row they are about
        size_bytes = directory.segment_bytes
        self._segments = {number: size for number, size in state.segments.items() if 0 < size <= size_bytes}
        for segment in set(self._segments) & set(directory.segments):
            self._pages_owned[segment] = bytearray(size_bytes // self._segments[segment])
        self._segment_ids = set(state.segments) | set(directory.segments)
        self._creating = False
        self._sequence = state.next_sequence
        # Rows that wait for their parent, packed, by its key, by namespace; and parents that have come.
        self._orphans: dict[int, dict[bytes, bytearray]] = {}
        self._released: list[tuple[int, bytes]] = []
        self._raised: dict[int, int] = {}  # epochs of loaded entries, where above their namespace's oldest
        self._rows: Loading | None = None
        if directory.max_segments == 0:
            self.no_growth = "its part of nvme_size holds no segment: make that larger, or empty the directory"
        self._adopt_namespaces(state)

    # --- namespaces ------------------------------------------------------------------------------

    def _adopt_namespaces(self, state: CatalogState) -> None:
        # Numbers of namespaces that are dropped are not given again: their rows are still there.
        self._last_number = max((saved.number for saved in state.namespaces), default=0)
        for saved in state.namespaces:
            namespace = self._reopen(saved)
            if namespace is None:
                log.warning("%s: a namespace that cannot be served any more is dropped", self.directory.path)
                continue
            self._catalog_numbers[namespace.fingerprint] = saved.number
            self._by_catalog_number[saved.number] = namespace
            self._oldest_epochs[namespace.number] = self._epochs[namespace.number] = saved.epoch
        for stone in state.tombstones:
            buried = self._by_catalog_number.get(stone.namespace)
            if buried is not None:
                if stone.key != _LATEST:
                    self._tombstones[buried.number, stone.key] = stone.epoch
                self._epochs[buried.number] = max(self._epochs[buried.number], stone.epoch)

    def _reopen(self, saved: SavedNamespace) -> Namespace | None:
        try:
            namespace = self._space.open_saved(saved.spec)
        except NoRoom:
            return None
        # One whose fingerprint was made in another way: all its blocks would fail their checksums.
        return namespace if namespace is not None and namespace.fingerprint == saved.fingerprint else None

    def table(self, namespace: Namespace) -> Table:
        """The namespace's table, made and made known to the catalog at first use."""
        table = self.index.tables.get(namespace.number)
        if table is not None:
            return table
        policy = self._policies.get(namespace.spec.frame_bytes)
        if policy is None:
            policy = self._policies[namespace.spec.frame_bytes] = POLICIES[self._policy_name](self.index.columns)
        if namespace.fingerprint not in self._catalog_numbers:
            number = self._last_number = self._last_number + 1
            self._catalog_numbers[namespace.fingerprint] = number
            self._by_catalog_number[number] = namespace
            self._oldest_epochs[namespace.number] = self._epochs[namespace.number] = 0
            self.catalog.add_namespace(number, namespace.fingerprint, self._space.save(namespace))
        return self.index.add_table(namespace.number, policy, windowed=False)

    def epoch(self, namespace: Namespace) -> int:
        """Rows written now carry this; a flush raises it."""
        self.table(namespace)
        return self._epochs[namespace.number]

    # --- finding ---------------------------------------------------------------------------------

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """How many of the first `limit` keys are here, as a leading run."""
        table = self.index.tables.get(namespace.number)
        return 0 if table is None else self.index.prefix_length(table, keys, limit)

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Whether this block is here."""
        table = self.index.tables.get(namespace.number)
        return table is not None and table.get(key) != NO_ENTRY

    def find(self, namespace: Namespace, key: bytes) -> Stored | None:
        """Where a block is, if it is here."""
        table = self.index.tables.get(namespace.number)
        entry = NO_ENTRY if table is None else table.get(key)
        if entry == NO_ENTRY:
            return None
        columns = self._stored[entry], self._codec[entry], self._checksum[entry], self._kind[entry]
        return Stored(entry, self.index.frame[entry], *columns)

    # --- changing --------------------------------------------------------------------------------

    def take_slot(self, namespace: Namespace, parent: bytes) -> int:
        """A free slot for a block below `parent`, or NO_FRAME; then room is being made: ask again soon."""
        size_class = self.allocator.size_class(namespace.spec.frame_bytes)
        slot = self.allocator.take(size_class)
        if slot == NO_FRAME or (size_class.free < self._ahead(size_class) and not self.allocator.unassigned):
            # Room for a child is not made of its ancestors.
            before = self.table(namespace).get(parent) if parent else NO_ENTRY
            if before != NO_ENTRY:
                self.index.touch(before)
            self._make_room(size_class)
            if slot == NO_FRAME:
                return NO_FRAME
        segment = slot >> REGION_SHIFT
        if self._segments.get(segment) != size_class.frame_bytes:
            self._segments[segment] = size_class.frame_bytes
            self.catalog.set_segment(segment, size_class.frame_bytes)
        return slot

    def _ahead(self, size_class: SizeClass) -> int:
        """How many slots should be free, or on the way there; not many of a small directory's."""
        return max(1, min(FREE_AHEAD_BYTES // size_class.frame_bytes, size_class.frames // 8))

    def add(self, namespace: Namespace, key: bytes, parent: bytes, slot: int, written: Stored) -> None:
        """A block has been written: visible now, durable with the next commit."""
        table = self.table(namespace)
        parent_entry = table.get(parent) if parent else table.root
        self._enter(table, key, parent_entry, slot, written)
        self._sequence += 1
        row = Row(
            key=key, parent=parent or ROOT_KEY, namespace=self._catalog_numbers[namespace.fingerprint],
            epoch=self._epochs[namespace.number], length=namespace.spec.block_bytes,
            stored_length=written.stored_length, codec=written.codec, kind=written.kind, checksum=written.checksum,
            sequence=self._sequence,
        )  # fmt: skip
        self.catalog.insert(place_of(slot), row)

    def _enter(self, table: Table, key: bytes, parent: int, slot: int, stored: Stored) -> int:
        entry = self.index.insert(table, key, parent, slot)
        self._pad_columns()
        self._checksum[entry] = stored.checksum
        self._stored[entry] = stored.stored_length
        self._codec[entry] = stored.codec
        self._kind[entry] = stored.kind
        return entry

    def _pad_columns(self) -> None:
        """Make our columns as long as the index's."""
        missing = len(self.index.key) - len(self._checksum)
        if missing > 0:
            for column in (self._checksum, self._stored, self._codec, self._kind):
                column.frombytes(bytes(column.itemsize * missing))

    def drop(self, namespace: Namespace, key: bytes) -> None:
        """A block is bad: forget it and what follows it."""
        table = self.index.tables.get(namespace.number)
        entry = NO_ENTRY if table is None else table.get(key)
        if entry != NO_ENTRY:
            self.index.drop(entry)

    def _slot_left(self, slot: int) -> None:
        """An entry is free: its row goes, then its slot is free too."""
        self._leaving.add(slot)
        self._own_while_loading(slot, 1)
        self._delete_row(slot)

    def _delete_row(self, slot: int) -> None:
        self.catalog.delete(place_of(slot), lambda ok: self._row_deleted(slot, ok))

    def _row_deleted(self, slot: int, ok: bool) -> None:
        if not ok:
            self._undeleted.append(slot)  # not reused: its old row could come back over new bytes
            return
        self._leaving.discard(slot)
        if slot in self._stones:
            self._bury(*self._stones.pop(slot))
        if not self._own_while_loading(slot, 0):
            self.allocator.give_back(slot)
            self._soon()

    def _own_while_loading(self, slot: int, owned: int) -> bool:
        """Note whether a slot has an owner; False when the allocator knows that by itself already."""
        pages = self._pages_owned.get(slot >> REGION_SHIFT)
        if pages is None:
            return False
        pages[(slot & OFFSET_MASK) // self._segments[slot >> REGION_SHIFT]] = owned
        return True

    def _refuse_row(self, place: int) -> None:
        """A row that is not taken in goes, and the slot that it names is used until it is gone."""
        slot, slot_bytes = slot_of(place), self._segments.get(place >> SLOT_BITS, 0)
        if slot_bytes and self._is_slot(place, slot_bytes):
            self._slot_left(slot)
        else:
            self.catalog.delete(place)

    def write_worked(self) -> None:
        """A write has worked: if the disk has just come back, segments can be made again too."""
        if self.health.worked():
            self.no_growth, self._grow_after_s = "", 0.0

    def put_aside(self, slot: int) -> None:
        """A slot that could not be written to: used again, but not soon."""
        self._aside.append((time.monotonic() + ASIDE_S, slot))

    def _make_room(self, size_class: SizeClass) -> None:
        """Have a segment made; where there can be no more, evict, or empty a segment of another size."""
        if self._creating or self._may_grow:
            self._create_segment()
            return
        most = self._ahead(size_class) - size_class.free - (len(self._leaving) - len(self._undeleted))
        if most <= 0:
            return  # enough is on its way already
        policy = self._policies.get(size_class.frame_bytes)
        self._consider_retiring(size_class, policy)
        for _ in range(min(most, EVICT_AT_ONCE)):
            victim = policy.victim() if policy is not None else NO_ENTRY
            if victim == NO_ENTRY:
                return
            self.index.evict(victim)

    @property
    def _may_grow(self) -> bool:
        room = len(self.directory.segments) < self.directory.max_segments
        return room and time.monotonic() >= self._grow_after_s

    # A size without slots, or whose coldest block is much younger than another size's, gets a segment of
    # that one. It hands out nothing more, its blocks are dropped in slices, and when the last slot is
    # back it can be divided anew.

    def _consider_retiring(self, size_class: SizeClass, policy: Policy | None) -> None:
        if self._retiring is not None:
            return
        own = policy.coldest_stamp() if policy is not None else None
        coldest: tuple[int, int] | None = None  # stamp, victim
        for frame_bytes, other in self._policies.items():
            stamp = other.coldest_stamp()
            if frame_bytes == size_class.frame_bytes or stamp is None:
                continue
            if own is not None and own - stamp < self.directory.segment_bytes // frame_bytes:
                continue
            if coldest is None or stamp < coldest[0]:
                coldest = stamp, other.victim()
        if coldest is not None:
            segment = self.index.frame[coldest[1]] >> REGION_SHIFT
            self.allocator.drain(segment)
            self._retiring = segment, 0

    def _retire_slice(self) -> None:
        """Drop the blocks of the segment that is to be emptied, round and round until the last slot is back."""
        if self._retiring is None:
            return
        segment, first = self._retiring
        if self.allocator.entries_of(segment, draining=True) is None:
            self._retiring = None
            return
        last = min(first + SCAN_AT_ONCE, len(self.index.frame))
        for entry in range(first, last):
            slot = self.index.frame[entry]
            if slot >> REGION_SHIFT == segment and slot != NO_FRAME and self.index.state[entry] == LIVE:
                self.index.drop(entry)
        self._retiring = segment, 0 if last == len(self.index.frame) else last

    def _create_segment(self) -> None:
        """Ask for one more segment, unless one is being made; slots are there some milliseconds later."""
        if self._creating:
            return
        segment = max(self._segment_ids, default=0) + 1
        op = TaskOp(
            done=lambda op: self._segment_created(segment, op), call=lambda: self.directory.create_segment(segment)
        )
        self._creating = self.queue.submit(op, Priority.WRITE)

    def _segment_created(self, segment: int, op: TaskOp) -> None:
        self._creating = False
        if op.outcome is Outcome.OK:
            self._segment_ids.add(segment)
            self.no_growth = ""
            self.allocator.add_region(segment, self.directory.segment_bytes)
        elif op.outcome is Outcome.IO_ERROR:
            if op.errno == errno.EEXIST:
                self._segment_ids.add(segment)  # somebody else's file: the next number, then
            problem = f"no further segment could be made: {os.strerror(op.errno)}"
            if not self.directory.segments:
                self.health.failed(problem)
                return
            # In those that there are, blocks can still be replaced.
            if not self.no_growth:
                log.warning("%s: %s; blocks are replaced meanwhile", self.directory.path, problem)
            self.no_growth = problem
            self._grow_after_s = time.monotonic() + GROW_AGAIN_S

    # --- what is not well ------------------------------------------------------------------------

    @property
    def offline(self) -> bool:
        """Whether the disk hangs: nothing is asked of it until its oldest I/O has come back."""
        return self.queue.oldest_age_s() > OFFLINE_AGE_S

    @property
    def works(self) -> bool:
        """Whether the disk is in order, as far as is known."""
        return not self.offline and not self.catalog.error and self.health.may_write

    @property
    def may_write(self) -> bool:
        """Whether a write that begins now has a chance. Without it nothing is evicted for one either."""
        return not self.loading and not self.catalog.full and self.works

    @property
    def lost_slots(self) -> int:
        """Slots whose row could not be deleted yet."""
        return len(self._undeleted)

    def reasons(self) -> list[str]:
        """What is not well, for people."""
        found = [self.health.reason, self.no_growth, self.catalog.error]
        if self.offline:
            found.append(f"an operation has been under way for {self.queue.oldest_age_s():.0f} s")
        return [f"nvme directory {self.directory.path}: {reason}" for reason in found if reason]

    def stats(self) -> dict[str, Any]:
        """Everything that is known of this directory."""
        return {
            "path": str(self.directory.path),
            "state": "loading" if self.loading else "offline" if self.offline else "ok",
            "direct": self.directory.direct,
            "blocks": sum(table.blocks for table in self.index.tables.values()),
            "used_bytes": self.allocator.used_bytes,
            "segments": len(self.directory.segments),
            "database_bytes": self.catalog.bytes_on_disk(),
            "loaded_rows": self.loaded_rows,
            "orphan_rows": self.orphan_rows,
            "lost_slots": self.lost_slots,
            "writing": self.health.reason or "on",
            "write_failures": self.health.failures,
            **self.queue.stats(),
        }

    def check_integrity(self, written: list[int]) -> list[str]:
        """Where index, slots and counts disagree; `written` are the slots of writes under way. O(entries).

        While rows are loading slots have no owner yet, and only the index is checked.
        """
        findings = self.index.check_integrity()
        if not self.loading:
            aside = [slot for _, slot in self._aside]
            owned = [*self.index.frames_in_use(), *self._leaving, *aside, *written]
            findings += self.allocator.check_integrity(owned)
        return [f"nvme directory {self.directory.path}: {finding}" for finding in findings]

    # --- flushing --------------------------------------------------------------------------------

    def flush(self, namespace: Namespace, key: bytes, done: Done) -> int:
        """Forget a namespace's blocks, or one and what follows; `done(ok)` when that is durable."""
        table = self.table(namespace)
        number = self._catalog_numbers[namespace.fingerprint]
        epoch = self._epochs[namespace.number] = self._epochs[namespace.number] + 1
        if not key:
            self._oldest_epochs[namespace.number] = epoch
            self.catalog.raise_epoch(number, epoch, done)
            return self.index.drop_table(table)
        before, entry = table.blocks, table.get(key)
        stone = namespace.number, key
        self._tombstones[stone] = epoch
        if entry != NO_ENTRY:
            self._stones[self.index.frame[entry]] = stone, epoch

        def noted(ok: bool) -> None:
            if ok and entry == NO_ENTRY:
                self._bury(stone, epoch)
            done(ok)

        self.catalog.add_tombstone(number, _LATEST, epoch)
        self.catalog.add_tombstone(number, key, epoch, noted)
        self.drop(namespace, key)
        self.index.unlink_slice(EVICT_AT_ONCE)
        return before - table.blocks

    def _bury(self, stone: tuple[int, bytes], epoch: int) -> None:
        """The row that a flush by key was about is gone: nobody needs to know of the flush any more."""
        if not self.loading and self._tombstones.get(stone) == epoch:
            del self._tombstones[stone]
            self.catalog.remove_tombstone(self._catalog_number(stone[0]), stone[1])

    # --- rows of an earlier life -----------------------------------------------------------------

    def start_loading(self) -> None:
        """Begin to read the catalog's rows; `work` takes them in."""
        self._rows = self.catalog.load(self._soon, ROWS_AT_ONCE)

    def work(self) -> bool:
        """A slice of unlinking, loading and the like; True while there is more to do at once."""
        self._retire_slice()
        self._use_again()
        if self.catalog.full:
            return False  # what follows posts rows to be deleted, and those wait for the disk
        more = self.index.unlink_slice(EVICT_AT_ONCE) == EVICT_AT_ONCE
        if not self.loading or self._rows is None:
            return more
        batch = self._released_rows() if self._released else self._rows.next_batch()
        if batch is not None:
            numbers = batch.fields[2]
            for number in set(numbers):
                alone = numbers.count(number) == len(numbers)
                self._take_in(number, batch if alone else batch.only([other == number for other in numbers]))
            return True
        return self._finish_loading() or more if self._rows.finished else more

    def _use_again(self) -> None:
        """Slots that were aside for long enough, and rows whose deletion may work now."""
        while self._aside and time.monotonic() >= self._aside[0][0]:
            self.allocator.give_back(self._aside.popleft()[1])
        if not self.catalog.error:
            for _ in range(min(len(self._undeleted), ROWS_AT_ONCE)):
                self._delete_row(self._undeleted.popleft())

    def _take_in(self, number: int, rows: Batch) -> None:
        """Rows of one namespace are visible when their parent is; else they wait."""
        namespace = self._by_catalog_number.get(number)
        wanted = [False] * len(rows) if namespace is None else self._wanted(namespace, rows)
        if not all(wanted):
            for place, good in zip(rows.places, wanted, strict=True):
                if not good:
                    self._refuse_row(place)
            rows = rows.only(wanted)
        if namespace is None or not rows:
            return
        keys, parents, _, epochs, _, stored, codecs, kinds, checksums, _ = rows.fields
        latest = max(epochs)
        self._epochs[namespace.number] = max(self._epochs[namespace.number], latest)
        table = self.table(namespace)
        admit = None
        if self._raised or latest > self._oldest_epochs[namespace.number]:
            admit = self._admission(namespace, table, epochs)
        self._pad_columns()
        entries = self.index.insert_many(table, keys, parents, list(map(slot_of, rows.places)), ROOT_KEY, admit)
        taken = [its >= 0 for its in entries]
        for column, values in (
            (self._checksum, checksums), (self._stored, stored), (self._codec, codecs), (self._kind, kinds),
        ):  # fmt: skip
            column.extend(values if all(taken) else compress(values, taken))
        self.loaded_rows += sum(taken)
        self._sort_out(number, namespace, rows, entries)

    def _admission(self, namespace: Namespace, table: Table, epochs: Sequence[int]) -> Callable[[int, int, int], bool]:
        """Whether a row may hang below an entry.

        A child is written after its parent, so an older epoch is what a flush by key has left of a chain
        whose first part was stored again.
        """
        raised, oldest, root = self._raised, self._oldest_epochs[namespace.number], table.root

        def admit(number: int, parent: int, entry: int) -> bool:
            epoch = epochs[number]
            if parent != root and epoch < raised.get(parent, 0):
                return False
            if epoch > oldest:
                raised[entry] = epoch
            else:
                raised.pop(entry, None)  # of a row before this one that was refused
            return True

        return admit

    def _sort_out(self, number: int, namespace: Namespace, rows: Batch, entries: list[int]) -> None:
        """What becomes of rows: taken in, refused, or kept until their parent comes."""
        orphans = self._orphans.setdefault(number, {})
        pages_each = namespace.spec.frame_bytes >> _PAGE_SHIFT
        segment, owned = -1, bytearray()
        for at, (place, key, entry) in enumerate(zip(rows.places, rows.fields[0], entries, strict=True)):
            if entry >= 0:
                if place >> SLOT_BITS != segment:
                    segment = place >> SLOT_BITS
                    owned = self._pages_owned[segment]
                owned[(place & _SLOT_MASK) // pages_each] = 1
                if key in orphans:
                    self._released.append((number, key))
            elif entry == NO_ENTRY:
                parent = rows.fields[1][at]
                waiting = pack_placed(place, [column[at] for column in rows.fields])
                if parent in orphans:
                    orphans[parent] += waiting  # a byte array: one root may have all chains below it
                else:
                    orphans[parent] = bytearray(waiting)
            else:  # of one key in two slots the first one stays
                self._refuse_row(place)

    def _released_rows(self) -> Batch:
        """Rows whose parent has come, and those that waited for them in turn, parents first."""
        packed = bytearray()
        while self._released and len(packed) < ROWS_AT_ONCE * PLACED_BYTES:
            number, key = self._released.pop()
            orphans = self._orphans[number]
            waiting = orphans.pop(key, bytearray())
            rest = len(waiting) - ROWS_AT_ONCE * PLACED_BYTES
            if rest > 0:
                part = waiting[rest:]
                del waiting[rest:]
                orphans[key] = waiting
                self._released.append((number, key))
                waiting = part
            packed += waiting
            self._released += [(number, its) for its in keys_of_placed(waiting) if its in orphans]
        return unpack_placed(packed)

    def _wanted(self, namespace: Namespace, rows: Batch) -> list[bool]:
        """Whether each of `rows` is: not flushed, of the right length, where a slot of its size can be."""
        frame_bytes, segments = namespace.spec.frame_bytes, {place >> SLOT_BITS for place in rows.places}
        pages_each = frame_bytes >> _PAGE_SHIFT
        end = self.directory.segment_bytes // frame_bytes * pages_each
        offsets = [place & _SLOT_MASK for place in rows.places]
        if (
            not self._tombstones
            and set(rows.fields[4]) == {namespace.spec.block_bytes}
            and min(rows.fields[3]) >= self._oldest_epochs[namespace.number]
            and all(self._segments.get(segment) == frame_bytes and segment in self._pages_owned for segment in segments)
            and max(offsets) < end
            and (pages_each == 1 or not any(offset % pages_each for offset in offsets))
        ):
            return [True] * len(rows)
        return [self._is_wanted(namespace, place, row) for place, row in rows]

    def _is_wanted(self, namespace: Namespace, place: int, row: Row) -> bool:
        """Not flushed, of the right length, and at a place where a slot of its size can be."""
        segment, frame_bytes = place >> SLOT_BITS, namespace.spec.frame_bytes
        if row.length != namespace.spec.block_bytes or self._segments.get(segment) != frame_bytes:
            return False
        if not self._is_slot(place, frame_bytes):
            return False
        stone = self._tombstones.get((namespace.number, row.key))
        return row.epoch >= self._oldest_epochs[namespace.number] and (stone is None or row.epoch >= stone)

    def _is_slot(self, place: int, slot_bytes: int) -> bool:
        offset, pages = slot_of(place) & OFFSET_MASK, self._pages_owned.get(place >> SLOT_BITS, b"")
        return offset % slot_bytes == 0 and offset // slot_bytes < len(pages)

    def _finish_loading(self) -> bool:
        """A slice of what is left to do when all rows are read; False when that was the last."""
        if self._refuse_orphans():
            return True
        size = self.directory.segment_bytes
        if self._pages_owned:
            segment, owned = self._pages_owned.popitem()
            self.allocator.adopt_region(segment, size, self._segments[segment], owned)
            return True
        for segment in set(self.directory.segments) - set(self._segments):
            self.allocator.add_region(segment, size)
        problem = self._rows.error if self._rows is not None else ""
        self._raised.clear()
        self._rows = None
        self.loading = False
        # Those about rows that still wait for their deletion are buried with them. If not all rows could
        # be read, one of them may be among those.
        waiting = {stone for stone, _ in self._stones.values()}
        for stone, epoch in [] if problem else list(self._tombstones.items()):
            if stone not in waiting:
                self._bury(stone, epoch)
        log.info(
            "%s: %d blocks are back, %d without a parent were dropped",
            self.directory.path, self.loaded_rows, self.orphan_rows,
        )  # fmt: skip
        return False

    def _refuse_orphans(self) -> bool:
        """A slice of the rows whose parent never came; False when none is left."""
        refused = 0
        while self._orphans and refused < ROWS_AT_ONCE:
            number, orphans = next(iter(self._orphans.items()))
            if not orphans:
                del self._orphans[number]
                continue
            key, waiting = orphans.popitem()
            rest = max(0, len(waiting) - ROWS_AT_ONCE * PLACED_BYTES)
            for place in unpack_placed(waiting[rest:]).places:
                refused += 1
                self._refuse_row(place)
            if rest:
                del waiting[rest:]
                orphans[key] = waiting
        self.orphan_rows += refused
        return refused > 0

    def _catalog_number(self, number: int) -> int:
        return self._catalog_numbers[self._space.namespaces[number].fingerprint]
