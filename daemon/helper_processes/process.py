"""One life of a helper process, as the daemon sees it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from tiercache.ground.isolated import quick_command

from . import packets

MAX_REPORTS = 1000
"""Read in one go: more than a socket holds, so that all that a dead process has said is read."""


class LateLines:
    """Those of one process: closed once the process has closed its end. Its owner guards it; nothing blocks."""

    def __init__(self) -> None:
        self._lines: list[tuple[socket.socket, float]] = []

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def first_s(self) -> float:
        """When the oldest of their calls began."""
        return min(began_s for _, began_s in self._lines)

    def add(self, line: socket.socket, began_s: float) -> None:
        """Keep a line that is used no more, and whose call began then."""
        with contextlib.suppress(OSError):  # the process is gone
            line.shutdown(socket.SHUT_WR)
        self._lines.append((line, began_s))

    def close_those_over(self) -> None:
        """Close lines that the process is done with."""
        self._lines = [(line, began_s) for line, began_s in self._lines if not _close_if_over(line)]

    def close(self) -> None:
        """Close all: the process is lost."""
        for line, _ in self._lines:
            line.close()
        self._lines.clear()


def _close_if_over(line: socket.socket) -> bool:
    """Close a line if the process has closed its end; whether it has."""
    try:
        line.setblocking(False)
        while packet := line.recv(packets.MAX_PACKET_BYTES):
            del packet  # a late answer
    except BlockingIOError:
        return False
    except OSError:
        pass
    line.close()
    return True


class ProcessProblem(Enum):
    """Why there is no line to the process."""

    STARTING = "starting"
    """Not ready within the deadline, or the supervisor is being closed."""
    ENDED = "ended"
    """It has ended, or could not be started: another one follows."""
    HANGS = "hangs"
    """It takes no lines: it does not read its control socket."""
    LATE = "late"
    """As many lines as may be were given up, and the process is not done with them."""
    NO_RESOURCES = "no_resources"
    """The daemon lacks a thread or a descriptor."""


class ProcessError(Exception):
    """There is no line to the process. The text calls it "its helper process"."""

    def __init__(self, problem: ProcessProblem, text: str) -> None:
        super().__init__(text)
        self.problem = problem
        self.text = text


@dataclass(eq=False)
class HelperProcess:
    """One life of the process. All but `answered_s` is the supervisor's to change."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    pidfd: int
    started_s: float = field(default_factory=time.monotonic)
    lived_s: float = 0.0
    """How long it has lived, once it is lost."""
    ready: bool = False
    failed: str = ""
    """Why it could not start, in its own words."""
    trouble: str = ""
    """What is not well, in its own words."""
    hangs: bool = False
    answered_s: float = 0.0
    """When it has last answered on any line: set by the owner, from any thread."""
    late: LateLines = field(default_factory=LateLines)
    """Lines that were given up."""
    control_ended: bool = False
    """All ends of its control socket are closed: its own, and those of processes that it has started."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def reports(self) -> Iterator[bytes]:
        """Reports that it has sent and that were not read: at most `MAX_REPORTS` packets. Does not block."""
        for _ in range(0 if self.control_ended else MAX_REPORTS):
            try:
                packet = self.control.recv(packets.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.control_ended = True
                return
            yield packet

    def new_line(self) -> socket.socket:
        """A line to it, once it is ready; the caller's to close. Does not block. Raises ProcessError."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            text = f"no line to its helper process: {error.strerror}"
            raise ProcessError(ProcessProblem.NO_RESOURCES, text) from None
        try:
            socket.send_fds(self.control, [packets.LINE], [theirs.fileno()])
        except BlockingIOError:
            ours.close()
            raise ProcessError(ProcessProblem.HANGS, "its helper process does not take new calls") from None
        except OSError:
            ours.close()
            raise ProcessError(ProcessProblem.ENDED, "its helper process has ended") from None
        finally:
            theirs.close()
        return ours

    def ping(self) -> bool:
        """Ask it for a report; False if it has ended. Does not block."""
        try:
            self.control.send(packets.PING)
        except BlockingIOError:  # it does not read: no report will come
            return True
        except OSError:
            return False
        return True

    def is_gone(self) -> bool:
        """True if nothing of it is left, not even in the kernel: it is reaped, and its sockets are closed.

        Unread reports are dropped.
        """
        for _ in self.reports():
            pass
        return self.process.poll() is not None and self.control_ended

    def awaited_fds(self) -> list[int]:
        """One of these is readable whenever `is_gone` may have changed. Empty once it is gone."""
        fds = [] if self.control_ended else [self.control.fileno()]
        return fds if self.process.returncode is not None else [*fds, self.pidfd]

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Wait for the end of the process; True if it has ended. Blocks for at most that time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_gone():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            look = select.poll()
            for fd in self.awaited_fds():
                look.register(fd, select.POLLIN)
            look.poll(left_s * 1000)
        return True

    def kill(self) -> None:
        """End it: by SIGKILL or, where a sandbox refuses signals, as it ends when the daemon does."""
        try:
            self.process.kill()
        except OSError:
            with contextlib.suppress(OSError):  # it has ended
                self.control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give back the descriptors. `is_gone` is not to be asked afterwards."""
        self.control_ended = True
        self.control.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def start_process(child: str, start: bytes) -> HelperProcess:
    """Start `child`, a module whose `main` calls `child.run_child`. Does not wait for it. Raises OSError.

    The kernel kills the process when the calling thread is gone.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = subprocess.Popen(
            [*quick_command(child), "--control-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # A session of its own: Control-C at a terminal is for the daemon, which ends the process.
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise OSError(error.errno, f"pipe, fork, setsid or exec: {error.strerror}") from error
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    pidfd = -1
    try:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            raise OSError(error.errno, f"pidfd_open: {error.strerror}") from error
        ours.setblocking(False)
        with contextlib.suppress(ConnectionError):  # it has ended: its owner sees that
            ours.send(start)
    except BaseException:
        process.kill()
        process.wait()  # it has not been told yet what to do: nothing in it hangs
        ours.close()
        if pidfd >= 0:
            os.close(pidfd)
        raise
    return HelperProcess(process, ours, pidfd)
