"""Changes of the catalog, and how a batch of them is applied."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from .database import write_rows
from .rows import RowFields, pack_row

Done = Callable[[bool], None]
"""Called on the loop once a change is written (True) or cannot be written now (False)."""
Answer = tuple[Done, bool, int]
"""What is to be called, with what, and for how many rows it answers."""
Statement = tuple[str, Sequence[Any]]


class RowsChange(NamedTuple):
    """Rows that are written or refused together: packed by the thread that applies them. `rows` None deletes."""

    places: Sequence[int]
    rows: Sequence[RowFields] | None
    done: Done | None


class TableChange(NamedTuple):
    """Statements that must not be lost. `name`: a later change of the same name makes this one needless."""

    name: tuple[Any, ...]
    statements: tuple[Statement, ...]
    durable: bool
    done: Done | None


class Burial(NamedTuple):
    """Removal of something that rows may still need: refused like a row, and also once any row was refused."""

    statements: tuple[Statement, ...]
    done: Done | None


class Sync(NamedTuple):
    """Everything posted before is durable when `result` is set, by the catalog's thread."""

    result: Future[bool]


Change = RowsChange | TableChange | Burial | Sync


def rows_of(change: Change | None) -> int:
    """How many rows a change counts for."""
    return len(change.places) if isinstance(change, RowsChange) else 1


def apply(db: sqlite3.Connection, batch: Sequence[Change]) -> None:
    """Apply the changes in order. Of several at one place only the last counts, as all become visible at once."""
    rows: dict[int, bytes | None] = {}
    sequence = 0
    for change in batch:
        if isinstance(change, RowsChange):
            if change.rows is None:
                rows.update(dict.fromkeys(change.places))
            else:
                rows.update(zip(change.places, map(pack_row, change.places, change.rows), strict=True))
                sequence = max(sequence, *(row[9] for row in change.rows))  # RowFields ends with it
        elif isinstance(change, (TableChange, Burial)):
            write_rows(db, rows)
            rows.clear()
            for statement, values in change.statements:
                db.execute(statement, values)
    write_rows(db, rows)
    if sequence:
        db.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'sequence'", (sequence,))
