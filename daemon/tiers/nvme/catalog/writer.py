"""The catalog's thread: it collects changes, commits them together, and tries again when the disk refuses."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tiercache.errors import CatalogUnavailable, ConfigError

from .changes import (
    Answer,
    Burial,
    Change,
    RowsChange,
    Sync,
    TableChange,
    apply,
    rows_of,
)
from .database import (
    SQLITE_ERRORS,
    TRUNCATE_WAL_BYTES,
    CatalogState,
    is_malformed,
    marker_of,
    open_database,
    size_of,
    thread_written_bytes,
)

log = logging.getLogger("tiercache.daemon")

BATCH_OPS = 2000
"""Most changes in one transaction, a row a change; a batch of rows is not divided."""
COLLECT_S = 0.005
"""How long the first change of a transaction waits for others."""
IDLE_S = 1.0
RETRY_FIRST_S, RETRY_LONGEST_S = 0.1, 10.0


@contextmanager
def closing_own(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Close `db` at the end; `path` is where its file was when this began. Blocks as the disk does."""
    own = -1
    with suppress(OSError):  # moved already, and nothing is in its place
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        if own < 0 or _leads_to(path, own):
            db.close()
        else:  # closing would remove the log of another database; the descriptors stay open until the daemon ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
        if own >= 0:
            os.close(own)  # after `db`: closing any descriptor of a file ends this process's locks on it


