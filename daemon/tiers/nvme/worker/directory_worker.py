"""Keeps the worker process of one directory running, and its three remote parts connected to it.

    open (a thread) ─► start process, open directory ─► use (loop) ─► lines are read
                             ▲                                            │ end of a line
    process gone: reads are misses, writes and rows wait ◄────────────────┘
        └► the next process opens the directory again ─► use: what waits is sent

The index of the loop stays. So the next process must find the same directory with the same catalog and all its
segments: otherwise the directory counts as gone, and its keeper opens it again, as after any other fault of that kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tiercache.copies.arena import Region
from tiercache.daemon.helper_processes.limits import ProcessLimits
from tiercache.daemon.helper_processes.process import HelperProcess, ProcessError
from tiercache.daemon.helper_processes.supervisor import Supervisor
from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.shelf.parts import OpenDirectory, SavedNames
from tiercache.errors import ConfigError, DirectoryUnavailable

from . import messages
from .opening import Plan
from .packets import receive_message, send_message
from .regions import ArenaFiles
from .remote_catalog import RemoteCatalog
from .remote_directory import RemoteDirectory
from .remote_queue import RemoteQueue

log = logging.getLogger("tiercache.daemon")

CHILD = "tiercache.daemon.tiers.nvme.worker.child"
LIMITS = ProcessLimits(first_pause_s=0.1, longest_pause_s=10.0, steady_s=1.0, max_undead=1)
"""One at a time: two processes must never have one directory."""
START_S = 60.0
"""Time for a process to start; what it then does with the disk has no limit."""
END_S = 2.0
"""Time for a process to end by itself."""
ROWS_S = 0.002
"""Time that changes of rows wait for others to go with them: a packet for each block would cost the loop more than
the block does. The process's catalog waits for some milliseconds anyway."""
PING_S = 1.0
HUNG_S = 5.0
"""A process that answers no ping within this time is killed. It answers while its disk hangs: other threads wait."""
MAX_FRUITLESS, FRUITLESS_S = 8, 5.0
"""Processes in a row that end by themselves so soon after they were given the directory, and confirm none of the rows
that they were sent. The next one would do the same, for instance because of a row that its catalog does not take."""
LEFT_S = 0.5
"""Time that a process may still run after it has closed a line."""


@dataclass(eq=False)
class _Life:
    """A process that has the directory open."""

    process: HelperProcess
    files: socket.socket
    blocks: socket.socket
    rows: socket.socket
    opened: messages.Opened
    begun: bool = False
    """True if it has been used: then its line of files is the directory's to close."""
    used: bool = False
    used_s: float = 0.0
    """Since when."""
    answered: int = 0
    """Changes of rows that processes had answered by then."""
    pinged_s: float = 0.0
    """When it was asked whether it is alive; 0: it has answered."""

    def close(self) -> None:
        """Close its lines, if it is not used."""
        for line in (self.files, self.blocks, self.rows):
            line.close()


class _Ended(Exception):
    """The process has ended while it opened the directory."""


class _NoProcess(_Ended):
    """There is none to open the directory. The text says why."""


