"""What every child does: `main` of its module calls `run_child`. It ends with its parent, whatever hangs.

Imports little, because a process that is replaced is missed meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from . import packets

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("tiercache.daemon")


class CannotStart(Exception):
    """Raised by `serve` before it is ready: the text reaches the daemon, and the process ends with status 1."""


class ControlSocket:
    """The child's end of its control socket.

    Attributes:
        start: the message with which the daemon started this process. Empty: the daemon is gone already.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.start, _ = self._receive(1)

    def say_ready(self) -> None:
        """From now on the daemon opens lines."""
        self._end.send(packets.READY)

    def say_trouble(self, text: str) -> bool:
        """What is not well in this process from now on, for `health`; empty: all is. Any thread.

        Does not block. False if there was no room for it: the caller has to say it again.
        """
        try:
            self._end.send(packets.trouble_packet(text), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def next_line(self) -> socket.socket | None:
        """The next line that the daemon opens; None when this process is to end. Blocks.

        To be called again at once, by a thread that waits for nothing else: this is also where pings are answered, and
        a process that does not answer them is killed.
        """
        while True:
            packet, fds = self._receive(1)
            if packet != packets.PING:
                return socket.socket(fileno=fds[0]) if packet else None
            with contextlib.suppress(OSError):  # without room the daemon has enough to read
                self._end.send(packets.PONG, socket.MSG_DONTWAIT)

    def _receive(self, most_fds: int) -> tuple[bytes, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(self._end, packets.MAX_PACKET_BYTES, most_fds, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # the daemon has died with reports unread
            return b"", []
        return packet, fds


def run_child(serve: Callable[[ControlSocket], int], what: str) -> None:
    """Serve until `serve` returns the exit status; never returns, and waits for no thread, since threads may hang.

    Takes the socket from the command line, `--control-fd N`. `serve` is not called if the daemon is gone already.

    Args:
        what: names this process in the line that its log has for an exception that ended it.
    """
    end = socket.socket(fileno=_control_fd(sys.argv))
    end.set_inheritable(False)
    # For native code that hangs with the interpreter's lock. The thread that started us lives as long as the daemon's
    # use of this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _log_to(end)
    status = 1
    try:
        control = ControlSocket(end)
        status = serve(control) if control.start else 0
    except CannotStart as error:
        end.send(packets.failed_packet(str(error)))
    except Exception:
        log.exception("%s fails", what)
    finally:
        os._exit(status)


def _control_fd(arguments: list[str]) -> int:
    if len(arguments) != 3 or arguments[1] != "--control-fd":
        raise SystemExit(f"{arguments[0]}: started by the daemon only, with --control-fd N")
    return int(arguments[2])


class _ToDaemon(logging.Handler):
    """Log lines go to the daemon's log; those that find no room are dropped."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._end.send(packets.log_packet(record.levelno, self.format(record)), socket.MSG_DONTWAIT)


def _log_to(end: socket.socket) -> None:
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(_ToDaemon(end))
