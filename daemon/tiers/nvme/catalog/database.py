"""The SQLite file of one NVMe directory: its tables, how it is opened, and when it is rejected.

    meta         schema, directory_id, and two counts: sequence (the largest of any row), synced; and with encryption
                 key_id, key_since (the first sequence of a row of that key)
    namespaces   number ─► fingerprint, spec, epoch      one row each, with a checksum over its columns
    segments     segment ─► bytes of its slots           likewise
    tombstones   namespace, key ─► epoch                 likewise
    blocks       place ─► record                         rows.py; each record has its own checksum

A file that is damaged, of another directory or not ours at all is renamed to index.db.damaged-DATE with its log, and an
empty one is made. A file that cannot be reached now, or of a newer schema, is left alone.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from tiercache.daemon.tiers.nvme.disk.aside import remove
from tiercache.errors import ConfigError
from tiercache.ground.file_systems import sync_directory

log = logging.getLogger("tiercache.daemon")

SCHEMA = 1
NAME = "index.db"
TRUNCATE_WAL_BYTES = 16 << 20
"""A larger log is checkpointed into the database and its room freed."""
ROWS_PER_STATEMENT = (128, 16, 1)
"""A statement releases the interpreter lock once however many rows it has; with one row each, a busy loop takes the
lock away at every row and a batch of 2000 takes seconds."""

FILE_ENDS = ("", "-wal", "-shm")
"""Suffixes of its files."""
_ALONE_VFS = "unix-excl"

_TABLES = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value)",
    "namespaces": "CREATE TABLE namespaces(number INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE, spec BLOB, "
    "epoch INTEGER, checksum INTEGER)",
    "segments": "CREATE TABLE segments(segment INTEGER PRIMARY KEY, slot_bytes INTEGER, checksum INTEGER)",
    "blocks": "CREATE TABLE blocks(place INTEGER PRIMARY KEY, record BLOB)",
    "tombstones": "CREATE TABLE tombstones(namespace INTEGER, key BLOB, epoch INTEGER, checksum INTEGER, "
    "PRIMARY KEY(namespace, key))",
}

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What the sqlite3 module raises; the second when the text of an error quotes damaged bytes."""


def is_malformed(error: Exception) -> bool:
    """True if SQLite reports wrong content, not that the file cannot be reached now.

    Its errors "malformed" and "not a database" are plain DatabaseErrors; "full", "I/O error", "read-only",
    "locked" and the like are OperationalErrors, of which one is about content.
    """
    return (
        type(error) is sqlite3.DatabaseError
        or isinstance(error, UnicodeDecodeError)
        or "unsupported file format" in str(error)
    )


class Damaged(Exception):
    """The content of the database is rejected."""


class SavedNamespace(NamedTuple):
    """A namespace that rows may refer to by its number."""

    number: int
    fingerprint: str
    spec: bytes
    epoch: int


class Tombstone(NamedTuple):
    """A flush by key: that block and all after it are dropped if their epoch is smaller than `epoch`."""

    namespace: int
    key: bytes
    epoch: int


class CatalogState(NamedTuple):
    """What the database contained besides the rows.

    `fresh`: it was made just now, so nothing in the directory's segments can be reached. `segments`: slot_bytes by
    segment. `next_sequence` is larger than that of every committed row. `key_id`: identifies the nvme_key of encrypted
    rows from sequence `key_since` on; empty: none is known.
    """

    fresh: bool
    namespaces: list[SavedNamespace]
    segments: dict[int, int]
    tombstones: list[Tombstone]
    next_sequence: int
    key_id: bytes = b""
    key_since: int = 0


# --- opening ----------------------------------------------------------------------------------------


def open_database(path: Path, directory_id: bytes) -> tuple[sqlite3.Connection, CatalogState, int]:
    """The database as it is, or an empty one in its place; and the largest place of a row in it (-1: none).

    For the calling thread; blocks. Raises ConfigError for a newer schema, one of SQLITE_ERRORS or OSError when it
    cannot be reached now.
    """
    try:
        return _open_as_it_is(path, directory_id)
    except Damaged as error:
        problem = str(error)
    except SQLITE_ERRORS as error:
        if not is_malformed(error):
            raise
        problem = str(error)
    kept = rename_aside(path)
    what = "deleted, since the disk is full" if kept is None else f"kept as {kept.name}"
    log.warning("%s: %s; the blocks of its directory are lost, it is %s", path, problem, what)
    return _open_as_it_is(path, directory_id)