class DirectoryWorker:
    """One directory, from its opening to its end. Event loop only, but for `open`.

    plan: how to open it. why_not_aio: see `DiskQueue`. arena: the regions whose frames blocks are moved from and to.
    """

    def __init__(self, plan: Plan, why_not_aio: str, arena: ArenaFiles, loop: asyncio.AbstractEventLoop) -> None:
        self._plan = plan
        self._why_not_aio = why_not_aio
        self._arena = arena
        self._loop = loop
        self._life: _Life | None = None
        self._down_s = 0.0
        self._closed = self._given_up = False
        self._fruitless = 0  # processes in a row
        self._first: messages.Opened | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._last_gone: HelperProcess | None = None
        self._opening = threading.Lock()
        self._opened_by: HelperProcess | None = None  # guarded by _opening
        self._supervisor = Supervisor(
            CHILD,
            f"worker process of nvme directory {plan.path}",
            lambda: b"nvme",
            LIMITS,
            self._on_started,
            self._on_ended,
            self._on_gone,
        )

    # --- opening, in threads ---------------------------------------------------------------------

    def open(self, before: Home | None) -> OpenDirectory:
        """Start a process that opens the directory. Blocks as `open_directory` does, and raises the same."""
        try:
            life = self._connect(before)
        except _NoProcess as error:
            self._end()
            raise DirectoryUnavailable(f"nvme directory {self._plan.path} cannot be used: {error}") from None
        except _Ended:
            self._end()
            raise DirectoryUnavailable(
                f"nvme directory {self._plan.path} cannot be used: its worker process ends; the log says why"
            ) from None
        except BaseException:
            self._end()
            raise
        self.directory = RemoteDirectory(self._plan, life.opened, self._end)
        soon, from_thread = partial(self._loop.call_later, ROWS_S), self._from_thread
        self.catalog = RemoteCatalog(soon, from_thread, self._wait_for_room)
        self.queue = RemoteQueue(self._arena, from_thread, self._wait_for_room)
        self._life, self._first = life, life.opened
        state = life.opened.state
        return OpenDirectory(self.directory, self.catalog, state, SavedNames.read(state), self._begin)

    def _connect(self, before: Home | None) -> _Life:
        """A process that has opened the directory. Blocks. Raises ConfigError, DirectoryUnavailable and _Ended.

        One that does not serve what it was sent is killed.
        """
        lines: list[tuple[HelperProcess, socket.socket]] = []
        try:
            deadline_s = time.monotonic() + START_S
            for _ in range(3):
                lines.append(self._supervisor.open_line(deadline_s))
            if len({process for process, _ in lines}) > 1:
                self._supervisor.give_up(lines[-1][0])  # it has got only some of the lines
                raise _Ended
            (process, files), (_, blocks), (_, rows) = lines
            return self._open_on(process, files, blocks, rows, before)
        except ProcessError as error:
            _close_all(lines)
            if lines:
                self._supervisor.give_up(lines[-1][0])
            raise _NoProcess(error.text) from None
        except BaseException:
            _close_all(lines)
            raise

    def _open_on(
        self,
        process: HelperProcess,
        files: socket.socket,
        blocks: socket.socket,
        rows: socket.socket,
        before: Home | None,
    ) -> _Life:
        """Have a process open the directory. Blocks. Raises as `_connect`."""
        plan = self._plan
        question = messages.Open(
            path=str(plan.path),
            cap_bytes=plan.cap_bytes,
            segment_bytes=plan.segment_bytes,
            key=b"" if plan.cipher is None else plan.cipher.secret,
            may_shrink=plan.may_shrink,
            require_mount=plan.require_mount,
            home=before,
            daemon_pid=os.getpid(),
            why_not_aio=self._why_not_aio,
        )
        try:
            send_message(files, messages.encode(question))
            message = receive_message(files)
        except OSError:
            raise _Ended from None
        if message is None:
            raise _Ended
        answer = messages.decode_file_answer(message)
        if isinstance(answer, messages.Refused):
            raise (ConfigError if answer.setting else DirectoryUnavailable)(answer.text)
        assert isinstance(answer, messages.Opened)
        return _Life(process, files, blocks, rows, answer)

    def _reopen(self, process: HelperProcess) -> None:
        """Have another process, `its`, open the directory as it was."""
        assert self.directory.home is not None
        with self._opening:  # if the process before has only just ended, a thread for that one may be here
            if self._opened_by is process:
                return
            try:
                life = self._connect(self.directory.home)
            except _NoProcess:
                self._supervisor.give_up(process)  # if it is still there: it waits for lines
                return
            except _Ended:
                return  # one more follows
            except (ConfigError, DirectoryUnavailable) as error:
                self._from_thread(partial(self._give_up, str(error)))
                return
            except Exception:
                log.exception("a worker process of nvme directory %s cannot be used", self._plan.path)
                self._from_thread(partial(self._give_up, "its worker process cannot be used; the log says why"))
                return
            self._opened_by = life.process
        self._from_thread(partial(self._use_again, life))

    # --- the process, told by the supervisor's thread ----------------------------------------------

    def _on_started(self, process: HelperProcess) -> None:
        if self._first is not None:
            threading.Thread(
                target=self._reopen, args=(process,), name=f"reopen {self._plan.path}", daemon=True
            ).start()

    def _on_ended(self, process: HelperProcess | None, why: str) -> None:
        self._from_thread(lambda: self._ending(process))

    def _on_gone(self, process: HelperProcess) -> None:
        self._from_thread(lambda: self._gone(process))

    def _from_thread(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            self._loop.call_soon_threadsafe(callback)

    # --- on the loop -----------------------------------------------------------------------------

    def _begin(self) -> RemoteQueue:
        """Begin to serve the lines: `OpenDirectory.queue`."""
        self._arena.tell(self._add_region)
        life = self._life
        if life is None or life.process is self._last_gone:  # it has ended already
            self._forget_life()
            self._give_up_loading()
        elif not life.used:
            self._use(life)
        self._watch()
        return self.queue

    def _add_region(self, region: Region, fd: int) -> None:
        self.queue.add_region(region.region_id, region.size_bytes, fd)

    def _use(self, life: _Life) -> None:
        life.begun, life.used, self._life = True, True, life
        self.directory.connect(life.files, life.opened.segments, life.process.pid)
        self.queue.io, self.queue.io_reason = life.opened.io, life.opened.io_reason
        self.queue.connect(life.blocks)
        self.catalog.connect(life.rows)
        life.used_s, life.answered = time.monotonic(), self.catalog.answered  # those of the process before included
        self._loop.add_reader(life.blocks, self._read, life, life.blocks, self.queue.readable)
        self._loop.add_reader(life.rows, self._read, life, life.rows, self.catalog.readable)

    def _use_again(self, life: _Life) -> None:
        """Use another process than before, if it has the directory as it was."""
        first, opened = self._first, life.opened
        assert first is not None
        if self._closed or self._given_up or life.process is self._last_gone:
            life.close()
            return
        lost = set(self.directory.segments) - set(opened.segments)
        if opened.directory_id != first.directory_id or opened.segment_bytes != first.segment_bytes:
            self._give_up("it is another directory than before")
        elif opened.state.fresh:
            self._give_up("its index was lost when its worker process ended")
        elif lost:
            self._give_up(f"{len(lost)} of its segments were lost when its worker process ended")
        else:
            log.info(
                "nvme directory %s is served by another process after %.2f s",
                self._plan.path,
                time.monotonic() - self._down_s,
            )
            self._use(life)
            return
        life.close()

    def _give_up(self, why: str) -> None:
        """No process is used any more: the keeper finds that the directory has gone, and opens it again."""
        self._given_up = True
        self.directory.give_up(why)
        self.catalog.give_up()

    def _give_up_loading(self) -> None:
        # Nothing is known of most of its rows yet: they are read again.
        self._give_up("its worker process ended while its rows were read")

    def _read(self, life: _Life, line: socket.socket, readable: Callable[[socket.socket], bool]) -> None:
        if not readable(line):
            self._drop(life)
            # A process that has closed a line and goes on running is at fault.
            self._loop.call_later(LEFT_S, self._supervisor.give_up, life.process)

    def _drop(self, life: _Life) -> None:
        """The process is ending: use it no more."""
        if not life.used or life is not self._life:
            return
        self._down_s = time.monotonic()
        self._leave(life)
        self.directory.disconnect()
        self.queue.disconnect()
        self.catalog.lost()
        self.directory.trouble = "its worker process has ended; another one starts"
        loading = self.catalog.loading
        if loading is None or not loading.finished:
            self._give_up_loading()

    def _ending(self, process: HelperProcess | None) -> None:
        life = self._life
        if life is not None and process is life.process:
            self._drop(life)
            self.directory.trouble = "its worker process hangs in the kernel: what it had taken stays in use"

    def _gone(self, process: HelperProcess) -> None:
        """Nothing is left of a process: no I/O of it is under way."""
        self._last_gone = process
        life = self._life
        if life is not None and process is life.process:
            self._drop(life)
            self._forget_life()
            self.directory.trouble = "its worker process has ended; another one starts"
            self.queue.lost()
            self._fruitless = self._fruitless + 1 if self._was_fruitless(life) else 0
            if self._fruitless >= MAX_FRUITLESS:
                self._give_up(f"{MAX_FRUITLESS} worker processes in a row have ended at once, without writing a row")

    def _was_fruitless(self, life: _Life) -> bool:
        process, catalog = life.process, self.catalog
        by_itself = not process.hangs and process.process.returncode != -signal.SIGKILL
        soon = self._down_s - life.used_s < FRUITLESS_S
        return by_itself and soon and catalog.pending > 0 and catalog.answered == life.answered

    def _forget_life(self) -> None:
        if self._life is not None and not self._life.begun:
            self._life.close()
        self._life = None

    def _wait_for_room(self, line: socket.socket, callback: Callable[[], None] | None) -> None:
        if callback is None:
            self._loop.remove_writer(line)
        else:
            self._loop.add_writer(line, callback)

    def _watch(self) -> None:
        """Every second: is the process alive?"""
        if self._closed:
            return
        self._watching = self._loop.call_later(PING_S, self._watch)
        life, now_s = self._life, time.monotonic()
        if life is None or not life.used:
            return
        if life.pinged_s and self.queue.heard_s >= life.pinged_s:
            life.pinged_s = 0.0
        if not life.pinged_s:
            life.pinged_s = now_s
            self.queue.ping()
        elif now_s - life.pinged_s > HUNG_S:
            log.error("the worker process of nvme directory %s does not answer: it is killed", self._plan.path)
            life.pinged_s = now_s
            self._supervisor.give_up(life.process)

    # --- the end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """End the process. Blocks for some seconds at most."""
        self._closed = True
        self._from_thread(self._stop_reading)
        self._supervisor.close(END_S)

    def _stop_reading(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._life is not None and self._life.used:
            self._leave(self._life)
            self.directory.disconnect()
            self.queue.disconnect()
            self.catalog.lost()
        else:
            self._forget_life()  # a question may be under way on the line of one that was used
        self._arena.forget(self._add_region)

    def _leave(self, life: _Life) -> None:
        """Read its lines no more."""
        life.used = False
        for line in (life.blocks, life.rows):
            self._loop.remove_reader(line)
            self._loop.remove_writer(line)
            line.close()


def _close_all(lines: list[tuple[HelperProcess, socket.socket]]) -> None:
    for _, line in lines:
        line.close()
