"""A directory's daemon side and its worker processes, in one thread: each of them takes a step when a test says.

    DirectoryWorker ── real sockets, of few packets ──► Child: real BlocksLine, DiskQueue, RowsLine, Directory
      on a HandLoop      cut after any packet             its disk and its catalog take steps of their own

The processes end, hang and follow each other as a `HandSupervisor` is told. What a process had begun on its disk goes
on after its lines have closed, until it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from memory_disks import MemoryCatalog, MemoryDisk
from waiting import wait_until

from tiercache.copies.arena import Region, create_region
from tiercache.daemon.helper_processes.process import ProcessError, ProcessProblem
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState, SavedNamespace
from tiercache.daemon.tiers.nvme.disk import queue as disk_queue
from tiercache.daemon.tiers.nvme.disk.backlog import Backlog, Part
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES, DiskIO
from tiercache.daemon.tiers.nvme.disk.kernel_aio import AioContext
from tiercache.daemon.tiers.nvme.disk.threads import Mover
from tiercache.daemon.tiers.nvme.shelf.parts import OpenDirectory
from tiercache.daemon.tiers.nvme.worker import (
    directory_worker,
    lines,
    messages,
    packets,
    records,
    remote_catalog,
    remote_directory,
    remote_queue,
)
from tiercache.daemon.tiers.nvme.worker.directory_worker import DirectoryWorker
from tiercache.daemon.tiers.nvme.worker.lines import BlocksLine, RowsLine
from tiercache.daemon.tiers.nvme.worker.opening import Plan
from tiercache.daemon.tiers.nvme.worker.packets import Joiner, receive_message, send_message
from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles

SEGMENT_BYTES = 8 * PAGE_BYTES
CAP_BYTES = 8 * SEGMENT_BYTES
SMALL = (
    (remote_queue, "MAX_SENT", 4),
    (remote_queue, "MAX_SENT_WRITES", 2),
    (remote_queue, "MAX_SENT_BYTES", 6 * PAGE_BYTES),
    (remote_queue, "CANCELLED_AT_ONCE", 2),
    (remote_queue, "MAX_TRIES", 3),
    (records, "MAX_RECORDS", 3),
    (lines, "PACKETS_AT_ONCE", 1),
    (remote_catalog, "CALLBACKS_AT_ONCE", 2),
    (remote_catalog, "ROWS_AT_ONCE", 3),
    (remote_catalog, "PART_BYTES", 100),
    (packets, "PART_BYTES", 100),
    (directory_worker, "MAX_FRUITLESS", 3),
)
"""Limits that few operations reach."""


class HandTime:
    """The module `time`, on a clock that only a test moves. No slice of work is ever too long."""

    perf_counter_ns = monotonic_ns = staticmethod(lambda: 0)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class HandLoop:
    """The part of an event loop that a `DirectoryWorker` uses; `turn` is one turn of it."""

    def __init__(self, clock: HandTime) -> None:
        self.soon: deque[Callable[[], object]] = deque()
        self._clock = clock
        self._timers: list[tuple[float, SimpleNamespace]] = []
        self._readers: dict[socket.socket, Callable[[], object]] = {}
        self._writers: dict[socket.socket, Callable[[], object]] = {}

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        self.soon.append(partial(callback, *args))

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> SimpleNamespace:
        handle = SimpleNamespace(call=partial(callback, *args))
        handle.cancel = lambda: setattr(handle, "call", lambda: None)
        self._timers.append((self._clock.now_s + delay_s, handle))
        return handle

    def add_reader(self, line: socket.socket, callback: Callable[..., object], *args: object) -> None:
        self._readers[line] = partial(callback, *args)

    def add_writer(self, line: socket.socket, callback: Callable[..., object]) -> None:
        self._writers[line] = callback

    def remove_reader(self, line: socket.socket) -> None:
        self._readers.pop(line, None)

    def remove_writer(self, line: socket.socket) -> None:
        self._writers.pop(line, None)

    @property
    def is_idle(self) -> bool:
        return not self.soon and not any(is_ready(line, select.POLLIN) for line in self._readers)

    def turn(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()
        due = [timer for timer in self._timers if timer[0] <= self._clock.now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _, handle in due:
            handle.call()
        for callbacks, event in ((self._readers, select.POLLIN), (self._writers, select.POLLOUT)):
            for line in [line for line in callbacks if is_ready(line, event)]:
                if line in callbacks:
                    callbacks[line]()


class HandThread:
    """The thread of tasks, which runs only while a test waits in `run`: to its next wait, or to its end.

    In the place of all that it waits for: a task (`queue.SimpleQueue`), a process (`threading.Condition`), an answer
    (`receive_message`). Nobody else runs meanwhile, so nothing needs a lock.
    """

    def __init__(self) -> None:
        self.tasks: deque[Any] = deque()
        self.waits_for: Callable[[], object] | None = None
        self.over = False
        self._goes_on, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Called in the thread."""
        self.waits_for = condition
        self._waits.release()
        self._goes_on.acquire()

    def begin(self) -> None:
        """It has been started."""
        assert self._waits.acquire(timeout=60)

    def run(self) -> bool:
        """To its next wait; False where it still waits for what it waited for."""
        if self.over or self.waits_for is None or not self.waits_for():
            return False
        self._goes_on.release()
        assert self._waits.acquire(timeout=60)
        return True

    def put(self, task: Any) -> None:
        self.tasks.append(task)
        while task is None and self.run():  # the end is not put off
            pass

    def get(self) -> Any:
        self.wait_for(lambda: self.tasks)
        task = self.tasks.popleft()
        if task is None:
            self.over = True
            self._waits.release()
        return task

    def receive_message(self, line: socket.socket) -> bytes | None:
        self.wait_for(lambda: is_ready(line, select.POLLIN))
        return receive_message(line)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass

    def notify_all(self) -> None:
        pass


