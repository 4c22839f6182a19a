"""One row of the catalog: the content of a slot, packed into a fixed record with a checksum.

The record, little endian, 76 bytes:

    0  key 16 | 16  parent key 16 (zeros: child of the root) | 32  namespace u32 | 36  epoch u32
    40 length u32 | 44 stored length u32 | 48 codec u8 | 49 kind u8 | 50 zero 2
    52 data checksum u64 | 60 sequence u64 | 68 row checksum u64

The row checksum is xxh3_64 of the 68 bytes before it, seeded with the row's place, so that neither a flipped bit nor a
good record at the wrong place is accepted as a row.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, compress
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from .database import SQLITE_ERRORS, connect_to_read, is_malformed, read_page

log = logging.getLogger("tiercache.daemon")

WAITING_BATCHES = 2
"""Batches of rows read ahead of the event loop."""

SLOT_BITS = 24
MAX_SLOTS = 1 << SLOT_BITS
MAX_SEGMENTS = 1 << (62 - SLOT_BITS)
ROOT_KEY = bytes(16)
"""Parent key of a block that hangs below its namespace's root."""


class Row(NamedTuple):
    """Content of one slot. Lengths are bytes; `sequence` counts insertions and only grows."""

    key: bytes
    parent: bytes
    namespace: int
    epoch: int
    length: int
    stored_length: int
    codec: int
    kind: int
    checksum: int
    sequence: int


RowFields = tuple[bytes, bytes, int, int, int, int, int, int, int, int]
"""The fields of a `Row` in its order; a `Row` is one."""
PlacedRow = tuple[int, Row]

_FIELDS = struct.Struct("<16s16sIIIIBB2xQQ")
_CHECKSUM = struct.Struct("<Q")
_PLACED = struct.Struct("<Q" + _FIELDS.format[1:])
_FIELDS_OF_RECORDS = struct.Struct(_FIELDS.format + "8x")
_CHECKSUM_OF_RECORDS = struct.Struct(f"<{_FIELDS.size}xQ")
_SEED_MASK = (1 << 64) - 1
RECORD_BYTES = _FIELDS.size + _CHECKSUM.size


def place_of(segment: int, slot: int) -> int:
    """The primary key of a slot's row."""
    assert 0 <= segment < MAX_SEGMENTS
    assert 0 <= slot < MAX_SLOTS
    return segment << SLOT_BITS | slot


def segment_and_slot(place: int) -> tuple[int, int]:
    """Inverse of `place_of`."""
    return place >> SLOT_BITS, place & (MAX_SLOTS - 1)


def pack_row(place: int, row: RowFields) -> bytes:
    """The record of a row at its place. Raises struct.error for a number that does not fit its field."""
    assert len(row[0]) == len(row[1]) == len(ROOT_KEY), "struct would cut or fill a key without a word"
    fields = _FIELDS.pack(*row)
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields, place & _SEED_MASK))


def unpack_row(place: int, record: bytes) -> Row | None:
    """The row in a record, or None when the record is damaged or belongs to another place."""
    if len(record) != RECORD_BYTES:
        return None
    fields = record[: _FIELDS.size]
    if _CHECKSUM.unpack_from(record, _FIELDS.size)[0] != xxh3_64_intdigest(fields, place & _SEED_MASK):
        return None
    return Row._make(_FIELDS.unpack(fields))


class RowBatch:
    """Rows as columns: `places`, and in `fields` a tuple for each field of `Row`. Iterates over (place, row).

    Columns, since building a million small objects takes longer than reading them.
    """

    __slots__ = ("fields", "places")

    def __init__(self, places: Sequence[int], fields: Sequence[Sequence[Any]]) -> None:
        self.places = places
        self.fields = fields

    @classmethod
    def of(cls, rows: Sequence[PlacedRow]) -> RowBatch:
        """A batch of these rows."""
        columns = list(zip(*(row for _, row in rows), strict=True))
        return cls([place for place, _ in rows], columns or [()] * len(Row._fields))

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[PlacedRow]:
        return zip(self.places, map(Row._make, zip(*self.fields, strict=True)), strict=True)

    def only(self, wanted: Sequence[bool]) -> RowBatch:
        """The rows for which `wanted` holds."""
        fields = [tuple(compress(column, wanted)) for column in self.fields]
        return RowBatch(tuple(compress(self.places, wanted)), fields)

    def ascending(self, after: int) -> RowBatch:
        """The rows whose place is larger than `after` and all before it: nearly always all of them."""
        if all(map(lt, chain((after,), self.places), self.places)):
            return self
        wanted, last = list[bool](), after
        for place in self.places:
            wanted.append(place > last)
            last = max(last, place)
        return self.only(wanted)


PLACED_BYTES = _PLACED.size


def pack_placed(place: int, fields: Iterable[Any]) -> bytes:
    """A row with its place in few bytes, to be kept in memory."""
    return _PLACED.pack(place, *fields)


def keys_of_placed(packed: bytes | bytearray) -> list[bytes]:
    """The keys in any number of concatenated `pack_placed`."""
    return [bytes(packed[at + 8 : at + 24]) for at in range(0, len(packed), PLACED_BYTES)]