def _open_as_it_is(path: Path, directory_id: bytes) -> tuple[sqlite3.Connection, CatalogState, int]:
    if os.path.lexists(marker_of(path)):
        raise Damaged("found damaged while it was in use")
    for end in FILE_ENDS:
        file = Path(f"{path}{end}")
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise Damaged(f"{file.name} is not a plain file")
    if size_of(path) > 0:
        check_header(path)
    db = connect_to_write(path)
    try:
        check_tables(db, path, directory_id)
        db.create_function("row_checksum", -1, row_checksum, deterministic=True)
        if db.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise sqlite3.OperationalError("its file system cannot share memory between processes (WAL)")
        for setting in ("synchronous = NORMAL", f"journal_size_limit = {TRUNCATE_WAL_BYTES}", "cache_size = -4096"):
            db.execute(f"PRAGMA {setting}")
        fresh = _is_empty(db) and _create(db, path, directory_id)
        state = read_small_tables(db, fresh)
        (last_place,) = db.execute("SELECT max(place) FROM blocks").fetchone()
        return db, state, -1 if last_place is None else last_place
    except BaseException:
        db.close()
        raise


def _is_empty(db: sqlite3.Connection) -> bool:
    return not db.execute("SELECT 1 FROM sqlite_master").fetchone()


def _create(db: sqlite3.Connection, path: Path, directory_id: bytes) -> bool:
    """Create the tables; False if another opener, one that was given up, has just done so."""
    db.execute("PRAGMA synchronous = FULL")
    db.execute("BEGIN IMMEDIATE")
    if not _is_empty(db):
        db.execute("ROLLBACK")
        db.execute("PRAGMA synchronous = NORMAL")
        return False
    for statement in _TABLES.values():
        db.execute(statement)
    meta = [("schema", SCHEMA), ("directory_id", directory_id), ("sequence", 0), ("synced", 0)]
    db.executemany("INSERT INTO meta VALUES(?, ?)", meta)
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.execute("PRAGMA synchronous = NORMAL")
    sync_directory(path.parent)
    return True


def check_header(path: Path) -> None:
    """Raises Damaged unless the header bytes that all our databases share are there.

    A flipped bit there can make SQLite call the file read-only or of no known format, which would look like a fault of
    the disk. Schema format and encoding are zeros until the tables have come from the log into the file; its creator
    may have been killed before.
    """
    with path.open("rb") as file:
        header = file.read(100)
    fixed = header.startswith(b"SQLite format 3\0") and header[20:24] == b"\x00\x40\x20\x20"
    form = header[44:48] + header[56:60]
    if not fixed or header[18:20] not in (b"\1\1", b"\2\2") or form not in (b"\0\0\0\4\0\0\0\1", bytes(8)):
        raise Damaged("not a database of ours")


def check_tables(db: sqlite3.Connection, path: Path, directory_id: bytes) -> None:
    """Raises ConfigError for a newer schema, Damaged for one that is not ours. The form of `meta` never changes."""
    tables = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    if not tables:
        return  # its creator was killed before it had any
    if tables.get("meta") != _TABLES["meta"]:
        raise Damaged("not a database of ours")
    meta = dict(db.execute("SELECT key, value FROM meta"))
    schema = meta.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ConfigError(
            f"{path} is of schema {schema}, this tiercache knows up to {SCHEMA}: "
            f"upgrade tiercache, or move the file away to start with an empty cache there"
        )
    if schema != SCHEMA:
        raise Damaged(f"its schema {schema!r} is not {SCHEMA}")
    if tables != _TABLES:
        raise Damaged("its tables are not those of this version")
    if meta.get("directory_id") != directory_id:
        raise Damaged("it belongs to another directory")


# --- setting aside ----------------------------------------------------------------------------------


def rename_aside(path: Path) -> Path | None:
    """Rename the database with its log; at most one such is kept. Returns None if it was deleted for want of room.

    Raises OSError. The marker stays in place meanwhile: after a kill half-way, the next start must not take the rest
    for whole. A log that stayed behind would be replayed into the new database.
    """
    for old in path.parent.glob(f"{path.name}.damaged-*"):
        remove(old)
    try:
        if not os.path.lexists(marker_of(path)):
            marker_of(path).touch()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        for end in FILE_ENDS:  # the database first: SQLite ignores a log without one
            with suppress(FileNotFoundError):
                remove(Path(f"{path}{end}"))
        return None
    kept = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    for end in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{end}", f"{kept}{end}")
    sync_directory(path.parent)
    remove(marker_of(path))
    return kept


def marker_of(path: Path) -> Path:
    """The marker beside a database that is to be set aside at the next start."""
    return path.with_name(f"{path.name}.suspect")