def is_ready(line: socket.socket, event: int) -> bool:
    look = select.poll()
    look.register(line, event)
    return bool(look.poll(0))


# --- the process ----------------------------------------------------------------------------------------


class NoAio(DiskIO):
    """Each probe of the kernel's AIO takes some milliseconds."""

    def aio(self, depth: int, eventfd: int, most_pieces: int) -> AioContext:
        raise OSError(errno.EOPNOTSUPP, "the test wants none")


class StepCarrier:
    """Moves parts in three steps: a part is taken, moved, and its end is told."""

    name = "steps"

    def __init__(self, backlog: Backlog, directory: Directory, finished: Callable[[Sequence[Part]], None]) -> None:
        self.backlog, self.finished = backlog, finished
        self.mover = Mover(directory)
        self.taken: deque[Part] = deque()
        self.moved: deque[Part] = deque()

    def wake(self, count: int) -> None:
        """Nothing is done before a test says so."""

    def join(self, deadline_s: float) -> bool:
        return True

    def take(self) -> None:
        with self.backlog.changed:
            part = self.backlog.take()
        if part is not None:
            self.taken.append(part)

    def move(self) -> None:
        if self.taken:
            part = self.taken.popleft()
            self.mover.carry_out(part)
            self.moved.append(part)

    def finish(self) -> None:
        if self.moved:
            self.finished([self.moved.popleft()])


class StepCatalog(MemoryCatalog):
    """A catalog in memory, whose answers reach the daemon when a test says."""

    def __init__(self, disk: MemoryDisk, post: Callable[..., object]) -> None:
        super().__init__(disk)
        self.disk, self._post_answers = disk, post

    def fail(self) -> None:
        """The disk is full for a second: nothing that waits is written."""
        self.disk.failing = {"commit"}
        self.commit()
        self.disk.failing = set()

    def answer(self) -> None:
        """Tell what became of changes, those of a batch together."""
        self._post_answers(lambda: None)

    def close(self, timeout_s: float) -> bool:
        written = super().close(timeout_s)
        self.answer()
        return written


