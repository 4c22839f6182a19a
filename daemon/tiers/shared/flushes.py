"""Flushes of the shared tier: the notes that the store has yet to replace, kept until it has, across restarts.

    begin ─► notes to replace ─► a job ─► the store has new ones ─► done(durable)
                  │                 ├ full: it deletes them, which needs no room and is a flush too
                  │                 └ away: kept in memory and in a file, and told when the store is back
                  └ until then, and until `end`, this host reads and writes nothing that they are about

DRAM forgets many namespaces in slices, from `begin` to `end`: what it still has then must not be sent under new names.
Other hosts go on reading what was flushed until the store has been told: no host can reach them any other way.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, ParamSpec, TypeVar

from tiercache.daemon.tiers.shared.stores.store import Connection, NotReplicated, StoreError, StoreProblem
from tiercache.errors import ConfigError
from tiercache.ground.file_systems import make_directory, sync_directory

from .access import StoreAccess
from .epochs import deadline, new_note
from .lines import JobOwner, LineUse, SharedJob

log = logging.getLogger("tiercache.daemon")

_DIGIT_COUNT = 16
_DIGITS = re.compile(f"[0-9a-f]{{{_DIGIT_COUNT}}}")

P = ParamSpec("P")
T = TypeVar("T")

TOLD_S = 5.0
"""Deadline of a job, and how long a flush waits for it before it is answered as not durable."""
SAVED_S = 5.0
"""How long the file that keeps flushes may take; then they count as not kept."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
"""Before a job that failed is tried again, each time twice as long. While the store is away, none is tried."""
ANSWERED_AT_ONCE = 64
"""Flushes answered in one turn of the loop."""
JITTER = 0.5
"""The random part of each pause."""
MANY_NOTES = 1024
"""With more notes that wait, those of many buckets of one namespace become the namespace's own; then again whenever
their number has doubled."""
MAX_BUCKETS = 8
"""Buckets of one namespace whose notes may wait then. So what one tenant flushes costs its own namespaces at most."""
VERY_MANY_NOTES = 8 * MANY_NOTES
"""With more, only one."""
MAX_KEPT = 65_536
"""Notes that wait; with more, of which putting them together leaves more than half, the whole deployment is flushed
instead. One life of a daemon knows too few namespaces for that; many lives of one that never reaches its store may come
to it."""


class FlushJob(SharedJob):
    """Replaces notes, each by its value in `notes`. `tried`: those whose value an earlier job may have set.

    A value is set once. If each try set another one, each would flush all hosts; if a later try set the same one over
    that of another host, it would bring back what that host has flushed.
    """

    def __init__(self, owner: JobOwner, notes: dict[bytes, bytes], tried: set[bytes]) -> None:
        super().__init__(owner)
        self.notes = notes
        self.tried = tried
        self.deleted: list[bytes] = []
        """Notes for whose successors the store has no room: the host that next needs one makes it."""

    @property
    def replaced(self) -> list[bytes]:
        """The notes that the store has replaced."""
        return [*self.learned, *self.deleted]

    @property
    def was_cut_short(self) -> bool:
        """True if it replaced some of the notes, and then had no time left."""
        problem = self.problem
        return problem is not None and problem.problem is StoreProblem.TIMEOUT and bool(self.learned or self.deleted)

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        until_s, late = deadline(TOLD_S), None
        for name in self.notes:
            try:
                self._replace(connection, name, until_s)
            except NotReplicated as error:
                late = error  # the others need not wait for it
            except StoreError as error:
                if late is not None and error.problem is StoreProblem.TIMEOUT:
                    break
                raise
        if late is not None:
            raise late

    def _replace(self, connection: Connection, name: bytes, until_s: float) -> None:
        if name in self.tried:
            if connection.replicated_note(name, until_s) == self.notes[name]:
                self.learned[name] = self.notes[name]
                return
            self.notes[name] = new_note()
        self.tried.add(name)
        try:
            self.learned[name] = connection.set_note(name, self.notes[name], until_s)
        except StoreError as error:
            if error.problem is not StoreProblem.FULL:
                raise
            connection.delete([name], until_s)
            self.deleted.append(name)


class _Wanted(NamedTuple):
    """What is to become of a note, and by which flush that was last wanted.

    `tried`: the store may have it already.
    """

    number: int
    value: bytes
    tried: bool = False


