"""Recovery: turns catalog rows of an earlier life into index entries, while requests are already served.

A row becomes visible once its parent is; until then it waits, and rows without a parent at the end are deleted, each
after the rows behind it. Rows of a windowed namespace, as its spec says, have no parent and are visible at once. Rows
that were flushed, cannot be decrypted, or cannot be true are deleted too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.forms.codecs import SEALED
from tiercache.daemon.tiers.nvme.catalog.rows import (
    PLACED_BYTES,
    ROOT_KEY,
    SLOT_BITS,
    Row,
    RowBatch,
    keys_of_placed,
    pack_placed,
    unpack_placed,
)

from .parts import DirectoryFiles, LoadingRows
from .registry import Registry
from .slots import PAGE_SHIFT, SLOT_MASK, Slots, slot_of

log = logging.getLogger("tiercache.daemon")

ROWS_AT_ONCE = 512
RELEASED_AT_ONCE = 256
"""Rows that have waited for a parent: each is packed and unpacked once more."""


class Loaded(Protocol):
    """The part of a shelf that recovery needs."""

    directory: DirectoryFiles
    registry: Registry
    slots: Slots

    def table(self, namespace: Namespace) -> Table:
        """The namespace's table."""

    def slot_bytes(self, namespace: Namespace) -> int:
        """The size of a namespace's slots."""

    def enter_many(
        self,
        table: Table,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        slots: Sequence[int],
        admit: Callable[[int, int, int], bool] | None,
        stored: Sequence[Sequence[int]],
    ) -> list[int]:
        """Make rows visible; for each its entry, as `Index.insert_many` returns them."""

    def recovered(self, complete: bool, numbers: Container[int]) -> None:
        """All rows are in; `complete` if all of them could be read. `numbers`: namespaces that had some."""


