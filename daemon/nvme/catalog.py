"""The durable index of one NVMe directory: which slot holds which block. SQLite, on a thread of its own.

The loop posts changes and never waits. The catalog's thread collects them for some milliseconds and
commits them together, one short transaction each, and their `done(ok)` run on the loop afterwards:

    loop      delete(7) insert(9) ─┐                                   done(True) done(True)
    thread      wait 5 ms, collect └→ BEGIN  apply in order  COMMIT ──┘  wait, collect → ...

A commit survives kill -9 of the daemon; what a flush needs (`raise_epoch`, `add_tombstone`) is on the
disk itself before it is reported. When nothing can be written (disk full, I/O error), rows are refused,
everything else is kept and tried again with growing pauses, and `error` says why; nothing is raised.

On start nothing is believed that cannot be checked: rows carry their own checksum, the small tables
too; a database with a fault in those or in its structure is set aside and an empty one made, after
which every block of the directory is a miss. Only a newer schema stops the start.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from tiercache.daemon.nvme.rows import (
    MAX_SLOTS,
    SQLITE_ERRORS,
    Loading,
    Row,
    connect_to_read,
    decode,
    is_malformed,
    pack_row,
    place_of,
    read_page,
    unpack_row,
)  # fmt: skip
from tiercache.errors import ConfigError, TierCacheError

log = logging.getLogger("tiercache.daemon")

SCHEMA = 1
NAME = "index.db"
BATCH_OPS = 2000
"""Changes in one transaction at most."""
COLLECT_S = 0.005
"""How long the first change of a transaction waits for others."""
MAX_PENDING = 20_000
"""Changes that wait, beyond which `full` asks the owner to hold back."""
CALLBACKS_AT_ONCE = 256
"""`done` calls in one turn of the loop."""
IDLE_S = 1.0
TRUNCATE_WAL_BYTES = 16 << 20
RETRY_FIRST_S, RETRY_LONGEST_S = 0.1, 10.0
ROWS_PER_STATEMENT = (128, 16, 1)
"""A statement lets go of the interpreter lock once however many rows it has; with one row each, a
busy loop takes the lock away at every row and a batch of 2000 takes seconds."""

_TABLES = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value)",
    "namespaces": "CREATE TABLE namespaces(number INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE, spec BLOB, "
    "epoch INTEGER, checksum INTEGER)",
    "segments": "CREATE TABLE segments(segment INTEGER PRIMARY KEY, slot_bytes INTEGER, checksum INTEGER)",
    "blocks": "CREATE TABLE blocks(place INTEGER PRIMARY KEY, record BLOB)",
    "tombstones": "CREATE TABLE tombstones(namespace INTEGER, key BLOB, epoch INTEGER, checksum INTEGER, "
    "PRIMARY KEY(namespace, key))",
}

_MAX_U32 = 0xFFFFFFFF

Done = Callable[[bool], None]
Statement = tuple[str, Sequence[Any]]


class CatalogUnavailable(TierCacheError):
    """The database cannot be used now (disk full, I/O error, no permission). It was left as it is."""


class SavedNamespace(NamedTuple):
    """A namespace that rows may refer to by its number."""

    number: int
    fingerprint: str
    spec: bytes
    epoch: int


class Tombstone(NamedTuple):
    """A flush by key: that block and all after it are gone if their epoch is smaller than `epoch`."""

    namespace: int
    key: bytes
    epoch: int


class CatalogState(NamedTuple):
    """What stood in the database besides the rows.

    `fresh`: it was made just now, so nothing in the directory's segments can be reached.
    `segments`: slot_bytes by segment. `next_sequence` is larger than that of every committed row.
    """

    fresh: bool
    namespaces: list[SavedNamespace]
    segments: dict[int, int]
    tombstones: list[Tombstone]
    next_sequence: int


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
    """The end of a tombstone: refused like a row, and also after any row has been."""

    namespace: int
    key: bytes
    done: Done | None


class _Sync(NamedTuple):
    """Everything posted before is durable when `result` is set; set from the catalog's thread."""

    result: Future[bool]


_Change = _RowChange | _TableChange | _Burial | _Sync