class Child:
    """A worker process. For its supervisor it is a `HelperProcess`."""

    def __init__(self, world: SteppedWorker, pid: int, most_lines: int) -> None:
        self.pid, self.hangs = pid, False
        self.process = SimpleNamespace(returncode=None)
        self.alive, self.is_open, self.told_end = True, False, False
        self.is_good = False
        """It has opened the directory as it was."""
        self._world, self._most_lines = world, most_lines
        self._lines: list[socket.socket] = []  # its ends: files, blocks, rows
        self._joiner = Joiner()

    def new_line(self) -> socket.socket:
        if len(self._lines) == self._most_lines:
            raise ProcessError(ProcessProblem.NO_RESOURCES, "no line to its helper process: Too many open files")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self._lines:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: a few packets
        self._lines.append(theirs)
        return ours

    def wait_for_lines(self) -> None:
        wait_until(lambda: len(self._lines) == 3, "a thread of the daemon opens lines")

    def open(self, how: str = "well") -> None:
        """Answer the first question: well, or `refused`, `other`, `fresh`, `lost`; or end without an answer, `ends`."""
        self.wait_for_lines()
        self._lines[0].settimeout(60)
        message = receive_message(self._lines[0])
        assert message is not None
        asked = messages.decode_question(message)
        assert isinstance(asked, messages.Open)
        if how == "ends":
            self.end(1)
        elif how == "refused":
            self._say(messages.Refused(False, "the disk is away"))
        else:
            self._open_as(how, asked)

    def _open_as(self, how: str, asked: messages.Open) -> None:
        self.directory = Directory(
            Path(asked.path), asked.cap_bytes, asked.segment_bytes, 0, NoAio(), False, asked.home, asked.daemon_pid
        )
        self.directory.open()
        assert self.directory.home is not None
        self.rows = RowsLine(self._lines[2])
        self.catalog = StepCatalog(self._world.disk, self.rows.post)
        self.rows._catalog = self.catalog  # type: ignore[assignment]
        with patch.object(disk_queue, "start_carrier", self._start_carrier):
            self.blocks = BlocksLine(self._lines[1], self.directory, "")
        segments = self.directory.segments
        self._say(
            messages.Opened(
                directory_id=self.directory.superblock.directory_id[:: -1 if how == "other" else 1],
                created_s=1,
                segment_bytes=self.directory.segment_bytes,
                db_reserve_bytes=0,
                direct=self.directory.direct,
                direct_reason=self.directory.direct_reason,
                io="steps",
                io_reason="",
                kept_bytes=0,
                segments=segments[: len(segments) - (how == "lost")],
                home=self.directory.home,
                state=CatalogState(how == "fresh", [], {}, [], 1),
            )
        )
        self.is_open, self.is_good = True, how == "well" or (how == "lost" and not segments)

    def _start_carrier(self, directory: Directory, finished: Any, *_: object) -> tuple[Backlog, StepCarrier, str]:
        backlog = Backlog(3)
        self.carrier = StepCarrier(backlog, directory, finished)
        return backlog, self.carrier, ""

    def _say(self, answer: messages.FileAnswer) -> None:
        send_message(self._lines[0], messages.encode(answer))

    # --- steps ---

    def serve_blocks(self) -> None:
        """One packet of the line of blocks, and what has ended on the disk."""
        if not self.blocks.turn(0):
            self.end(0)

    def serve_rows(self) -> None:
        """One packet of the line of rows."""
        if is_ready(self._lines[2], select.POLLIN) and (packet := self._lines[2].recv(1 << 16)):
            message = self._joiner.add(packet)
            if message is not None:
                self.rows._take(self.catalog, messages.decode_row_order(message))  # type: ignore[arg-type]

    def tell_status(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the daemon has closed the line: the process is about to end
            self.rows._send_status()

    def answer_file(self, says: str) -> bool:
        """Answer the thread of tasks: it is `done`, or the disk is `full`; or end before the answer, `ends`."""
        if not is_ready(self._lines[0], select.POLLIN):
            return False
        message = receive_message(self._lines[0])
        assert message is not None
        asked = messages.decode_question(message)
        assert isinstance(asked, messages.CreateSegment)
        if says != "full":
            self.directory.create_segment(asked.segment)
        if says == "ends":
            self.end(1)
        else:
            self._say(messages.Good() if says == "done" else messages.Bad(errno.ENOSPC))
        return True

    def work(self) -> None:
        """Everything that there is to do, once."""
        for step in (self.serve_blocks, self.carrier.take, self.carrier.move, self.carrier.finish, self.serve_blocks):
            if self.alive:
                step()
        if self.alive:
            self.serve_rows()
            self.catalog.commit()
            self.catalog.answer()
            self.rows._send_status()

    # --- its end ---

    def close_line(self, number: int) -> None:
        """A defect: it closes one line, and does nothing more."""
        self._lines[number].close()
        self.alive = False

    def end(self, status: int) -> None:
        """It ends, but something of it may still be in the kernel."""
        self.alive = False
        self.process.returncode = status
        for line in self._lines:
            line.close()

    def goes(self) -> None:
        """Nothing is left of it: what it had begun on its disk is over."""
        if self.is_open:
            while self.carrier.taken:
                self.carrier.move()
            self.blocks._queue.stop(0.0)
            self.blocks._look.close()
            os.close(self.blocks._wake)
            for region in self.blocks._regions._regions.values():
                region.unmap()
            self.directory.close()


class HandSupervisor:
    """In the place of `Supervisor`: processes start and end as a test says."""

    def __init__(self, child: str, name: str, start: object, limits: object, *told: Callable[..., object]) -> None:
        self.on_started, self.on_ended, self.on_gone = told
        self.now: Child | None = None
        self.closed = False

    def open_line(self, deadline_s: float) -> tuple[Child, socket.socket]:
        if self.now is None:
            raise ProcessError(ProcessProblem.STARTING, "its helper process is starting")
        return self.now, self.now.new_line()

    def give_up(self, its: Child) -> None:
        if its is self.now:
            its.hangs, self.now = True, None
            its.end(-9)
            its.told_end = True
            self.on_ended(its, "hung and was killed")

    def close(self, orderly_s: float) -> bool:
        self.closed = True
        if self.now is not None:
            self.now.end(0)
        return True


# --- the whole ------------------------------------------------------------------------------------------


class SteppedWorker:
    """A `DirectoryWorker` with all that belongs to it.

    frames: pages of the arena. child: the process that was started last, until it is gone.
    """

    def __init__(self, root: Path, frames: int) -> None:
        self.path = root / "nvme"
        self.clock = HandTime()
        self.disk = MemoryDisk(0, lambda: self.clock.now_s)
        """Has the rows of all processes; their blocks are in real files."""
        for number in (1, 2):
            self.disk.database.namespaces[number] = SavedNamespace(number, str(number), b"", 0)
        self.child: Child | None = None
        self._pid = self._first_pid = 0
        self._patches = ExitStack()
        for module in (directory_worker, remote_queue, remote_catalog, disk_queue):
            self._patches.enter_context(patch.object(module, "time", self.clock))
        for module, name, value in (
            (remote_queue, "queue", SimpleNamespace(SimpleQueue=lambda: self.tasks)),
            (remote_directory, "threading", SimpleNamespace(Condition=lambda: self.tasks)),
            (remote_directory, "receive_message", lambda line: self.tasks.receive_message(line)),
        ):
            self._patches.enter_context(patch.object(module, name, value))
        self._patches.enter_context(patch.object(directory_worker, "Supervisor", HandSupervisor))
        for module, name, value in SMALL:
            self._patches.enter_context(patch.object(module, name, value))
        self._arena = ArenaFiles()
        fd = create_region(frames * PAGE_BYTES, "test")
        self.region = Region(0, fd, frames * PAGE_BYTES)
        self._arena.add(self.region, fd)
        os.close(fd)
        self.open()

    def open(self) -> None:
        """Open the directory, as a keeper does: with a process that does it well."""
        self.loop = HandLoop(self.clock)
        self.tasks = HandThread()
        plan = Plan(self.path, CAP_BYTES, SEGMENT_BYTES)
        self.worker = DirectoryWorker(plan, "", self._arena, self.loop)  # type: ignore[arg-type]
        self.supervisor: HandSupervisor = self.worker._supervisor  # type: ignore[assignment]
        self._first_pid = self._pid + 1
        self.start_child()
        opened: list[OpenDirectory] = []
        thread = threading.Thread(target=lambda: opened.append(self.worker.open(None)), daemon=True)
        thread.start()
        assert self.child is not None
        self.child.open()
        thread.join(60)
        self.tasks.begin()
        assert opened[0].queue() is self.worker.queue
        self.queue, self.catalog, self.directory = self.worker.queue, self.worker.catalog, self.worker.directory

    @property
    def serving(self) -> Child | None:
        """The process that the daemon uses."""
        child = self.child
        return child if child is not None and child.alive and child.pid == self.directory.worker_pid else None

    @property
    def given_up(self) -> str:
        return self.directory._gone

    def start_child(self, most_lines: int = 3) -> None:
        """Another process is ready: a thread of the daemon asks for lines."""
        assert self.child is None
        self._pid += 1
        self.child = self.supervisor.now = Child(self, self._pid, most_lines)
        self.supervisor.on_started(self.child)
        if most_lines < 3:
            self.join_reopening()
        elif self._pid > self._first_pid:
            self.child.wait_for_lines()

    def open_child(self, how: str) -> None:
        """The process answers that thread. `gone`: it ends at once, and the loop hears of its end first; `both gone`:
        and of the next one's.
        """
        assert self.child is not None
        self.child.open("well" if "gone" in how else how)
        self.join_reopening()
        if "gone" in how:
            use = self.loop.soon.pop()
            self.end_child(-9)
            self.child_goes()
            if how == "both gone":
                self.start_child()
                self.end_child(-9)
                self.child_goes()
            self.loop.soon.append(use)

    def join_reopening(self) -> None:
        for thread in threading.enumerate():
            if thread.name == f"reopen {self.path}":
                thread.join(60)

    def end_child(self, status: int) -> None:
        assert self.child is not None
        self.supervisor.now = None
        self.child.end(status)
        self.join_reopening()

    def tell_end(self) -> None:
        """The supervisor sees that the process has ended; it may not be gone."""
        child = self.child
        assert child is not None
        if not child.told_end:
            child.told_end = True
            self.supervisor.now = None
            self.supervisor.on_ended(child, "ended")

    def child_goes(self) -> None:
        assert self.child is not None
        self.tell_end()
        self.child.goes()
        self.supervisor.on_gone(self.child)
        self.child = None

    def answer_task(self, says: str) -> bool:
        """The process answers the question of the thread of tasks, if there is one; see `Child.answer_file`."""
        child = self.serving
        assert child is not None
        answered = child.answer_file(says)
        if not child.alive:
            self.supervisor.now = None
        return answered

    def add_region(self, region_id: int) -> Region:
        """The arena grows by a page."""
        fd = create_region(PAGE_BYTES, "test")
        region = Region(region_id, fd, PAGE_BYTES)
        self._arena.add(region, fd)
        os.close(fd)
        return region

    def stop(self) -> None:
        """Close the catalog and the queue, as a keeper does. What a process still has is abandoned."""
        before = len(self.loop.soon)
        closing = threading.Thread(target=self.catalog.close, args=(60.0,), daemon=True)
        closing.start()
        wait_until(lambda: len(self.loop.soon) > before, "the loop is asked to close the catalog")
        while not self.catalog._closed.is_set():
            self._turn_to_the_end()
        closing.join(60)
        self.queue.stop(self.clock.now_s)

    def _turn_to_the_end(self) -> None:
        self.loop.turn()
        if self.serving is not None:
            self.serving.work()
        elif not self.given_up:
            self.worker._give_up("the test ends")

    def close(self) -> None:
        """Close the directory; nothing is left of its processes."""
        self.directory.close()
        self.loop.turn()
        if self.child is not None:
            self.child.end(0)
            self.join_reopening()
            self.child.goes()
            self.child = None
        while self.tasks.run():
            pass
        assert self.tasks.over

    def end(self) -> None:
        self._arena.close()
        self._patches.close()