def _leads_to(path: Path, fd: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


class Writer:
    """Writes the changes of one catalog to its database. Its methods are for the catalog, from the loop.

    `answer(answers)` is called by the thread: each `done` of a batch, and whether it was written.
    """

    def __init__(self, path: Path, directory_id: bytes, answer: Callable[[list[Answer]], None]) -> None:
        self.error = ""
        self.commits = 0
        self.failures = 0
        self.last_place = -1
        """The last place that the database had a row for when it was opened."""
        self.disk_bytes = 0
        """Size of the database, its log and its shared memory, as of the last commit."""
        self.written_bytes = 0
        """Bytes written to the database and its log in this life, as of the last commit."""
        self._path = path
        self._directory_id = directory_id
        self._post_answers = answer
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._in_hand = 0
        # Rows of batches beyond the one that the queue counts each for: put by the loop, taken by the thread.
        self._more_put = self._more_taken = 0
        self._refused_rows = False
        self._kept: dict[tuple[Any, ...], TableChange] = {}
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = 0.0
        self._began_s = 0.0  # start of the current transaction; 0 between two
        self._closing = False
        self._abandoned = False
        self._written = False
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self._opened: Future[CatalogState] = Future()

    def open(self, timeout_s: float) -> CatalogState:
        """Start the thread, which opens the database. Blocks; raises as `Catalog.open` does."""
        self._thread.start()
        try:
            return self._opened.result(timeout_s)
        except FutureTimeoutError:
            self.give_up()
            raise CatalogUnavailable(
                f"{self._path} did not open within {timeout_s:g} s: check that its disk answers"
            ) from None

    def put(self, change: Change, soon: bool = False) -> None:
        """Have a change written after all that were put before; `soon`: without waiting for others to join it."""
        if isinstance(change, RowsChange):  # from the loop alone
            self._more_put += rows_of(change) - 1
        self._changes.put(change)
        if soon:
            self._hurry.set()

    @property
    def pending(self) -> int:
        """Changes put and not yet written or refused, and those kept for a retry."""
        return self._changes.qsize() + self._more_put - self._more_taken + self._in_hand + len(self._kept)

    def age_s(self) -> float:
        """How long the current transaction has been with the disk; 0 between two."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    def close(self, deadline_s: float) -> bool:
        """Write what is pending, then close the database. Blocks. True: all was written.

        After the deadline (of `time.monotonic`) the rest is given up unanswered.
        """
        self._closing = True
        self._changes.put(None)
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._abandoned = True
        return self._written

    def join(self) -> None:
        """Wait until the thread has ended, for as long as that takes."""
        if self._thread.ident is not None:
            self._thread.join()

    def give_up(self) -> None:
        """Write nothing more: the thread ends after its current turn."""
        self._abandoned = self._closing = True

    def suspect(self, error: Exception) -> None:
        """Have the next start set the database aside: the fault that SQLite found may not show at open."""
        if not marker_of(self._path).exists():
            log.error("%s is damaged and will be recreated at the next start: %s", self._path, error)
            with suppress(OSError):  # then the next life finds the same fault
                marker_of(self._path).touch()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            db, state, self.last_place = open_database(self._path, self._directory_id)
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
        elif self.disk_bytes > TRUNCATE_WAL_BYTES:
            self._truncate_log(db)

    def _collect(self) -> list[Change]:
        """The changes of the next transaction; none after `IDLE_S`, or when a retry is due."""
        wait_s = min(IDLE_S, max(0.0, self._retry_at_s - time.monotonic())) if self.error else IDLE_S
        try:
            first = self._changes.get(timeout=wait_s)
        except queue.Empty:
            return []
        batch = self._with([], first)
        if self._changes.qsize() < BATCH_OPS:
            self._hurry.wait(COLLECT_S)
        self._hurry.clear()
        with suppress(queue.Empty):
            while self._in_hand < BATCH_OPS:
                self._with(batch, self._changes.get_nowait())
        return batch

    def _with(self, batch: list[Change], change: Change | None) -> list[Change]:
        """A batch with one more change in hand; None is the word to close."""
        if change is not None:
            self._in_hand += rows_of(change)
            self._more_taken += rows_of(change) - 1
            batch.append(change)
        return batch

    def _commit(self, db: sqlite3.Connection, batch: Sequence[Change]) -> str:
        """Apply all or nothing; returns what went wrong, or an empty text."""
        durable = any(isinstance(change, Sync) or getattr(change, "durable", False) for change in batch)
        self._began_s = time.monotonic()
        try:
            if durable:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            apply(db, batch)
            if durable:  # a transaction that changes nothing would not reach the disk
                db.execute("UPDATE meta SET value = value + 1 WHERE key = 'synced'")
            db.execute("COMMIT")
            self.commits += 1
            problem = ""
        except SQLITE_ERRORS as error:
            problem = str(error) or type(error).__name__
            if is_malformed(error):
                self.suspect(error)
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

    def _put_off(self, batch: Sequence[Change]) -> None:
        for change in batch:
            if isinstance(change, TableChange):
                self._kept.pop(change.name, None)
                self._kept[change.name] = change
            self._refused_rows |= isinstance(change, RowsChange)
        self._in_hand = 0
        self._answer(batch, False)

    def _without_burials(self, batch: Sequence[Change]) -> list[Change]:
        self._answer([change for change in batch if isinstance(change, Burial)], False)
        return [change for change in batch if not isinstance(change, Burial)]

    def _retry(self, db: sqlite3.Connection) -> None:
        problem = self._commit(db, [*self._kept.values(), Sync(Future())])
        if problem:
            self._fail(problem)
        elif self.error:
            log.info("%s can be written again", self._path)
            self.error = ""
            self._kept.clear()

    def _probe(self, db: sqlite3.Connection) -> None:
        """Find out before the first block whether writing works."""
        problem = self._commit(db, [Sync(Future())])
        if problem:
            self._fail(problem)

    def _truncate_log(self, db: sqlite3.Connection) -> None:
        """Checkpoint the log into the database and free its room; a reader delays that."""
        if size_of(f"{self._path}-wal") > TRUNCATE_WAL_BYTES or self._closing:
            with suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()

    def _measure(self) -> None:
        self.disk_bytes = sum(size_of(f"{self._path}{end}") for end in ("", "-wal", "-shm"))
        self.written_bytes = thread_written_bytes()

    def _answer(self, changes: Sequence[Change], ok: bool) -> None:
        answers = list[Answer]()
        for change in changes:
            if isinstance(change, Sync):
                change.result.set_result(ok)
            elif change.done is not None:
                answers.append((change.done, ok, rows_of(change)))
        if answers:
            self._post_answers(answers)