def size_of(path: Path | str) -> int:
    """Bytes of the file; 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def thread_written_bytes() -> int:
    """Bytes that the calling thread has written to files so far; 0 where the kernel does not count them."""
    try:
        fd = os.open("/proc/thread-self/io", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 512).partition(b"wchar:")[2].split(None, 1)[0])
    finally:
        os.close(fd)


# --- reading and writing ----------------------------------------------------------------------------


def read_small_tables(db: sqlite3.Connection, fresh: bool) -> CatalogState:
    """The small tables. Raises Damaged: one row with a bad checksum spoils all, since it may have been a flush."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    namespaces = list(db.execute("SELECT number, fingerprint, spec, epoch, checksum FROM namespaces"))
    segments = list(db.execute("SELECT segment, slot_bytes, checksum FROM segments"))
    tombstones = list(db.execute("SELECT namespace, key, epoch, checksum FROM tombstones"))
    for row in (*namespaces, *segments, *tombstones):
        if row_checksum(*row[:-1]) != row[-1]:
            raise Damaged("a row of its small tables fails its checksum")
    if not isinstance(meta.get("sequence"), int) or not isinstance(meta.get("synced"), int):
        raise Damaged("its counts are not numbers")
    if not isinstance(meta.get("key_id", b""), bytes) or not isinstance(meta.get("key_since", 0), int):
        raise Damaged("what it says of its key is not to be understood")
    return CatalogState(
        fresh=fresh,
        namespaces=[SavedNamespace(*row[:-1]) for row in namespaces],
        segments={segment: slot_bytes for segment, slot_bytes, _ in segments},
        tombstones=[Tombstone(*row[:-1]) for row in tombstones],
        next_sequence=meta["sequence"] + 1,
        key_id=meta.get("key_id", b""),
        key_since=meta.get("key_since", 0),
    )


def row_checksum(*values: Any) -> int:
    """Over the columns of a row of the small tables; 63 bits, as SQLite's integers are signed."""
    return xxh3_64_intdigest(repr(values).encode()) >> 1


def connect_to_write(path: Path) -> sqlite3.Connection:
    """A connection for the calling thread. Raises sqlite3.Error.

    What connections share is in this process's memory, not in a file beside the database that each of them maps
    (https://www.sqlite.org/vfs.html, "unix-excl"): where the disk has no room for a page of that file, SIGBUS ends the
    process. So no other process may have the database open meanwhile: the lock of the directory ensures that.
    """
    return _connect(path, f"?vfs={_ALONE_VFS}")


def connect_to_read(path: Path, beside_writer: bool = False) -> sqlite3.Connection:
    """A read-only connection for the calling thread. Raises sqlite3.Error.

    `beside_writer`: while this process has a connection for writing; else nobody may have one.
    """
    if beside_writer:
        return _connect(path, f"?mode=ro&vfs={_ALONE_VFS}")
    db = _connect(path, "?mode=ro")
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:  # a full disk has no room for the file that it would share
        db.close()
        db = _connect(path, f"?mode=rw&vfs={_ALONE_VFS}")
        db.execute("PRAGMA query_only = ON")
    return db


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}{mode}", uri=True, isolation_level=None, timeout=1.0)
    db.text_factory = decode_text
    return db


def decode_text(text: bytes) -> str:
    """Text factory for SQLite: damaged text must not raise an error of its own."""
    return text.decode("utf-8", "backslashreplace")


def read_page(db: sqlite3.Connection, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Up to `limit` rows whose place is larger than `after`, unverified, in one short read transaction.

    Each row read releases the interpreter lock. The query has no upper bound: one place with a flipped bit would end
    the scan there.
    """
    query = "SELECT place, record FROM blocks WHERE place > ? ORDER BY place LIMIT ?"
    return db.execute(query, (after, limit)).fetchall()


def write_rows(db: sqlite3.Connection, rows: dict[int, bytes | None]) -> None:
    """Set the records of these places, None deletes, as part of the caller's transaction."""
    places = sorted(rows)
    deleted = [place for place in places if rows[place] is None]
    inserted = [place for place in places if rows[place] is not None]
    for part in _parts(deleted):
        db.execute(f"DELETE FROM blocks WHERE place IN ({','.join('?' * len(part))})", part)
    for part in _parts(inserted):
        values = [value for place in part for value in (place, rows[place])]
        db.execute(f"INSERT OR REPLACE INTO blocks VALUES {','.join(['(?,?)'] * len(part))}", values)


def _parts(places: list[int]) -> Iterator[list[int]]:
    """Slices of a few fixed lengths, so that SQLite finds prepared statements."""
    first = 0
    for length in ROWS_PER_STATEMENT:
        while len(places) - first >= length:
            yield places[first : first + length]
            first += length
