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

import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tiercache.daemon.tiers.nvme.catalog.closing import closing_own
from tiercache.daemon.tiers.nvme.catalog.database import (
    NAME,
    SQLITE_ERRORS,
    TRUNCATE_WAL_BYTES,
    CatalogState,
    SavedNamespace,
    Tombstone,
    is_malformed,
    marker_of,
    open_database,
    row_checksum,
    size_of,
    thread_written_bytes,
    write_rows,
)
from tiercache.daemon.tiers.nvme.catalog.rows import MAX_SLOTS, Loading, Row, pack_row, place_of
from tiercache.errors import CatalogUnavailable, ConfigError

__all__ = ["Catalog", "CatalogState", "Done", "SavedNamespace", "Tombstone"]

log = logging.getLogger("tiercache.daemon")

BATCH_OPS = 2000
"""Most changes in one transaction."""
COLLECT_S = 0.005
"""How long the first change of a transaction waits for others."""
MAX_PENDING = 20_000
"""Pending changes beyond which `full` asks the owner to hold back."""
CALLBACKS_AT_ONCE = 256
"""`done` calls in one turn of the event loop."""
IDLE_S = 1.0
RETRY_FIRST_S, RETRY_LONGEST_S = 0.1, 10.0

_MAX_U32 = 0xFFFFFFFF

Done = Callable[[bool], None]
Statement = tuple[str, Sequence[Any]]


class _RowChange(NamedTuple):
    place: int
    record: bytes | None  # None deletes
    sequence: int
    done: Done | None


class _TableChange(NamedTuple):
    """Statements that must not be lost. `name`: a later change of the same name makes this one needless."""

    name: tuple[Any, ...]
    statements: tuple[Statement, ...]
    durable: bool
    done: Done | None


class _Burial(NamedTuple):
    """Removal of something that rows may still need: refused like a row, and also once any row was refused."""

    statements: tuple[Statement, ...]
    done: Done | None


class _Sync(NamedTuple):
    """Everything posted before is durable when `result` is set, by the catalog's thread."""

    result: Future[bool]


_Change = _RowChange | _TableChange | _Burial | _Sync


