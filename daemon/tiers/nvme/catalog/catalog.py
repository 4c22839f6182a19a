"""The catalog of one NVMe directory: a durable index, slot to block. SQLite, on a thread of its own.

The event loop posts changes and never waits. The catalog's thread collects them for some milliseconds and commits them
together, in one short transaction; their `done(ok)` run on the loop afterwards:

    loop      delete(7) insert(9) ─┐                                   done(True) done(True)
    thread      wait 5 ms, collect └→ BEGIN  apply in order  COMMIT ──┘  wait, collect → ...

A commit survives kill -9 of the daemon; changes that a flush needs (`raise_epoch`, `add_tombstone`) are synced to the
disk before they are reported. When nothing can be written (disk full, I/O error), rows are refused, everything else is
kept and retried with growing pauses, and `error` says why; nothing is raised.

On start everything is verified: rows carry their own checksum, the small tables too. A database with a fault in those
or in its structure is set aside and an empty one made, after which every block of the directory is a miss
(database.py). Only a newer schema stops the start.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any

from .changes import (
    Answer,
    Burial,
    Done,
    RowsChange,
    Statement,
    Sync,
    TableChange,
)
from .database import NAME, CatalogState, SavedNamespace, Tombstone, row_checksum
from .rows import MAX_SLOTS, Loading, RowFields, place_of
from .writer import Writer

__all__ = ["Catalog", "CatalogState", "Done", "SavedNamespace", "Tombstone"]

MAX_PENDING = 20_000
"""Pending changes beyond which `full` asks the owner to hold back."""
CALLBACKS_AT_ONCE = 256
"""`done` calls in one turn of the event loop; those of batches count for as many as they have rows."""
MAX_ROWS = 512
"""Rows of one `insert` or `delete`."""
_MAX_U32 = 0xFFFFFFFF
_FORGET = ("DELETE FROM tombstones WHERE namespace = ?", "DELETE FROM namespaces WHERE number = ?")


class Catalog:
    """The catalog of one directory. Its methods are for the event loop, or for one thread before that runs.

    `post(callback, *args)` is the loop's call_soon_threadsafe; every `done(ok)` is called through it, once; the
    successful ones in the order of posting. `done(False)` means
    - for `insert`, `delete` and `remove_tombstone`: nothing was changed and nothing will be; ask again;
    - for all others: not written yet. It is kept, and retried as long as the catalog is open.
    Pending changes are applied in the order of posting; a batch is all or nothing. It opens on a full
    disk too. No other process may have the database open meanwhile (`connect_to_write`).
    """

    def __init__(self, directory: Path, directory_id: bytes, post: Callable[..., object]) -> None:
        self._path = directory / NAME
        self._post = post
        self._writer = Writer(self._path, directory_id, lambda answers: self._call(self._deliver, answers))
        self._answers: deque[Answer] = deque()
        self._namespaces: set[int] = set()
        self._loading: Loading | None = None

    # --- for the loop ----------------------------------------------------------------------------

    def open(self, timeout_s: float = 30.0) -> CatalogState:
        """Open or create the database; no block rows are read. Blocks: call it before the loop serves.

        Raises ConfigError for a database of a newer version (nothing is touched) and
        CatalogUnavailable when it cannot be reached now; to try again, make another Catalog.
        """
        state = self._writer.open(timeout_s)
        self._namespaces.update(namespace.number for namespace in state.namespaces)
        return state

    def insert(self, places: Sequence[int], rows: Sequence[RowFields], done: Done | None = None) -> None:
        """The slots now hold these blocks; written or refused together: one `done(ok)` for all of them.

        The old row of a slot must have been deleted before its data was written. At least one row and at most
        `MAX_ROWS`; the sequences lie above those of all rows before. Both lists are the catalog's from here on, since
        its thread packs the rows. All numbers must fit their fields (`Row`).
        """
        assert 0 < len(places) == len(rows) <= MAX_ROWS
        assert min(places) >= 0
        self._writer.put(RowsChange(places, rows, done))

    def delete(self, places: Sequence[int], done: Done | None = None) -> None:
        """The slots hold nothing; written or refused together: one `done(ok)` for all of them.

        They may be overwritten after `done(True)`. Missing rows are no error. At least one place and at most
        `MAX_ROWS`. The list is the catalog's from here on.
        """
        assert 0 < len(places) <= MAX_ROWS
        assert min(places) >= 0
        self._writer.put(RowsChange(places, None, done))

    def add_namespace(
        self, number: int, fingerprint: str, spec: bytes, epoch: int = 0, done: Done | None = None
    ) -> None:
        """Rows may refer to `number` from here on. A known number keeps the larger epoch."""
        assert 0 < number <= _MAX_U32
        assert 0 <= epoch <= _MAX_U32
        self._namespaces.add(number)
        self._keep(
            ("namespace", number, epoch),
            ("DELETE FROM namespaces WHERE fingerprint = ? AND number <> ?", (fingerprint, number)),
            (
                "INSERT INTO namespaces VALUES(?, ?, ?, ?, 0) ON CONFLICT(number) DO UPDATE SET "
                "fingerprint = excluded.fingerprint, spec = excluded.spec, epoch = max(epoch, excluded.epoch)",
                (number, fingerprint, spec, epoch),
            ),
            _resum(number),
            done=done,
        )

    def raise_epoch(self, namespace: int, epoch: int, done: Done | None = None) -> None:
        """Drop rows of smaller epochs, and tombstones up to it; never lowers the epoch.

        `done(True)`: survives a power loss.
        """
        assert namespace in self._namespaces, "an epoch belongs to a namespace that was added"
        assert 0 <= epoch <= _MAX_U32
        raised = ("UPDATE namespaces SET epoch = max(epoch, ?) WHERE number = ?", (epoch, namespace))
        needless = "DELETE FROM tombstones WHERE namespace = ? AND epoch <= ?", (namespace, epoch)
        self._keep(("epoch", namespace, epoch), raised, _resum(namespace), needless, durable=True, done=done)

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """The segment is divided into slots of this size. Rows of another size must be dropped before."""
        values = (segment, slot_bytes, row_checksum(segment, slot_bytes))
        self._keep(("segment", segment), ("INSERT OR REPLACE INTO segments VALUES(?, ?, ?)", values), done=done)

    def set_key(self, key_id: bytes, since: int, done: Done | None = None) -> None:
        """Encrypted rows from this sequence number on use that key, those before another one."""
        self._keep(
            ("key",),
            ("INSERT OR REPLACE INTO meta VALUES('key_id', ?)", (key_id,)),
            ("INSERT OR REPLACE INTO meta VALUES('key_since', ?)", (since,)),
            done=done,
        )

    def drop_segment(self, segment: int, done: Done | None = None) -> None:
        """Forget the segment and all its rows."""
        places = (place_of(segment, 0), place_of(segment, MAX_SLOTS - 1))
        self._keep(
            ("no segment", segment),
            ("DELETE FROM blocks WHERE place BETWEEN ? AND ?", places),
            ("DELETE FROM segments WHERE segment = ?", (segment,)),
            done=done,
        )

    def add_tombstone(self, namespace: int, key: bytes, epoch: int, done: Done | None = None) -> None:
        """Record a flush by key. `done(True)`: survives a power loss."""
        values = (namespace, key, epoch, row_checksum(namespace, key, epoch))
        self._keep(
            ("tombstone", namespace, key),
            ("INSERT OR REPLACE INTO tombstones VALUES(?, ?, ?, ?)", values),
            durable=True,
            done=done,
        )

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        """No row is left that the flush concerns.

        If any row was refused in this life, one that should have been deleted may still be in the database. Then the
        tombstone stays, for the next life to apply: `done(False)`.
        """
        burial = ("DELETE FROM tombstones WHERE namespace = ? AND key = ?", (namespace, key))
        self._writer.put(Burial((burial,), done))

    def forget_namespaces(self, keep: Collection[int], done: Done | None = None) -> None:
        """Delete the namespaces not in `keep`, which have no rows. They stay if any row was refused in this life."""
        numbers = self._namespaces.difference(keep)
        self._namespaces.difference_update(numbers)
        burial = [(statement, (number,)) for number in numbers for statement in _FORGET]
        self._writer.put(Burial(tuple(burial), done))

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> Loading:
        """Start reading the rows that were in the database at `open`; once.

        `on_ready` is posted when a batch can be taken and when all is read. Damaged rows are counted and deleted. Rows
        at places above all those of `open` are not shown, so segments with larger numbers than any before are the
        owner's own. The interpreter lock is held for about half a microsecond a row, a batch at a time.
        """
        assert self._loading is None, "rows are loaded once"
        self._loading = Loading(
            self._path,
            self._writer.last_place,
            batch_rows,
            lambda: self._call(on_ready),
            self._scrub,
            self._writer.suspect,
        )
        return self._loading

    @property
    def error(self) -> str:
        """Why nothing can be written now; empty while writing works."""
        return self._writer.error

    @property
    def pending(self) -> int:
        """Changes posted and not yet written or refused, and those kept for a retry."""
        return self._writer.pending

    @property
    def full(self) -> bool:
        """Too much is pending: post no more rows for now. Nothing is refused, this is a request."""
        return self.pending >= MAX_PENDING

    def age_s(self) -> float:
        """How long the current transaction has been with the disk; 0 between two."""
        return self._writer.age_s()

    def bytes_on_disk(self) -> int:
        """Size of the database, its log and its shared memory, as of the last commit. Does not block."""
        return self._writer.disk_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written to the database and its log in this life, as of the last commit."""
        return self._writer.written_bytes

    def sync(self, timeout_s: float) -> bool:
        """Wait until everything posted is on the disk, power loss included. Blocks. False: it is not."""
        sync = Sync(Future())
        self._writer.put(sync, soon=True)
        try:
            return sync.result.result(timeout_s)
        except FutureTimeoutError:
            return False

    def close(self, timeout_s: float) -> bool:
        """Write pending changes, checkpoint the log into the database, close. Blocks. True: all was written.

        After `timeout_s` the rest is given up unanswered. Nothing may be posted from here on. If the path leads to
        another directory by now, its files are left alone.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._loading is not None:
            self._loading.cancel()
            self._loading.join(timeout_s)
        return self._writer.close(deadline_s)

    def join(self) -> None:
        """After `close`: wait until its thread has ended, which a transaction with a hung disk keeps. Blocks."""
        self._writer.join()

    # --- posting and answering -------------------------------------------------------------------

    def _keep(
        self, name: tuple[Any, ...], *statements: Statement, durable: bool = False, done: Done | None = None
    ) -> None:
        self._writer.put(TableChange(name, statements, durable, done), soon=durable)

    def _scrub(self, place: int, record: bytes) -> None:
        """Delete a damaged row, unless its place has a new one meanwhile. From the loading thread."""
        query = "DELETE FROM blocks WHERE place = ? AND CAST(record AS BLOB) IS CAST(? AS BLOB)"
        self._keep(("scrub", place), (query, (place, record)))

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no callback is left to run
            self._post(callback, *args)

    def _deliver(self, answers: list[Answer]) -> None:
        """On the loop: call the answered `done`s, some in one turn. One that raises does not stop the others."""
        waiting = bool(self._answers)
        self._answers.extend(answers)
        if not waiting:
            self._deliver_some()

    def _deliver_some(self) -> None:
        rows = 0
        try:
            while self._answers and rows < CALLBACKS_AT_ONCE:
                done, ok, answered_rows = self._answers.popleft()
                rows += answered_rows
                done(ok)
        finally:
            if self._answers:
                self._call(self._deliver_some)


def _resum(namespace: int) -> Statement:
    resum = "UPDATE namespaces SET checksum = row_checksum(number, fingerprint, spec, epoch) WHERE number = ?"
    return resum, (namespace,)