class Recovery:
    """Recovers the rows of one shelf. Event loop only; never blocks."""

    def __init__(self, shelf: Loaded, rows: LoadingRows, key_since: int = 0) -> None:
        self.rows = rows
        self.loaded_rows = 0
        self.orphan_rows = 0
        self.other_key_rows = 0
        """Rows dropped since they are of another nvme_key than now, or of none where there is one now."""
        self.over = False
        self._shelf = shelf
        self._sealed = shelf.directory.cipher is not None
        self._key_since = key_since
        self._slots = shelf.slots
        self._registry = shelf.registry
        # Rows that wait for their parent, packed, by its key, by namespace; and parents that have come.
        self._orphans: dict[int, dict[bytes, bytearray]] = {}
        self._released: list[tuple[int, bytes]] = []
        self._refused: dict[int, bytearray] = {}  # rows to be deleted at the end, packed, by namespace
        self._deleting: list[tuple[int, bytearray]] = []  # at the end: rows, each item behind the one before it
        self._numbers: set[int] = set()  # the catalog's, of namespaces that had rows
        self._raised: dict[int, int] = {}  # epochs of loaded entries, where above their namespace's oldest

    def work(self) -> bool:
        """Run a slice; True while there is more to do at once."""
        batch = self._released_rows() if self._released else self.rows.next_batch()
        if batch is None:
            return self.rows.finished and self._finish()
        numbers = batch.fields[2]
        self._numbers.update(numbers)
        for number in set(numbers):
            alone = numbers.count(number) == len(numbers)
            self._take_in(number, batch if alone else batch.only([other == number for other in numbers]))
        return True

    def _take_in(self, number: int, rows: RowBatch) -> None:
        """Make rows of one namespace visible if their parent is; the others wait."""
        namespace = self._registry.named(number)
        wanted = [False] * len(rows) if namespace is None else self._wanted(namespace, rows)
        if not all(wanted):
            for place, good in zip(rows.places, wanted, strict=True):
                if not good:
                    self._slots.refuse(place)
            rows = rows.only(wanted)
        if namespace is None or not rows:
            return
        keys, parents, _, epochs, _, stored, codecs, kinds, checksums, _ = rows.fields
        latest = max(epochs)
        epochs_now = self._registry.epochs
        epochs_now[namespace.number] = max(epochs_now[namespace.number], latest)
        table = self._shelf.table(namespace)
        admit = None
        if self._raised or latest > self._registry.oldest_epochs[namespace.number]:
            admit = self._admission(namespace, table, epochs)
        slots = list(map(slot_of, rows.places))
        entries = self._shelf.enter_many(table, keys, parents, slots, admit, (checksums, stored, codecs, kinds))
        self.loaded_rows += sum(entry >= 0 for entry in entries)
        self._sort_out(number, namespace, rows, entries)

    def _admission(self, namespace: Namespace, table: Table, epochs: Sequence[int]) -> Callable[[int, int, int], bool]:
        """True if a row may hang below an entry.

        A child is written after its parent, so an older epoch is what a flush by key has left of a chain whose first
        part was stored again.
        """
        raised, oldest, root = self._raised, self._registry.oldest_epochs[namespace.number], table.root

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

    def _sort_out(self, number: int, namespace: Namespace, rows: RowBatch, entries: list[int]) -> None:
        """Sort rows: taken in, refused, or kept until their parent comes."""
        orphans = self._orphans.setdefault(number, {})
        pages_each = self._shelf.slot_bytes(namespace) >> PAGE_SHIFT
        segment, owned = -1, bytearray()
        for at, (place, key, entry) in enumerate(zip(rows.places, rows.fields[0], entries, strict=True)):
            if entry >= 0:
                if place >> SLOT_BITS != segment:
                    segment = place >> SLOT_BITS
                    owned = self._slots.owned[segment]
                owned[(place & SLOT_MASK) // pages_each] = 1
                if key in orphans:
                    self._released.append((number, key))
                continue
            waiting = pack_placed(place, [column[at] for column in rows.fields])
            if entry != NO_ENTRY:  # flushed, with rows behind it; or of one key in two slots the second
                self._refused.setdefault(number, bytearray()).extend(waiting)
                continue
            parent = rows.fields[1][at]
            if parent in orphans:
                orphans[parent] += waiting  # a byte array: one root may have all chains below it
            else:
                orphans[parent] = bytearray(waiting)

    def _released_rows(self) -> RowBatch:
        """Rows whose parent has come, and those that waited for them in turn, parents first."""
        packed = bytearray()
        while self._released and (room := RELEASED_AT_ONCE * PLACED_BYTES - len(packed)) > 0:
            number, key = self._released.pop()
            orphans = self._orphans[number]
            waiting = orphans.pop(key, bytearray())
            rest = len(waiting) - room
            if rest > 0:
                part = waiting[rest:]
                del waiting[rest:]
                orphans[key] = waiting
                self._released.append((number, key))
                waiting = part
            packed += waiting
            self._released += [(number, key) for key in keys_of_placed(waiting) if key in orphans]
        return unpack_placed(packed)

    def _wanted(self, namespace: Namespace, rows: RowBatch) -> list[bool]:
        """For each of `rows`: whether it is not flushed, has the right length, and a possible slot."""
        frame_bytes, segments = self._shelf.slot_bytes(namespace), {place >> SLOT_BITS for place in rows.places}
        pages_each = frame_bytes >> PAGE_SHIFT
        end = self._shelf.directory.segment_bytes // frame_bytes * pages_each
        offsets, sizes = [place & SLOT_MASK for place in rows.places], self._slots.slot_bytes
        if (
            not self._registry.tombstone_count
            and (not namespace.table.windowed or set(rows.fields[1]) == {ROOT_KEY})
            and set(rows.fields[4]) == {namespace.spec.block_bytes}
            and min(rows.fields[3]) >= self._registry.oldest_epochs[namespace.number]
            and all(bool(codec & SEALED) is self._sealed for codec in set(rows.fields[6]))
            and (not self._sealed or min(rows.fields[9]) >= self._key_since)
            and all(sizes.get(segment) == frame_bytes and segment in self._slots.owned for segment in segments)
            and max(offsets) < end
            and (pages_each == 1 or not any(offset % pages_each for offset in offsets))
        ):
            return [True] * len(rows)
        return [self._is_wanted(namespace, place, row) for place, row in rows]

    def _is_wanted(self, namespace: Namespace, place: int, row: Row) -> bool:
        """True if a row is not flushed, has the right length, and lies where a slot of its size can be."""
        segment, frame_bytes = place >> SLOT_BITS, self._shelf.slot_bytes(namespace)
        if bool(row.codec & SEALED) is not self._sealed or (self._sealed and row.sequence < self._key_since):
            self.other_key_rows += 1
            return False
        if row.length != namespace.spec.block_bytes or self._slots.slot_bytes.get(segment) != frame_bytes:
            return False
        if namespace.table.windowed and row.parent != ROOT_KEY:
            return False
        if not self._slots.is_slot(place, frame_bytes):
            return False
        oldest = self._registry.oldest_epochs[namespace.number]
        return row.epoch >= max(oldest, self._registry.flushed_at(namespace, row.key))

    def _finish(self) -> bool:
        """Run a slice of the work left once all rows are read; False when that was the last."""
        if self._delete_some() or self._slots.settle():
            return True
        self._raised.clear()
        self.over = True
        log.info(
            "%s: %d blocks are back, %d without a parent were dropped",
            self._shelf.directory.path,
            self.loaded_rows,
            self.orphan_rows,
        )
        if self.other_key_rows:
            log.warning(
                "%s: %d blocks that were stored under another nvme_key, or without one, are dropped",
                self._shelf.directory.path,
                self.other_key_rows,
            )
        self._shelf.recovered(not self.rows.error, self._numbers)
        return False

    def _delete_some(self) -> bool:
        """Delete a slice of the rows whose parent never came, or was refused; False when none is left.

        Rows behind a row go before it: a crash in between leaves no row without those before it that is not flushed.
        """
        left = ROWS_AT_ONCE
        while left > 0 and (self._deleting or self._take_to_delete()):
            number, waiting = self._deleting[-1]
            orphans = self._orphans.get(number, {})
            part = waiting[-left * PLACED_BYTES :]
            behind = [key for key in dict.fromkeys(keys_of_placed(part)) if key in orphans]
            left -= max(1, len(behind))
            if behind:
                self._deleting += [(number, self._take_orphans(number, key)) for key in behind]
                continue
            for place in unpack_placed(part).places:
                self._slots.refuse(place)
            left -= len(part) // PLACED_BYTES
            del waiting[-len(part) :]
            if not waiting:
                self._deleting.pop()
        return bool(self._deleting or self._orphans or self._refused)

    def _take_to_delete(self) -> bool:
        """Begin with a further row and those behind it; False when there is none."""
        if self._refused:
            self._deleting.append(self._refused.popitem())
            return True
        while self._orphans:
            number, orphans = next(iter(self._orphans.items()))
            if orphans:
                self._deleting.append((number, self._take_orphans(number, next(reversed(orphans)))))
                return True
            del self._orphans[number]
        return False

    def _take_orphans(self, number: int, parent: bytes) -> bytearray:
        waiting = self._orphans[number].pop(parent)
        self.orphan_rows += len(waiting) // PLACED_BYTES
        return waiting