def unpack_placed(packed: bytes | bytearray) -> RowBatch:
    """The rows in any number of concatenated `pack_placed`."""
    if not packed:
        return RowBatch((), [()] * len(Row._fields))
    places, *fields = zip(*_PLACED.iter_unpack(packed), strict=True)
    return RowBatch(places, fields)


def unpack_rows(placed: list[tuple[int, bytes]]) -> tuple[RowBatch, list[tuple[int, bytes]]]:
    """Unpack records with their places: the good rows in the same order, and the damaged records.

    Holds the interpreter lock throughout, for about 0.4 microseconds a row.
    """
    if not placed or any(type(record) is not bytes or len(record) != RECORD_BYTES for _, record in placed):
        return _unpack_one_by_one(placed)
    size = _FIELDS.size
    places, records = zip(*placed, strict=True)
    joined = b"".join(records)
    wanted = [checksum for (checksum,) in _CHECKSUM_OF_RECORDS.iter_unpack(joined)]
    found = [xxh3_64_intdigest(record[:size], place & _SEED_MASK) for place, record in placed]
    if found != wanted:
        return _unpack_one_by_one(placed)
    return RowBatch(places, list(zip(*_FIELDS_OF_RECORDS.iter_unpack(joined), strict=True))), []


def _unpack_one_by_one(placed: list[tuple[int, bytes]]) -> tuple[RowBatch, list[tuple[int, bytes]]]:
    good: list[PlacedRow] = []
    damaged = []
    for place, record in placed:
        row = unpack_row(place, record) if type(record) is bytes else None
        if row is None:
            damaged.append((place, record))
        else:
            good.append((place, row))
    return RowBatch.of(good), damaged


class Loading:
    """Rows on their way from the database to the loop, read and verified on a thread of their own.

    At most two batches wait, so the loop sets the pace. `next_batch`, `cancel` and the attributes are for the loop and
    never block. Rows come in order of place; each was in the database when the catalog was opened, but may have been
    deleted through the catalog since: its owner knows.
    """

    def __init__(
        self,
        path: Path,
        last_place: int,
        batch_rows: int,
        on_ready: Callable[[], None],
        on_damage: Callable[[int, bytes], None],
        on_malformed: Callable[[Exception], None],
    ) -> None:
        self.rows = 0
        self.damaged = 0
        self.error = ""
        self._path = path
        self._last_place = last_place
        self._batch_rows = batch_rows
        self._on_ready = on_ready
        self._on_damage = on_damage
        self._on_malformed = on_malformed
        self._ready: deque[RowBatch] = deque()
        self._room = threading.Semaphore(WAITING_BATCHES)
        self._cancelled = False
        self._read_all = False
        self._thread = threading.Thread(target=self._run, name="catalog rows", daemon=True)
        self._thread.start()

    def next_batch(self) -> RowBatch | None:
        """The next batch, never empty; None when none is ready now, or ever again (`finished`)."""
        if not self._ready:
            return None
        batch = self._ready.popleft()
        self._room.release()
        return batch

    @property
    def finished(self) -> bool:
        """Every batch has been taken and no more will come."""
        return self._read_all and not self._ready

    def cancel(self) -> None:
        """Stop reading; waiting batches are dropped."""
        self._cancelled = True
        self._ready.clear()
        self._room.release()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, which it does once all is read or cancelled. Blocks."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with closing(connect_to_read(self._path, beside_writer=True)) as db:
                self._read(db)
        except SQLITE_ERRORS as error:
            self.error = f"{type(error).__name__}: {error}"
            log.warning("%s: reading its rows ended early, the rest is a miss: %s", self._path, error)
        self._read_all = True
        self._on_ready()

    def _read(self, db: sqlite3.Connection) -> None:
        after, limit, skip = -1, self._batch_rows, 1
        damaged_places = set[int]()
        while not self._cancelled and after < self._last_place:
            try:
                page = read_page(db, after, limit)
            except SQLITE_ERRORS as error:
                if not is_malformed(error):
                    raise
                # A torn page of the database hides only its own rows: approach it in small steps, then continue behind
                # it.
                self.error = str(error)
                self._on_malformed(error)
                if limit > 1:
                    limit = max(1, limit // 8)
                else:
                    end_of_segment = (after + 1) | (MAX_SLOTS - 1)
                    after, skip = min(after + skip, end_of_segment), 2 * skip
                    if after == end_of_segment:
                        skip = 2
                continue
            good, damaged = unpack_rows(page)
            for place, record in damaged:
                if place not in damaged_places:
                    damaged_places.add(place)
                    self._on_damage(place, record)
            self.damaged = len(damaged_places)
            # A damaged database may have a row twice: its slot must not get two owners.
            good = good.ascending(after)
            # A damaged place may be any number, so continue from a good one where there is one.
            reached = good.places[-1] if good else page[-1][0] if page else self._last_place
            if reached > self._last_place:
                good = good.only([place <= self._last_place for place in good.places])
            if good:
                self._hand_over(good)
            if len(page) < limit or reached <= after:
                return
            after = reached
            if skip > 1:
                limit, skip = self._batch_rows, 1

    def _hand_over(self, batch: RowBatch) -> None:
        while not self._room.acquire(timeout=1.0):
            if self._cancelled:
                return
        if not self._cancelled:
            self.rows += len(batch)
            self._ready.append(batch)
            self._on_ready()
