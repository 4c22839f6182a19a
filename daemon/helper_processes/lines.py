"""Lines to a helper process whose calls were not answered in time."""

from __future__ import annotations

import contextlib
import socket

from tiercache.daemon.helper_processes import packets


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