class Catalog:
    """The catalog of one directory. Its methods are for the event loop, or for one thread before that runs.

    `post(callback, *args)` is the loop's call_soon_threadsafe; every `done(ok)` is called through it, once; the
    successful ones in the order of posting. `done(False)` means
    - for `insert`, `delete` and `remove_tombstone`: nothing was changed and nothing will be; ask again;
    - for all others: not written yet. It is kept, and retried as long as the catalog is open.
    Pending changes are applied in the order of posting; a batch is all or nothing. `alone`: opens on a full disk too,
    and no other process may open the database meanwhile (`connect_to_write`).
    """

    def __init__(self, directory: Path, directory_id: bytes, post: Callable[..., object], alone: bool = False) -> None:
        self.error = ""
        self.commits = 0
        self.failures = 0
        self._path = directory / NAME
        self._directory_id = directory_id
        self._post = post
        self._alone = alone
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._in_hand = 0
        self._refused_rows = False
        self._kept: dict[tuple[Any, ...], _TableChange] = {}
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = 0.0
        self._began_s = 0.0  # start of the current transaction; 0 between two
        self._answers: deque[tuple[Done, bool]] = deque()
        self._namespaces: set[int] = set()
        self._disk_bytes = 0
        self.written_bytes = 0
        """Bytes written to the database and its log in this life, as of the last commit."""
        self._last_place = -1
        self._loading: Loading | None = None
        self._closing = False
        self._abandoned = False
        self._written = False
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self._opened: Future[CatalogState] = Future()

    # --- for the loop ----------------------------------------------------------------------------

    def open(self, timeout_s: float = 30.0) -> CatalogState:
        """Open or create the database; no block rows are read. Blocks: call it before the loop serves.

        Raises ConfigError for a database of a newer version (nothing is touched) and
        CatalogUnavailable when it cannot be reached now; to try again, make another Catalog.
        """
        self._thread.start()
        try:
            state = self._opened.result(timeout_s)
        except FutureTimeoutError:
            self._abandoned = self._closing = True
            raise CatalogUnavailable(
                f"{self._path} did not open within {timeout_s:g} s: check that its disk answers"
            ) from None
        self._namespaces.update(namespace.number for namespace in state.namespaces)
        return state

    def insert(self, place: int, row: Row, done: Done | None = None) -> None:
        """The slot now holds this block. Its old row must have been deleted before its data was written."""
        assert place >= 0
        self._changes.put(_RowChange(place, pack_row(place, row), row.sequence, done))

    def delete(self, place: int, done: Done | None = None) -> None:
        """The slot holds nothing; it may be overwritten after `done(True)`. A missing row is no error."""
        assert place >= 0
        self._changes.put(_RowChange(place, None, 0, done))

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
        """Drop rows of smaller epochs; never lowers the epoch. `done(True)`: survives a power loss."""
        assert namespace in self._namespaces, "an epoch belongs to a namespace that was added"
        assert 0 <= epoch <= _MAX_U32
        raised = ("UPDATE namespaces SET epoch = max(epoch, ?) WHERE number = ?", (epoch, namespace))
        self._keep(("epoch", namespace, epoch), raised, _resum(namespace), durable=True, done=done)

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """The segment is divided into slots of this size. Rows of another size must be dropped before."""
        values = (segment, slot_bytes, row_checksum(segment, slot_bytes))
        self._keep(("segment", segment), ("INSERT OR REPLACE INTO segments VALUES(?, ?, ?)", values), done=done)

    def set_key(self, key_id: bytes, since: int) -> None:
        """Encrypted rows from this sequence number on use that key, those before another one."""
        self._keep(
            ("key",),
            ("INSERT OR REPLACE INTO meta VALUES('key_id', ?)", (key_id,)),
            ("INSERT OR REPLACE INTO meta VALUES('key_since', ?)", (since,)),
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
        self._changes.put(_Burial((burial,), done))

    def forget_namespaces(self, keep: Collection[int]) -> None:
        """Delete the namespaces not in `keep`, which have no rows. They stay if any row was refused in this life."""
        for number in self._namespaces.difference(keep):
            self._namespaces.remove(number)
            own = (number,)
            burial = (
                ("DELETE FROM tombstones WHERE namespace = ?", own),
                ("DELETE FROM namespaces WHERE number = ?", own),
            )
            self._changes.put(_Burial(burial, None))

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> Loading:
        """Start reading the rows that were in the database at `open`; once.

        `on_ready` is posted when a batch can be taken and when all is read. Damaged rows are counted and deleted. Rows
        at places above all those of `open` are not shown, so segments with larger numbers than any before are the
        owner's own. The interpreter lock is held for about half a microsecond a row, a batch at a time.
        """
        assert self._loading is None, "rows are loaded once"
        self._loading = Loading(
            self._path,
            self._last_place,
            batch_rows,
            lambda: self._call(on_ready),
            self._scrub,
            self._suspect,
            self._alone,
        )
        return self._loading

    @property
    def pending(self) -> int:
        """Changes posted and not yet answered, and those kept for a retry."""
        return self._changes.qsize() + self._in_hand + len(self._kept)

    @property
    def full(self) -> bool:
        """Too much is pending: post no more rows for now. Nothing is refused, this is a request."""
        return self.pending >= MAX_PENDING

    def age_s(self) -> float:
        """How long the current transaction has been with the disk; 0 between two."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    def bytes_on_disk(self) -> int:
        """Size of the database, its log and its shared memory, as of the last commit. Does not block."""
        return self._disk_bytes

    def sync(self, timeout_s: float) -> bool:
        """Wait until everything posted is on the disk, power loss included. Blocks. False: it is not."""
        sync = _Sync(Future())
        self._changes.put(sync)
        self._hurry.set()
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
        self._closing = True
        self._changes.put(None)
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._abandoned = True
        return self._written

    # --- posting and answering -------------------------------------------------------------------

    def _keep(
        self, name: tuple[Any, ...], *statements: Statement, durable: bool = False, done: Done | None = None
    ) -> None:
        self._changes.put(_TableChange(name, statements, durable, done))
        if durable:
            self._hurry.set()

    def _scrub(self, place: int, record: bytes) -> None:
        """Delete a damaged row, unless its place has a new one meanwhile. From the loading thread."""
        query = "DELETE FROM blocks WHERE place = ? AND CAST(record AS BLOB) IS CAST(? AS BLOB)"
        self._keep(("scrub", place), (query, (place, record)))

    def _suspect(self, error: Exception) -> None:
        """Have the next start set the database aside: the fault that SQLite found may not show at open."""
        if not marker_of(self._path).exists():
            log.error("%s is damaged and will be made anew at the next start: %s", self._path, error)
            with suppress(OSError):  # then the next life finds the same fault
                marker_of(self._path).touch()

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no callback is left to run
            self._post(callback, *args)

    def _answer(self, changes: Sequence[_Change], ok: bool) -> None:
        answers = []
        for change in changes:
            if isinstance(change, _Sync):
                change.result.set_result(ok)
            elif change.done is not None:
                answers.append((change.done, ok))
        if answers:
            self._call(self._deliver, answers)

    def _deliver(self, answers: list[tuple[Done, bool]]) -> None:
        """On the loop: call the answered `done`s, so many in one turn. One that raises does not stop the others."""
        waiting = bool(self._answers)
        self._answers.extend(answers)
        if not waiting:
            self._deliver_some()

    def _deliver_some(self) -> None:
        try:
            for _ in range(min(CALLBACKS_AT_ONCE, len(self._answers))):
                done, ok = self._answers.popleft()
                done(ok)
        finally:
            if self._answers:
                self._call(self._deliver_some)

    # --- the catalog's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            db, state, self._last_place = open_database(self._path, self._directory_id, self._alone)
        except (*SQLITE_ERRORS, OSError) as error:
            self._opened.set_exception(
                CatalogUnavailable(f"{self._path} cannot be opened: {error}; see to the disk and its permissions")
            )
            return
        except ConfigError as error:
            self._opened.set_exception(error)
            return
        except BaseException as error:
            self._opened.set_exception(error)
            raise
        with closing_own(db, self._path):
            self._probe(db)
            self._opened.set_result(state)
            while not (self._closing and self._changes.empty()):
                self._turn(db)
                if self._abandoned:
                    return
            if self._kept:
                self._retry(db)
            self._truncate_log(db)
        self._written = not self.error

    def _turn(self, db: sqlite3.Connection) -> None:
        """Wait for changes, commit them, answer; or do periodic work while nothing comes."""
        batch = self._collect()
        if self.error:
            self._put_off(batch)
            if time.monotonic() >= self._retry_at_s:
                self._retry(db)
        elif batch:
            if self._refused_rows:
                batch = self._without_burials(batch)
            problem = self._commit(db, batch)
            if problem:
                self._fail(problem)
                self._put_off(batch)
            else:
                self._in_hand = 0
                self._answer(batch, True)
        elif self._disk_bytes > TRUNCATE_WAL_BYTES:
            self._truncate_log(db)

    def _collect(self) -> list[_Change]:
        """The changes of the next transaction; none after `IDLE_S`, or when a retry is due."""
        wait_s = min(IDLE_S, max(0.0, self._retry_at_s - time.monotonic())) if self.error else IDLE_S
        try:
            first = self._changes.get(timeout=wait_s)
        except queue.Empty:
            return []
        self._in_hand = 1
        if self._changes.qsize() < BATCH_OPS:
            self._hurry.wait(COLLECT_S)
        self._hurry.clear()
        batch = [] if first is None else [first]
        with suppress(queue.Empty):
            while len(batch) < BATCH_OPS:
                change = self._changes.get_nowait()
                self._in_hand += 1
                if change is not None:
                    batch.append(change)
        return batch

    def _commit(self, db: sqlite3.Connection, batch: Sequence[_Change]) -> str:
        """Apply all or nothing; returns what went wrong, or an empty text."""
        durable = any(isinstance(change, _Sync) or getattr(change, "durable", False) for change in batch)
        self._began_s = time.monotonic()
        try:
            if durable:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            _apply(db, batch)
            if durable:  # a transaction that changes nothing would not reach the disk
                db.execute("UPDATE meta SET value = value + 1 WHERE key = 'synced'")
            db.execute("COMMIT")
            self.commits += 1
            problem = ""
        except SQLITE_ERRORS as error:
            problem = str(error) or type(error).__name__
            if is_malformed(error):
                self._suspect(error)
        with suppress(sqlite3.Error):  # the next BEGIN or COMMIT fails if this does
            if db.in_transaction:
                db.execute("ROLLBACK")
            if durable:
                db.execute("PRAGMA synchronous = NORMAL")
        self._began_s = 0.0
        self._measure()
        return problem

    # While `error` is set rows are refused at once. Other changes wait in `_kept`, which is written before any row once
    # writing works again, so no row refers to a missing namespace.

    def _fail(self, problem: str) -> None:
        if not self.error:
            log.warning("%s: nothing can be written, blocks are not saved meanwhile: %s", self._path, problem)
            self._retry_s = RETRY_FIRST_S
        else:
            self._retry_s = min(2 * self._retry_s, RETRY_LONGEST_S)
        self.error = problem
        self.failures += 1
        self._retry_at_s = time.monotonic() + self._retry_s

    def _put_off(self, batch: Sequence[_Change]) -> None:
        for change in batch:
            if isinstance(change, _TableChange):
                self._kept.pop(change.name, None)
                self._kept[change.name] = change
            self._refused_rows |= isinstance(change, _RowChange)
        self._in_hand = 0
        self._answer(batch, False)

    def _without_burials(self, batch: Sequence[_Change]) -> list[_Change]:
        self._answer([change for change in batch if isinstance(change, _Burial)], False)
        return [change for change in batch if not isinstance(change, _Burial)]

    def _retry(self, db: sqlite3.Connection) -> None:
        problem = self._commit(db, [*self._kept.values(), _Sync(Future())])
        if problem:
            self._fail(problem)
        elif self.error:
            log.info("%s can be written again", self._path)
            self.error = ""
            self._kept.clear()

    def _probe(self, db: sqlite3.Connection) -> None:
        """Find out before the first block whether writing works."""
        problem = self._commit(db, [_Sync(Future())])
        if problem:
            self._fail(problem)

    def _truncate_log(self, db: sqlite3.Connection) -> None:
        """Checkpoint the log into the database and free its room; a reader delays that."""
        if size_of(f"{self._path}-wal") > TRUNCATE_WAL_BYTES or self._closing:
            with suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()

    def _measure(self) -> None:
        self._disk_bytes = sum(size_of(f"{self._path}{end}") for end in ("", "-wal", "-shm"))
        self.written_bytes = thread_written_bytes()


def _apply(db: sqlite3.Connection, batch: Sequence[_Change]) -> None:
    """Apply the changes in order. Of several at one place only the last counts, as all become visible at once."""
    rows: dict[int, bytes | None] = {}
    sequence = 0
    for change in batch:
        if isinstance(change, _RowChange):
            rows[change.place] = change.record
            sequence = max(sequence, change.sequence)
        elif isinstance(change, (_TableChange, _Burial)):
            write_rows(db, rows)
            rows.clear()
            for statement, values in change.statements:
                db.execute(statement, values)
    write_rows(db, rows)
    if sequence:
        db.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'sequence'", (sequence,))


def _resum(namespace: int) -> Statement:
    resum = "UPDATE namespaces SET checksum = row_checksum(number, fingerprint, spec, epoch) WHERE number = ?"
    return resum, (namespace,)