class Catalog:
    """The index of one directory. Its methods are for the loop, or for one thread before that runs.

    `post(callback, *args)` is the loop's call_soon_threadsafe; every `done(ok)` is called through it,
    once; the good ones in the order of posting. `done(False)` means
    - for `insert`, `delete` and `remove_tombstone`: nothing was changed and nothing will be; ask again;
    - for all others: not written yet. It is kept, and tried again as long as the catalog is open.
    Changes that wait are applied in the order of posting; a batch is all or nothing.
    """

    def __init__(self, directory: Path, directory_id: bytes, post: Callable[..., object]) -> None:
        self.error = ""
        self.commits = 0
        self.failures = 0
        self._path = directory / NAME
        self._directory_id = directory_id
        self._post = post
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._in_hand = 0
        self._refused_rows = False
        self._kept: dict[tuple[Any, ...], _TableChange] = {}
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = 0.0
        self._answers: deque[tuple[Done, bool]] = deque()
        self._namespaces: set[int] = set()
        self._disk_bytes = 0
        self._last_place = -1
        self._loading: Loading | None = None
        self._closing = False
        self._abandoned = False
        self._written = False
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self._opened: Future[CatalogState] = Future()

    # --- for the loop ----------------------------------------------------------------------------

    def open(self, timeout_s: float = 30.0) -> CatalogState:
        """Open or make the database; no block rows are read. Blocks: call it before the loop serves.

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
        """The slot holds nothing; it may be overwritten once `done(True)`. No row there is no error."""
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
        """Rows of smaller epochs are gone; never lowers. `done(True)`: survives a power loss."""
        assert namespace in self._namespaces, "an epoch belongs to a namespace that was added"
        assert 0 <= epoch <= _MAX_U32
        raised = ("UPDATE namespaces SET epoch = max(epoch, ?) WHERE number = ?", (epoch, namespace))
        self._keep(("epoch", namespace, epoch), raised, _resum(namespace), durable=True, done=done)

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """The segment is divided into slots of this size. Any rows of another size must be dropped before."""
        values = (segment, slot_bytes, _checksum(segment, slot_bytes))
        self._keep(
            ("segment", segment), ("INSERT OR REPLACE INTO segments VALUES(?, ?, ?)", values), done=done
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
        """Remember a flush by key. `done(True)`: survives a power loss."""
        values = (namespace, key, epoch, _checksum(namespace, key, epoch))
        self._keep(
            ("tombstone", namespace, key),
            ("INSERT OR REPLACE INTO tombstones VALUES(?, ?, ?, ?)", values),
            durable=True, done=done,
        )  # fmt: skip

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        """No row is left that the flush concerns.

        If any row was refused in this life, one that should have gone may still stand in the
        database. Then the tombstone stays, for the next life to apply: `done(False)`.
        """
        self._changes.put(_Burial(namespace, key, done))

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> Loading:
        """Start to read the rows that stood in the database at `open`; once.

        `on_ready` is posted when a batch can be taken and when all is read. Damaged rows are counted
        and deleted. Rows at places above all those of `open` are not shown, so segments with larger
        numbers than any before are the owner's own. The interpreter lock is held for about half a
        microsecond a row and a batch at a time.
        """
        assert self._loading is None, "rows are loaded once"
        self._loading = Loading(
            self._path, self._last_place, batch_rows, lambda: self._call(on_ready), self._scrub, self._suspect
        )
        return self._loading

    @property
    def pending(self) -> int:
        """Changes posted and not yet answered, and those kept for another try."""
        return self._changes.qsize() + self._in_hand + len(self._kept)

    @property
    def full(self) -> bool:
        """Too much waits: post no more rows until it does not. Nothing is refused, this is a request."""
        return self.pending >= MAX_PENDING

    def bytes_on_disk(self) -> int:
        """Size of the database, its log and its shared memory, as of the last commit. Does not block."""
        return self._disk_bytes

    def sync(self, timeout_s: float) -> bool:
        """Wait until all that was posted is on the disk, power loss included. Blocks. False: it is not."""
        sync = _Sync(Future())
        self._changes.put(sync)
        self._hurry.set()
        try:
            return sync.result.result(timeout_s)
        except FutureTimeoutError:
            return False

    def close(self, timeout_s: float) -> bool:
        """Write what waits, put the log into the database, close. Blocks. True: all was written.

        After `timeout_s` the rest is given up unanswered. Nothing may be posted from here on.
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
        """Delete a damaged row, unless its place has got another one meanwhile. From the loading thread."""
        query = "DELETE FROM blocks WHERE place = ? AND CAST(record AS BLOB) IS CAST(? AS BLOB)"
        self._keep(("scrub", place), (query, (place, record)))

    def _suspect(self, error: Exception) -> None:
        """Have the next start set the database aside: what SQLite found wrong may not show at open."""
        if not _marker(self._path).exists():
            log.error("%s is damaged and will be made anew at the next start: %s", self._path, error)
            with suppress(OSError):  # then the next life finds the same fault
                _marker(self._path).touch()

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
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
        """On the loop: call what has been answered, so many in one turn. One that raises stops no other."""
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
            db, state, self._last_place = _open(self._path, self._directory_id)
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
        with closing(db):
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
        """Wait for changes, commit them, answer; or do what is due while nothing comes."""
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
                self._answer(batch, True)
        elif self._disk_bytes > TRUNCATE_WAL_BYTES:
            self._truncate_log(db)
        self._in_hand = 0

    def _collect(self) -> list[_Change]:
        """The changes of the next transaction, or none after `IDLE_S`, or when a retry is due."""
        wait_s = min(IDLE_S, max(0.0, self._retry_at_s - time.monotonic())) if self.error else IDLE_S
        try:
            first = self._changes.get(timeout=wait_s)
        except queue.Empty:
            return []
        if self._changes.qsize() < BATCH_OPS:
            self._hurry.wait(COLLECT_S)
        self._hurry.clear()
        batch = [] if first is None else [first]
        with suppress(queue.Empty):
            while len(batch) < BATCH_OPS:
                self._in_hand = len(batch)
                change = self._changes.get_nowait()
                if change is not None:
                    batch.append(change)
        self._in_hand = len(batch)
        return batch

    def _commit(self, db: sqlite3.Connection, batch: Sequence[_Change]) -> str:
        """Apply all or nothing; what went wrong, or an empty text."""
        durable = any(isinstance(change, _Sync) or getattr(change, "durable", False) for change in batch)
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
        self._measure()
        return problem

    # While `error` is set rows are refused at once. What else was to be written waits in `_kept`, which
    # goes before any row once writing works again, so no row refers to a namespace that is not there.

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
        """Move the log into the database and give its room back; a reader puts that off."""
        if _size(f"{self._path}-wal") > TRUNCATE_WAL_BYTES or self._closing:
            with suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()

    def _measure(self) -> None:
        self._disk_bytes = sum(_size(f"{self._path}{end}") for end in ("", "-wal", "-shm"))


