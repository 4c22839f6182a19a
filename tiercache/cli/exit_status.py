"""The exit statuses of commands, and the only error with its own status.

0 all is well, 1 the thing asked about is not (no daemon), 2 a wrong command line, setting or installation, 3 there is a
daemon but it does not answer.
"""

from __future__ import annotations

from tiercache.errors import DaemonUnavailable

EXIT_OK = 0
EXIT_UNWELL = 1
EXIT_USAGE = 2
EXIT_NO_ANSWER = 3


class NotAnswering(DaemonUnavailable):
    """A daemon runs at the address but does not answer; `pid` is its process."""

    def __init__(self, text: str, pid: int) -> None:
        super().__init__(text)
        self.pid = pid
