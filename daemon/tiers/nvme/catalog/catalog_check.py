"""Reads, checks and repairs the catalog of a closed directory, without the daemon that owns it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from tiercache.errors import CatalogUnavailable

from .database import (
    NAME,
    SQLITE_ERRORS,
    CatalogState,
    Damaged,
    check_header,
    check_tables,
    connect_to_read,
    marker_of,
    read_page,
    read_small_tables,
    rename_aside,
    size_of,
    write_rows,
)
from .rows import MAX_SLOTS, Row, place_of, unpack_row


def read_state(directory: Path, directory_id: bytes | None = None) -> CatalogState:
    """What a closed database contains besides its rows; with `directory_id` also checks that it is that one's.

    Read-only; blocks. Raises CatalogUnavailable when it cannot be read or is damaged; the text says which. Raises
    ConfigError, given an id, for a newer schema.
    """
    path = directory / NAME
    try:
        if directory_id is not None:
            if marker_of(path).exists():
                raise Damaged("found damaged while it was in use")
            check_header(path)
        with closing(connect_to_read(path)) as db:
            if directory_id is not None:
                check_tables(db, path, directory_id)
            return read_small_tables(db, fresh=False)
    except (*SQLITE_ERRORS, Damaged) as error:
        raise CatalogUnavailable(f"{path} cannot be read: {error}") from error


def is_empty(directory: Path) -> bool:
    """True if there is no database, or one whose creator was killed before it had tables. Read-only; blocks."""
    path = directory / NAME
    try:
        with closing(connect_to_read(path)) as db:
            return not db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except SQLITE_ERRORS:
        return size_of(path) == 0


def repair(directory: Path, places: Sequence[int], segments: Sequence[int], sequence: int) -> None:
    """Delete rows and entries of segments (with their rows) from a closed database; durable on return.

    `sequence`: lower limit for the count of insertions. Blocks; raises CatalogUnavailable.
    """
    path = directory / NAME
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=1.0)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            write_rows(db, dict.fromkeys(places))
            for segment in segments:
                bounds = (place_of(segment, 0), place_of(segment, MAX_SLOTS - 1))
                db.execute("DELETE FROM blocks WHERE place BETWEEN ? AND ?", bounds)
                db.execute("DELETE FROM segments WHERE segment = ?", (segment,))
            db.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'sequence'", (sequence,))
            db.execute("COMMIT")
    except SQLITE_ERRORS as error:
        raise CatalogUnavailable(f"{path} cannot be repaired: {error}") from error


def set_aside(directory: Path) -> Path | None:
    """Rename a closed database that is rejected; the next start makes a new one. Blocks; OSError.

    Returns None if it was deleted for want of room.
    """
    return rename_aside(directory / NAME)


def check_database(directory: Path) -> list[str]:
    """What SQLite itself finds wrong with a closed database. Read-only; blocks, about 1 s for 500k rows."""
    try:
        with closing(connect_to_read(directory / NAME)) as db:
            found = [text for (text,) in db.execute("PRAGMA integrity_check")]
    except SQLITE_ERRORS as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def count_rows(directory: Path, segments: Sequence[int]) -> int:
    """The rows of these segments, while this process has the catalog open. Blocks, about 50 ns a row.

    Raises CatalogUnavailable.
    """
    query = "SELECT count(*) FROM blocks WHERE place BETWEEN ? AND ?"
    bounds = [(place_of(segment, 0), place_of(segment, MAX_SLOTS - 1)) for segment in segments]
    try:
        with closing(connect_to_read(directory / NAME, beside_writer=True)) as db:
            return sum(int(db.execute(query, bound).fetchone()[0]) for bound in bounds)
    except SQLITE_ERRORS as error:
        raise CatalogUnavailable(f"{directory / NAME} cannot be read: {error}") from error


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