# --- the database -----------------------------------------------------------------------------------


class _Damaged(Exception):
    """The content of the database is not to be believed."""


def _apply(db: sqlite3.Connection, batch: Sequence[_Change]) -> None:
    """Make the changes, in order. Of several at one place only the last counts, as all become visible at once."""
    rows: dict[int, bytes | None] = {}
    sequence = 0
    for change in batch:
        if isinstance(change, _RowChange):
            rows[change.place] = change.record
            sequence = max(sequence, change.sequence)
        elif isinstance(change, _TableChange):
            _apply_rows(db, rows)
            rows.clear()
            for statement, values in change.statements:
                db.execute(statement, values)
        elif isinstance(change, _Burial):
            burial = "DELETE FROM tombstones WHERE namespace = ? AND key = ?"
            db.execute(burial, (change.namespace, change.key))
    _apply_rows(db, rows)
    if sequence:
        db.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'sequence'", (sequence,))


def _apply_rows(db: sqlite3.Connection, rows: dict[int, bytes | None]) -> None:
    places = sorted(rows)
    deleted = [place for place in places if rows[place] is None]
    inserted = [place for place in places if rows[place] is not None]
    for part in _parts(deleted):
        db.execute(f"DELETE FROM blocks WHERE place IN ({','.join('?' * len(part))})", part)
    for part in _parts(inserted):
        values = [value for place in part for value in (place, rows[place])]
        db.execute(f"INSERT OR REPLACE INTO blocks VALUES {','.join(['(?,?)'] * len(part))}", values)


def _parts(places: list[int]) -> Iterator[list[int]]:
    """Slices of a few fixed lengths, so that SQLite knows the statements already."""
    first = 0
    for length in ROWS_PER_STATEMENT:
        while len(places) - first >= length:
            yield places[first : first + length]
            first += length


def _checksum(*values: Any) -> int:
    """Over the columns of a row of the small tables; 63 bits, as SQLite's integers are signed."""
    return xxh3_64_intdigest(repr(values).encode()) >> 1


def _resum(namespace: int) -> Statement:
    resum = "UPDATE namespaces SET checksum = row_checksum(number, fingerprint, spec, epoch) WHERE number = ?"
    return resum, (namespace,)


