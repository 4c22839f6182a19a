"""Keeps a helper process running: starts it, gives up one that hangs, and starts another after a pause.

One thread does all of this. It lives as long as the process is wanted, which matters: the kernel kills the process when
the thread that started it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from . import packets
from .limits import DEFAULT_LIMITS, ProcessLimits
from .process import (
    HelperProcess,
    ProcessError,
    ProcessProblem,
    start_process,
)

log = logging.getLogger("tiercache.daemon")


PING_S = 1.0


class Pulse:
    """Of one process, once it is ready: until then it may take as long as its owner allows.

    Silence is counted in pings and not by the clock: when this process was stopped itself, both ends have missed that
    time. `silent_s`: the longest that it may say nothing; infinite: it is not asked.
    """

    def __init__(self, process: HelperProcess, silent_s: float) -> None:
        self._process = process
        self._silent_s = silent_s
        self._pinged = False
        self._missed = 0
        self._next_s = time.monotonic() + PING_S

    @property
    def wait_s(self) -> float | None:
        """Until `beats` is to be asked again; None: it need not be."""
        return None if math.isinf(self._silent_s) else max(0.0, self._next_s - time.monotonic())

    def heard(self) -> None:
        """It has said something."""
        self._pinged, self._missed = False, 0

    def beats(self) -> bool:
        """Ping it where that is due; False if it has been silent for too long."""
        now_s = time.monotonic()
        if self.wait_s is None or now_s < self._next_s:
            return True
        self._next_s = now_s + PING_S
        if self._pinged:
            self._missed += 1
            return self._missed * PING_S < self._silent_s
        self._pinged = self._process.ready and self._process.ping()
        return True


class Supervisor:
    """Keeps one helper process running, from `begin` to `close`.

    Callbacks are called on the supervisor's thread and hold it up: they must not block. An exception of theirs is
    logged.

    Args:
        child: the module that is the process: its `main` calls `child.run_child`.
        name: what the log calls it, such as "helper process of ADDRESS".
        start: makes the message for each process that is started; called on the supervisor's thread. May raise
            OSError, as if the process could not be started.
        limits: may be replaced at any time, by assignment.
        on_started: a process is ready, and lines can be opened.
        on_ended: a process is lost, and why. One that hung may still be in the kernel. None: it could not be started.
        on_gone: nothing is left of a process that was lost before: it touches neither files nor memory any more.

    Attributes:
        starts, ends, given_up: how often a process was started, ended by itself, and was killed because it hung.
        late_calls: calls that were not answered in time.
    """

    def __init__(
        self,
        child: str,
        name: str,
        start: Callable[[], bytes],
        limits: ProcessLimits = DEFAULT_LIMITS,
        on_started: Callable[[HelperProcess], object] | None = None,
        on_ended: Callable[[HelperProcess | None, str], object] | None = None,
        on_gone: Callable[[HelperProcess], object] | None = None,
    ) -> None:
        self.limits = limits
        self.starts = self.ends = self.given_up = self.late_calls = 0
        self._child, self._name, self._start = child, name, start
        self._on_started, self._on_ended, self._on_gone = on_started, on_ended, on_gone
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._now: HelperProcess | None = None
        self._problem = self._lost = ""
        self._orderly_s = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread's own:
        self._undead: list[HelperProcess] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # --- for the owner ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the process, and keep one running until `close`. Does not block. Raises ProcessError (NO_RESOURCES)."""
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    text = f"no thread for its helper process: {error}"
                    raise ProcessError(ProcessProblem.NO_RESOURCES, text) from None
                self._thread = thread

    def open_line(self, deadline_s: float) -> tuple[HelperProcess, socket.socket]:
        """A new line, which is the caller's to close. Blocks until the process is ready, or until that time of the
        monotonic clock. Raises ProcessError.
        """
        self.begin()
        with self._changed:
            while not ((process := self._now) and process.ready and not process.hangs):
                left_s = deadline_s - time.monotonic()
                if self._problem:
                    raise ProcessError(ProcessProblem.ENDED, self._problem)
                if left_s <= 0 or self._closing.is_set():
                    raise ProcessError(ProcessProblem.STARTING, "its helper process is starting")
                self._changed.wait(left_s)
            process.late.close_those_over()
            if len(process.late) >= self.limits.max_late_lines:
                text = f"{len(process.late)} calls were not answered yet: no more are made"
                raise ProcessError(ProcessProblem.LATE, text)
            return process, process.new_line()

    def give_up_line(self, process: HelperProcess, line: socket.socket, began_s: float) -> None:
        """A call that began then was not answered in time: the line is never used again, and is the supervisor's to
        close, once the process has closed its end. Does not block.
        """
        with self._changed:
            self.late_calls += 1
            if process is not self._now:
                line.close()
                return
            process.late.close_those_over()
            process.late.add(line, began_s)
            silent = process.answered_s < process.late.first_s
            many = len(process.late) >= self.limits.max_late_lines
            hangs = time.monotonic() - process.late.first_s >= self.limits.hung_s and (silent or many)
        if hangs:
            self.give_up(process)

    def give_up(self, process: HelperProcess) -> None:
        """This process hangs: kill it. Does not block, and does nothing if it is lost already."""
        with self._changed:
            if process is self._now:
                process.hangs = True
                self._now = None
                self._wake_thread()

    @property
    def trouble(self) -> str:
        """What is not well now: why there is no process, or what the process says. Empty: all is well."""
        process = self._now
        if process is not None and process.ready:
            return process.trouble
        hang = self._hang()
        return _hang_text(hang) if hang else self._lost

    def stats(self) -> dict[str, object]:
        """Counts and state, as plain values."""
        process = self._now
        return {
            "pid": process.pid if process else 0,
            "ready": bool(process and process.ready),
            "starts": self.starts,
            "ends": self.ends,
            "given_up": self.given_up,
            "late_calls": self.late_calls,
            "late_lines": len(process.late) if process else 0,
            "undead": len(self._undead),
            "problem": self._problem,
        }

    def close(self, orderly_s: float = 0.0) -> bool:
        """End the process; whether nothing is left of it, and of those before it. Callbacks are not called any more.

        Blocks for two seconds at most, and `orderly_s`: the time in which the process may end by itself. Without it,
        the process is killed.
        """
        with self._changed:
            self._closing.set()
            self._orderly_s = orderly_s
            self._changed.notify_all()
            self._wake_thread()
            thread = self._thread
        if thread is not None:
            # It waits for nothing but the end of a process.
            thread.join(orderly_s + 2 * self.limits.reap_s)
        with self._changed:
            ended = not (thread and thread.is_alive())
            if self._wake >= 0 and ended:
                os.close(self._wake)
                self._wake = -1
        return ended and not self._undead

    def _wake_thread(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, short_lives = 0.0, 0
        while not self._closing.is_set():
            self._wait_for_undead()
            if self._closing.is_set():
                break
            why, process = self._live()
            if self._closing.is_set():
                break
            limits = self.limits
            short_lives = 0 if process is not None and process.lived_s > limits.steady_s else short_lives + 1
            if short_lives == 0 or (short_lives == 1 and process is not None and process.ready):
                pause_s = 0.0
            else:
                pause_s = min(max(pause_s * 2, limits.first_pause_s), limits.longest_pause_s)
            hang = self._hang()
            if not hang:
                log.warning("the %s %s: another one starts in %g s", self._name, why, pause_s)
            with self._changed:
                self._lost = f"its helper process {why}, and the log says why: another one starts soon"
                self._problem = _hang_text(hang) if hang else self._lost
                self._changed.notify_all()
                self._changed.wait_for(self._closing.is_set, pause_s)
        self._reap()
        for process in self._undead:
            process.close()

    def _live(self) -> tuple[str, HelperProcess | None]:
        """One life of the process: how it ended, and the process if it could be started."""
        try:
            process = start_process(self._child, self._start())
        except OSError as error:
            why = f"could not be started ({error.strerror})"
            self._tell(self._on_ended, None, why)
            return why, None
        self.starts += 1
        with self._changed:
            self._now = process
        try:
            self._watch(process)
        finally:
            with self._changed:
                self._now = None
                process.late.close()
            process.lived_s = time.monotonic() - process.started_s
            why = self._end(process)
        return why, process

    def _watch(self, process: HelperProcess) -> None:
        """Until the process ends, hangs, or is not wanted any more."""
        look = select.poll()
        for fd in (self._wake, *process.awaited_fds()):
            look.register(fd, select.POLLIN)
        pulse = Pulse(process, self.limits.silent_s)
        while not (process.hangs or self._closing.is_set()):
            wait_s = pulse.wait_s
            ready = [fd for fd, _ in look.poll(None if wait_s is None else 1000 * wait_s)]
            if self._wake in ready:
                self._clear_wake()
            # What it has said before its end is read first. Its control socket may outlive it, in a child of its own.
            over = process.pidfd in ready
            for report in process.reports():
                pulse.heard()
                if not self._take_report(process, report):
                    return
            if over or process.control_ended:
                return
            if not pulse.beats():
                log.error("the %s does not answer: it is killed", self._name)
                self.give_up(process)

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _take_report(self, process: HelperProcess, report: bytes) -> bool:
        """Take what the process says; False if that cannot be."""
        kind = report[:1]
        level, text = packets.text_of(report)
        if kind == packets.LOG:
            log.log(level, "%s: %s", self._name, text)
        elif kind == packets.FAILED:
            process.failed = text
        elif kind == packets.TROUBLE:
            process.trouble = text
        elif kind == packets.READY:
            with self._changed:
                process.ready = True
                self._lost = ""
                self._changed.notify_all()
            self._tell(self._on_started, process)
        else:
            return kind == packets.PONG
        return True

    def _end(self, process: HelperProcess) -> str:
        """See a process that is lost, or not wanted any more, to its end; how it ended."""
        if self._closing.is_set() and self._orderly_s and not process.hangs:
            with contextlib.suppress(OSError):
                process.control.shutdown(socket.SHUT_WR)
            process.wait_until_gone(self._orderly_s)
        process.kill()
        if process.hangs:
            self.given_up += 1
            why = "hung and was killed"
            self._tell(self._on_ended, process, why)
        gone = process.wait_until_gone(self.limits.reap_s)
        if not process.hangs:
            self.ends += 1
            code = process.process.returncode
            status = "unknown: it is still in the kernel" if code is None else str(code)
            why = f"could not start: {process.failed}" if process.failed else f"ended with status {status}"
            self._tell(self._on_ended, process, why)
        if gone:
            self._let_go(process)
        else:
            self._undead.append(process)
        return why

    def _wait_for_undead(self) -> None:
        """While there are as many as may be, wait until one of them is gone. Then nothing is in the way of a start."""
        self._reap()
        if why := self._hang():
            log.warning("the %s %s: another one starts once one of them is gone", self._name, why)
            with self._changed:
                self._problem = _hang_text(why)
                self._changed.notify_all()
        while len(self._undead) >= self.limits.max_undead and not self._closing.is_set():
            look = select.poll()
            for fd in (self._wake, *(fd for process in self._undead for fd in process.awaited_fds())):
                look.register(fd, select.POLLIN)
            look.poll()
            self._clear_wake()
            self._reap()
        with self._changed:
            self._problem = ""

    def _hang(self) -> str:
        """How killed processes keep another one from being started; empty if they do not."""
        count = len(self._undead)
        if count < self.limits.max_undead:
            return ""
        return f"hangs in the kernel, as {count} before it do" if count > 1 else "hangs in the kernel"

    def _reap(self) -> None:
        gone = [process for process in self._undead if process.is_gone()]
        self._undead = [process for process in self._undead if process not in gone]
        for process in gone:
            self._let_go(process)

    def _let_go(self, process: HelperProcess) -> None:
        process.close()
        self._tell(self._on_gone, process)

    def _tell(self, callback: Callable[..., object] | None, *arguments: object) -> None:
        if callback is None or self._closing.is_set():
            return
        try:
            callback(*arguments)
        except Exception:
            log.exception("what is to know of the %s failed to take it in", self._name)


def _hang_text(hang: str) -> str:
    return f"its helper process {hang}, and the log says why: another one starts once one is gone"
