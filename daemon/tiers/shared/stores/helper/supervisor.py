"""Starts the helper process, gives up one that hangs, and starts another after a pause.

One thread does all of this. It lives as long as the store, which matters: the kernel kills the process when the thread
that started it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field

import msgspec

from tiercache.daemon.tiers.shared.stores.helper import messages
from tiercache.daemon.tiers.shared.stores.helper.lines import WorkerLine
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.ground.isolated import python_command

log = logging.getLogger("tiercache.daemon")

CHILD = "tiercache.daemon.tiers.shared.stores.helper.child"
STEADY_S = 5.0
"""A process that lived so long has started well: the next one follows at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_LATE_LINES = 16
"""Lines that were given up and whose workers are not back: with so many, no line is opened."""
HUNG_S = 10.0
"""The process hangs if a call is so old, and it has answered nothing since or has `MAX_LATE_LINES` late lines."""
MAX_UNDEAD = 4
"""Killed processes that are still in the kernel: with so many, no other is started."""
_REAP_S = 1.0


@dataclass(eq=False)
class HelperProcess:
    """One life of the process."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    started_s: float = field(default_factory=time.monotonic)
    ready: bool = False
    answered_s: float = 0.0
    """When any of its lines has last answered."""
    late: list[tuple[WorkerLine, float]] = field(default_factory=list)
    """Lines that were given up, and when their calls began."""
    hangs: bool = False


class Supervisor:
    """Keeps the helper process of one store running.

    Attributes:
        starts, ends, given_up: how often a process was started, ended by itself, and was killed because it hung.
        late_calls: calls that were not answered in time.
    """

    def __init__(self, maker: str, url: str, address: str) -> None:
        self._start = messages.encode(messages.Start(maker, url))
        self._address = address
        self.starts = self.ends = self.given_up = self.late_calls = 0
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._now: HelperProcess | None = None
        self._problem = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread's own:
        self._undead: list[subprocess.Popen[bytes]] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # --- for connections -------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the process, and keep one running until `close`. Does not block. Raises StoreError."""
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="store helper", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise StoreError(StoreProblem.BUSY, f"no thread for its helper process: {error}") from None
                self._thread = thread

    def open_line(self, deadline_s: float) -> tuple[HelperProcess, WorkerLine]:
        """A new line. Blocks until the process is ready. Raises StoreError."""
        self.begin()
        with self._changed:
            while not ((its := self._now) and its.ready and not its.hangs):
                left_s = deadline_s - time.monotonic()
                if self._problem:
                    raise StoreError(StoreProblem.UNREACHABLE, self._problem)
                if left_s <= 0 or self._closing.is_set():
                    raise StoreError(StoreProblem.BUSY, "its helper process is starting")
                self._changed.wait(left_s)
            its.late = [(line, began_s) for line, began_s in its.late if not _end_if_over(line)]
            if len(its.late) >= MAX_LATE_LINES:
                text = f"{len(its.late)} calls were not answered yet: no more are made"
                raise StoreError(StoreProblem.TIMEOUT, text)
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError as error:
                raise StoreError(StoreProblem.BUSY, f"no line to its helper process: {error.strerror}") from None
            try:
                its.control.setblocking(False)
                socket.send_fds(its.control, [messages.encode(messages.Serve())], [theirs.fileno()])
            except OSError as error:
                ours.close()
                what = "does not take new calls" if isinstance(error, BlockingIOError) else "has ended"
                raise StoreError(StoreProblem.UNREACHABLE, f"its helper process {what}") from None
            finally:
                theirs.close()
        return its, WorkerLine(ours)

    def give_up(self, its: HelperProcess, line: WorkerLine, began_s: float) -> None:
        """A call that began then was not answered in time: never use its line again. Does not block."""
        line.hang_up()
        with self._changed:
            self.late_calls += 1
            if its is not self._now:
                line.close()
                return
            its.late = [(one, since_s) for one, since_s in its.late if not _end_if_over(one)]
            its.late.append((line, began_s))
            first_s = min(since_s for _, since_s in its.late)
            silent = its.answered_s < first_s
            if time.monotonic() - first_s >= HUNG_S and (silent or len(its.late) >= MAX_LATE_LINES):
                its.hangs = True
                self._now = None
                self._wake_thread()

    def stats(self) -> dict[str, object]:
        """Counts and state, as plain values."""
        its = self._now
        return {
            "pid": its.process.pid if its else 0,
            "ready": bool(its and its.ready),
            "starts": self.starts,
            "ends": self.ends,
            "given_up": self.given_up,
            "late_calls": self.late_calls,
            "late_lines": len(its.late) if its else 0,
            "undead": len(self._undead),
            "problem": self._problem,
        }

    def close(self) -> None:
        """End the process without waiting for it. Lines are lost."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
            self._wake_thread()
            thread = self._thread
        if thread is not None:
            thread.join(2 * _REAP_S)  # it waits for nothing but the end of a killed process, for so long at most
        with self._changed:
            if self._wake >= 0 and not (thread and thread.is_alive()):
                os.close(self._wake)
                self._wake = -1

    def _wake_thread(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.is_set():
            self._reap()
            if len(self._undead) >= MAX_UNDEAD:
                why, steady = f"hangs in the kernel, as {len(self._undead)} before it do", False
            else:
                why, steady = self._live()
            if self._closing.is_set():
                break
            pause_s = 0.0 if steady else min(max(pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            log.warning("the helper process of %s %s: another one starts in %g s", self._address, why, pause_s)
            with self._changed:
                self._problem = f"its helper process {why}, and the log says why: another one starts soon"
                self._changed.notify_all()
                self._changed.wait_for(self._closing.is_set, pause_s)
                self._problem = ""
        self._reap()

    def _live(self) -> tuple[str, bool]:
        """One life of the process: how it ended, and whether it had started well."""
        try:
            its = self._launch()
        except OSError as error:
            return f"could not be started ({error.strerror})", False
        self.starts += 1
        with self._changed:
            self._now = its
        try:
            self._watch(its)
        finally:
            with self._changed:
                self._now = None
                late, its.late = its.late, []
            its.process.kill()
            its.control.close()
            for line, _ in late:
                line.close()
            status = self._wait_for(its.process)
        if its.hangs:
            self.given_up += 1
            return "hung and was killed", time.monotonic() - its.started_s > STEADY_S
        self.ends += 1
        return f"ended with status {status}", time.monotonic() - its.started_s > STEADY_S

    def _launch(self) -> HelperProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(
                [*python_command(CHILD), "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A session of its own: Control-C at a terminal is for the daemon, which ends the process.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it has ended: `_watch` sees that
            ours.send(self._start)
        return HelperProcess(process, ours)

    def _watch(self, its: HelperProcess) -> None:
        """Until the process ends, hangs, or is not wanted any more."""
        look = select.poll()
        look.register(its.control, select.POLLIN)
        look.register(self._wake, select.POLLIN)
        while not (its.hangs or self._closing.is_set()):
            for fd, _ in look.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif not self._take_report(its):
                    return

    def _take_report(self, its: HelperProcess) -> bool:
        """Take what the process says; False once it has ended."""
        try:
            packet = its.control.recv(messages.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        try:
            report = messages.decode_report(packet)
        except msgspec.MsgspecError:
            return False
        if isinstance(report, messages.LogLine):
            log.log(report.level, "helper process of %s: %s", self._address, report.text)
            return True
        with self._changed:
            its.ready = True
            self._changed.notify_all()
        return True

    def _wait_for(self, process: subprocess.Popen[bytes]) -> str:
        try:
            return str(process.wait(_REAP_S))
        except subprocess.TimeoutExpired:
            self._undead.append(process)
            return "unknown: it is still in the kernel"

    def _reap(self) -> None:
        self._undead = [process for process in self._undead if process.poll() is None]


def _end_if_over(line: WorkerLine) -> bool:
    """Close a late line whose worker has come back; whether it has."""
    if not line.has_ended():
        return False
    line.close()
    return True