def _open(path: Path, directory_id: bytes) -> tuple[sqlite3.Connection, CatalogState, int]:
    """The database as it is, or an empty one in its place; and the largest place of a row in it."""
    try:
        return _open_as_it_is(path, directory_id)
    except _Damaged as error:
        problem = str(error)
    except SQLITE_ERRORS as error:
        if not is_malformed(error):
            raise
        problem = str(error)
    kept = _set_aside(path)
    log.warning("%s: %s; the blocks of its directory are lost, it is kept as %s", path, problem, kept.name)
    return _open_as_it_is(path, directory_id)


def _open_as_it_is(path: Path, directory_id: bytes) -> tuple[sqlite3.Connection, CatalogState, int]:
    if _marker(path).exists():
        raise _Damaged("found damaged while it was in use")
    if _size(path) > 0:
        _check_header(path)
        with closing(connect_to_read(path)) as reader:  # so that a newer one is not even touched
            _check_tables(reader, path, directory_id)
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    try:
        db.text_factory = decode
        db.create_function("row_checksum", -1, _checksum, deterministic=True)
        if db.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise sqlite3.OperationalError("its file system cannot share memory between processes (WAL)")
        for setting in ("synchronous = NORMAL", f"journal_size_limit = {TRUNCATE_WAL_BYTES}", "cache_size = -4096"):
            db.execute(f"PRAGMA {setting}")
        fresh = not db.execute("SELECT 1 FROM sqlite_master").fetchone()
        if fresh:
            _create(db, path, directory_id)
        state = _read_state(db, fresh)
        (last_place,) = db.execute("SELECT max(place) FROM blocks").fetchone()
        return db, state, -1 if last_place is None else last_place
    except BaseException:
        db.close()
        raise


def _create(db: sqlite3.Connection, path: Path, directory_id: bytes) -> None:
    db.execute("PRAGMA synchronous = FULL")
    db.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.values():
        db.execute(statement)
    meta = [("schema", SCHEMA), ("directory_id", directory_id), ("sequence", 0), ("synced", 0)]
    db.executemany("INSERT INTO meta VALUES(?, ?)", meta)
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.execute("PRAGMA synchronous = NORMAL")
    _fsync_directory(path.parent)


def _check_header(path: Path) -> None:
    """The bytes of the file's header that are the same in all our databases.

    A flipped bit there can make SQLite call the file read-only or of no known format, which would
    look like a fault of the disk.
    """
    with path.open("rb") as file:
        header = file.read(100)
    fixed = ((0, b"SQLite format 3\0"), (20, b"\x00\x40\x20\x20"), (44, b"\0\0\0\4"), (56, b"\0\0\0\1"))
    if any(header[at : at + len(want)] != want for at, want in fixed) or header[18:20] not in (b"\1\1", b"\2\2"):
        raise _Damaged("not a database of ours")


def _check_tables(db: sqlite3.Connection, path: Path, directory_id: bytes) -> None:
    """Raises ConfigError for a newer schema, _Damaged for one that is not ours. `meta` never changes its form."""
    tables = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    if not tables:
        return  # its maker was killed before it had any
    if tables.get("meta") != _TABLES["meta"]:
        raise _Damaged("not a database of ours")
    meta = dict(db.execute("SELECT key, value FROM meta"))
    schema = meta.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ConfigError(
            f"{path} is of schema {schema}, this tiercache knows up to {SCHEMA}: "
            f"upgrade tiercache, or move the file away to start with an empty cache there"
        )
    if schema != SCHEMA:
        raise _Damaged(f"its schema {schema!r} is not {SCHEMA}")
    if tables != _TABLES:
        raise _Damaged("its tables are not those of this version")
    if meta.get("directory_id") != directory_id:
        raise _Damaged("it belongs to another directory")