class SharedFlushes:
    """Event loop only, but for the file, which a thread writes."""

    def __init__(self, access: StoreAccess, uniform: Callable[[float, float], float] = random.uniform) -> None:
        access.on_back = self.store_is_back
        self._access = access
        self._epochs = access.epochs
        self._file = _StateFile(access.settings.state)
        self._uniform = uniform
        self._pause_s = FIRST_PAUSE_S
        self.tries = 0
        """Jobs that were given to the store."""
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._notes: dict[bytes, _Wanted] = {}  # to be replaced
        self._put_together_at = 0
        """How many of these were left when they were last put together."""
        self._flushes = 0
        self._under_way: dict[int, frozenset[bytes]] = {}  # notes of the flushes that have not reached all of DRAM
        self._job: FlushJob | None = None
        self._job_flushes = 0
        self._waiting: list[tuple[int, Callable[[bool], None]]] = []
        self._answered: deque[tuple[Callable[[bool], None], bool]] = deque()  # to be called
        self._answering = False
        self._saving: asyncio.Future[None] | None = None
        self._save_again = False
        self._saved = False
        self._hangs = False
        self._unsaved = self._being_saved = 0
        """Flushes up to this one are answered as not durable once they are in the file; up to which they are being
        written there."""
        self.trouble = ""
        """Why what waits is not in the file: it is lost if the daemon ends now."""
        self._threads: Executor = _OwnThreads()

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def waiting(self) -> bool:
        """True if the store has yet to be told of a flush."""
        return bool(self._notes)

    def lock(self) -> None:
        """Before `open`. Raises ConfigError where another daemon keeps its flushes in the same file."""
        self._file.lock()

    def open(self) -> None:
        """Tell the store what an earlier life of this daemon could not.

        Also, once, what that life could not tell another store, whose address may be all that has changed. The file of
        that store stays.
        """
        for file in (self._file, *self._file.of_other_stores()):
            names: list[bytes] = []
            try:
                names = file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.error("%s cannot be read (%s): the whole shared tier is flushed instead", file.path, error)
            except ValueError:
                log.error("%s is damaged: the whole shared tier is flushed instead", file.path)
            if file is self._file:
                self._saved = True
            else:
                log.warning("%s has flushes that another store was not told of: this one is told too", file.path)
            told = partial(file.was_told, self._file)
            self.end(self.begin(names or [self._epochs.naming.deployment_note], told))

    def begin(self, names: Iterable[bytes], done: Callable[[bool], None]) -> int:
        """Replace these notes; `done(durable)` once the store has, or after `TOLD_S`. Returns a number for `end`."""
        self._flushes += 1
        self._epochs.flushes += 1
        number, loop = self._flushes, asyncio.get_running_loop()
        self._under_way[number] = frozenset(names)
        self._want(self._under_way[number], number)
        if len(self._notes) > min(MAX_KEPT, max(MANY_NOTES, 2 * self._put_together_at)):
            self._put_together(number)
        self._waiting.append((number, done))
        loop.call_later(TOLD_S, self._time_is_up, number)
        self._tell()
        return number

    def _want(self, names: Iterable[bytes], number: int) -> None:
        """Replace these notes, for this flush."""
        self._epochs.await_replacement(names)
        wanted = _Wanted(number, new_note())
        self._notes.update(dict.fromkeys(names, wanted))

    def _put_together(self, number: int) -> None:
        """Replace many notes by fewer that say at least as much; `number`: the flush that wants those."""
        naming, buckets, before = self._epochs.naming, dict[bytes, list[bytes]](), len(self._notes)
        for name in self._notes:
            above = naming.note_above(name)
            if above != naming.deployment_note:
                buckets.setdefault(above, []).append(name)
        most = MAX_BUCKETS if before <= VERY_MANY_NOTES else 1
        kept = {above: names for above, names in buckets.items() if len(names) > most or above in self._notes}
        self._want(list(kept), number)
        fewer = [name for names in kept.values() for name in names]
        for name in fewer:
            del self._notes[name]
        if before > MAX_KEPT and len(self._notes) > MAX_KEPT // 2:
            fewer += [name for name in self._notes if name != naming.deployment_note]
            self._notes.clear()
            self._want([naming.deployment_note], number)
        self._let_go(fewer)
        self._put_together_at = len(self._notes)

    def _let_go(self, names: Iterable[bytes]) -> None:
        """Blocks below these notes have names again, if nothing else wants the notes replaced."""
        wanted = self._notes, *self._under_way.values()
        self._epochs.replaced([name for name in names if not any(name in names_of_job for names_of_job in wanted)])
        if not self._notes:
            self._put_together_at = 0

    def end(self, number: int) -> frozenset[bytes]:
        """DRAM has forgotten all that this flush concerns; returns its notes."""
        names = self._under_way.pop(number)
        self._epochs.flushes += 1  # jobs that were begun meanwhile hold what was flushed
        self._let_go(names)
        return names

    def _tell(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._job is None and self._notes and self._access.breaker.closed:
            self.tries += 1
            # Those not tried yet come first: a slow replica must not keep them from the primary.
            wanted_first = sorted(self._notes.items(), key=lambda item: item[1].tried)
            notes = {name: wanted.value for name, wanted in wanted_first}
            tried = {name for name, wanted in self._notes.items() if wanted.tried}
            self._job, self._job_flushes = FlushJob(self, notes, tried), self._flushes
            self._access.submit(self._job, LineUse.LOOKUP)

    def store_is_back(self) -> None:
        """It answers again: tell it now."""
        self._pause_s = FIRST_PAUSE_S
        self._tell()

    def job_ended(self, job: FlushJob) -> None:
        """See `JobOwner`."""
        self._job, flushes = None, self._job_flushes
        # Those that are left out were wanted again meanwhile.
        present = {name: note for name in job.notes if (note := self._notes.get(name)) and note.number <= flushes}
        told = [name for name in job.replaced if name in present]
        for name in job.tried & present.keys():
            self._notes[name] = _Wanted(present[name].number, job.notes[name], tried=True)
        for name in told:
            del self._notes[name]
        self._let_go(told)
        self._epochs.learn({name: job.learned[name] for name in told if name in job.learned})
        self._tell_access(job)
        if job.was_cut_short:
            self._pause_s = FIRST_PAUSE_S
            self._tell()
            return
        if job.problem is not None:
            self._save()
            if not self._closed and self._again is None:
                pause_s = self._uniform(1 - JITTER, 1 + JITTER) * self._pause_s
                self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
                self._again = asyncio.get_running_loop().call_later(pause_s, self._tell)
            return
        self._pause_s = FIRST_PAUSE_S
        self._answer(flushes, True)
        if self._notes:
            self._tell()
        elif self._saved:
            self._save()

    def _tell_access(self, job: FlushJob) -> None:
        self._access.notes_changed(job.replaced)  # of more than was flushed, where a note stands for several
        if job.problem is None or job.was_cut_short:
            self._access.worked(FlushJob)
        elif isinstance(job.problem, NotReplicated):
            log.warning("a flush of the shared store is tried again: %s", job.problem.text)
        else:
            self._access.failed(job.problem, FlushJob)

    def _time_is_up(self, number: int) -> None:
        if any(waiting <= number for waiting, _ in self._waiting):
            self._unsaved = max(self._unsaved, number)
            self._save()

    def _answer(self, number: int, durable: bool) -> None:
        self._answered.extend((done, durable) for waiting, done in self._waiting if waiting <= number)
        self._waiting = [one for one in self._waiting if one[0] > number]
        if not self._answering:
            self._answer_some()

    def _answer_some(self) -> None:
        """Each is a line of the log and a message: some in one turn of the loop."""
        try:
            for _ in range(min(ANSWERED_AT_ONCE, len(self._answered))):
                done, durable = self._answered.popleft()
                done(durable)
        finally:  # one that raises does not stop the others
            self._answering = bool(self._answered)
            if self._answering:
                asyncio.get_running_loop().call_soon(self._answer_some)

    # --- the file --------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write what is kept to the file, on a thread; a later call while that runs writes again."""
        if self._closed:
            self._answer(self._unsaved, False)  # `close` has written it
            return
        if self._saving is not None:
            self._save_again = True
            if self._hangs:
                self._answer(self._unsaved, False)
            return
        names, loop = list(self._notes), asyncio.get_running_loop()
        self._saved, self._being_saved = bool(names), self._unsaved
        self._saving = loop.run_in_executor(self._threads, self._file.write, self._file.begin(), names)
        self._saving.add_done_callback(self._was_saved)
        loop.call_later(SAVED_S, self._is_late, self._saving)

    def _is_late(self, saving: asyncio.Future[None]) -> None:
        if saving is self._saving:
            self._hangs = True
            self._cannot_keep(f"writing it takes longer than {SAVED_S:.0f} s")
            self._answer(self._unsaved, False)

    def _cannot_keep(self, why: object) -> None:
        self.trouble = f"flushes of the shared store cannot be kept in {self._file.path}: {why}"
        log.error("%s", self.trouble)

    def _was_saved(self, saving: asyncio.Future[None]) -> None:
        self._saving, self._hangs, self.trouble = None, False, ""
        if not saving.cancelled() and (error := saving.exception()) is not None:
            self._cannot_keep(error)
        self._answer(self._being_saved, False)
        if self._save_again:
            self._save_again = False
            self._save()

    def close(self) -> None:
        """The daemon ends: keep what the store was not told."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        if not (self._notes or self._saved) or self._write_last():
            self._file.unlock()  # else a write may still come: the end of the process lets go

    def _write_last(self) -> bool:
        """False if the write has not ended in time."""
        writing = _OwnThreads().submit(self._file.write, self._file.begin(), list(self._notes))
        try:
            writing.result(SAVED_S)
        except FuturesTimeoutError:
            self._cannot_keep(f"writing it takes longer than {SAVED_S:.0f} s")
            return False
        except OSError as error:
            self._cannot_keep(error)
        return True


class _OwnThreads(Executor):
    """A thread for each call, which nobody waits for at the end: the file may be on a disk that hangs."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor`."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 (told to whoever asks)
                future.set_exception(error)

        threading.Thread(target=run, name="shared flushes", daemon=True).start()
        return future


class _StateFile:
    """Names of notes, and a checksum: what was written last by the order of `begin`, whichever thread comes first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._begun = self._written = 0
        self._locked: BinaryIO | None = None

    def lock(self) -> None:
        """Keep other daemons from the file, until `unlock` or the end of the process: each would remove what another
        one keeps. Raises ConfigError where one has it.

        Without a lock where the file system has none, or where none can be made: a warning says so.
        """
        try:
            make_directory(self.path.parent)
            self._locked = self.path.with_name(f"{self.path.name}.lock").open("ab")
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            text = f"another daemon keeps its flushes in {self.path.parent}, for the same shared_deployment"
            raise ConfigError(f"{text}: give each its own shared_state") from None
        except OSError as error:
            self.unlock()
            log.warning("%s cannot be locked (%s): let no other daemon have it as shared_state", self.path, error)

    def of_other_stores(self) -> list[_StateFile]:
        """Files of the same deployment, in the same folder, of which this store was not told: their names end in other
        digits (`settings.state_name`).
        """
        start, _, digits = self.path.name.rpartition("-")
        if not _DIGITS.fullmatch(digits):
            return []
        found = [one for one in sorted(self.path.parent.glob(f"{glob.escape(start)}-*")) if one != self.path]
        others = [_StateFile(one) for one in found if _DIGITS.fullmatch(one.name[len(start) + 1 :])]
        return [one for one in others if not one._is_told(self)]

    def was_told(self, other: _StateFile, durable: bool) -> None:
        """The store of another file has been told of what is in this one, if that is `durable`."""
        if durable and other is not self:
            with contextlib.suppress(OSError):  # then it is told again at the next start
                self._mark(other).touch()

    def _is_told(self, other: _StateFile) -> bool:
        try:
            return self._mark(other).stat().st_mtime_ns >= self.path.stat().st_mtime_ns
        except OSError:
            return False

    def _mark(self, other: _StateFile) -> Path:
        return self.path.with_name(f"{self.path.name}.{other.path.name[-_DIGIT_COUNT:]}")

    def unlock(self) -> None:
        """Other daemons may have the file."""
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    def read(self) -> list[bytes]:
        """What is in it. Raises OSError, and ValueError for a file that is damaged."""
        *names, checksum = self.path.read_text().split()
        if checksum != _checksum(names):
            raise ValueError("its checksum is wrong")
        return [bytes.fromhex(name) for name in names]

    def begin(self) -> int:
        """The number of the next write."""
        self._begun += 1
        return self._begun

    def write(self, number: int, names: list[bytes]) -> None:
        """Any thread. Raises OSError."""
        with self._lock:
            if number >= self._written:
                self._write(names)
                self._written = number  # only now: if this one failed, an older one is better than none

    def _write(self, names: list[bytes]) -> None:
        if not names:
            self.path.unlink(missing_ok=True)
            return  # back after a power cut, it would flush once more
        make_directory(self.path.parent)
        fresh = self.path.with_name(f"{self.path.name}.new")
        with fresh.open("w") as file:
            lines = [name.hex() for name in names]
            file.write("\n".join([*lines, _checksum(lines)]))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        sync_directory(self.path.parent)


def _checksum(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