def _read_state(db: sqlite3.Connection, fresh: bool) -> CatalogState:
    """The small tables. One row that fails its checksum spoils all: it may have been a flush."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    namespaces = list(db.execute("SELECT number, fingerprint, spec, epoch, checksum FROM namespaces"))
    segments = list(db.execute("SELECT segment, slot_bytes, checksum FROM segments"))
    tombstones = list(db.execute("SELECT namespace, key, epoch, checksum FROM tombstones"))
    for row in (*namespaces, *segments, *tombstones):
        if _checksum(*row[:-1]) != row[-1]:
            raise _Damaged("a row of its small tables fails its checksum")
    if not isinstance(meta.get("sequence"), int) or not isinstance(meta.get("synced"), int):
        raise _Damaged("its counts are not numbers")
    return CatalogState(
        fresh=fresh,
        namespaces=[SavedNamespace(*row[:-1]) for row in namespaces],
        segments={segment: slot_bytes for segment, slot_bytes, _ in segments},
        tombstones=[Tombstone(*row[:-1]) for row in tombstones],
        next_sequence=meta["sequence"] + 1,
    )


def _set_aside(path: Path) -> Path:
    """Rename the database with its log; at most one such is kept. Raises OSError.

    The marker stands meanwhile: killed half-way, the next start must not take what is left for whole.
    A log that stayed behind would be played into the new database.
    """
    _marker(path).touch()
    for old in path.parent.glob(f"{path.name}.damaged-*"):
        old.unlink()
    kept = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    for end in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{end}", f"{kept}{end}")
    _fsync_directory(path.parent)
    _marker(path).unlink()
    return kept


def _marker(path: Path) -> Path:
    """Stands beside a database that is to be set aside at the next start."""
    return path.with_name(f"{path.name}.suspect")


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _size(path: Path | str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


# --- off-line ---------------------------------------------------------------------------------------


def read_state(directory: Path, directory_id: bytes | None = None) -> CatalogState:
    """What a closed database says besides its rows; with `directory_id` also whether it is that one's.

    Read-only; blocks. Raises CatalogUnavailable when it cannot be read or is damaged; the text says
    which. Raises ConfigError, given an id, for a newer schema.
    """
    path = directory / NAME
    try:
        if directory_id is not None:
            if _marker(path).exists():
                raise _Damaged("found damaged while it was in use")
            _check_header(path)
        with closing(connect_to_read(path)) as db:
            if directory_id is not None:
                _check_tables(db, path, directory_id)
            return _read_state(db, fresh=False)
    except (*SQLITE_ERRORS, _Damaged) as error:
        raise CatalogUnavailable(f"{path} cannot be read: {error}") from error


def is_empty(directory: Path) -> bool:
    """Whether there is no database, or one whose maker was killed before it had tables. Read-only; blocks."""
    path = directory / NAME
    try:
        with closing(connect_to_read(path)) as db:
            return not db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except SQLITE_ERRORS:
        return _size(path) == 0


def mend(directory: Path, places: Sequence[int], segments: Sequence[int], sequence: int) -> None:
    """Delete rows and entries of segments (with their rows) from a closed database; durable on return.

    `sequence`: what the count of insertions should be at least. Blocks; raises CatalogUnavailable.
    """
    path = directory / NAME
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=1.0)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            _apply_rows(db, dict.fromkeys(places))
            for segment in segments:
                bounds = (place_of(segment, 0), place_of(segment, MAX_SLOTS - 1))
                db.execute("DELETE FROM blocks WHERE place BETWEEN ? AND ?", bounds)
                db.execute("DELETE FROM segments WHERE segment = ?", (segment,))
            db.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'sequence'", (sequence,))
            db.execute("COMMIT")
    except SQLITE_ERRORS as error:
        raise CatalogUnavailable(f"{path} cannot be mended: {error}") from error


def set_aside(directory: Path) -> Path:
    """Rename a closed database that is not to be believed; the next start makes a new one. Blocks; OSError."""
    return _set_aside(directory / NAME)


def check_database(directory: Path) -> list[str]:
    """What SQLite itself finds wrong with a closed database. Read-only; blocks, about 1 s for 500k rows."""
    try:
        with closing(connect_to_read(directory / NAME)) as db:
            found = [text for (text,) in db.execute("PRAGMA integrity_check")]
    except SQLITE_ERRORS as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def check_rows(directory: Path, page_rows: int = 4096) -> Iterator[tuple[int, Row | None]]:
    """All rows of a closed database by place, None for a damaged one. Read-only; blocks.

    Raises CatalogUnavailable when it cannot be read (any further).
    """
    path = directory / NAME
    after = -(1 << 63)
    try:
        with closing(connect_to_read(path)) as db:
            while page := read_page(db, after, page_rows):
                for place, record in page:
                    yield place, unpack_row(place, record) if type(record) is bytes else None
                if page[-1][0] <= after:
                    return
                after = page[-1][0]
    except SQLITE_ERRORS as error:
        raise CatalogUnavailable(f"{path} cannot be read: {error}") from error
