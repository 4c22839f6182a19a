"""A pipeline of commands on one line.

    waiting ──send()──► flying ──settle()──► settled

Requests are sent ahead of their replies, but within bounds. If both sides sent more than the sockets hold, and read
nothing, neither would ever go on; and what a server has to answer it may hold in its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .commands import ValkeyCommand
from .line import Part, ValkeyLine
from .refusals import Redirect, read_redirect, read_refusal

MIB = 1 << 20


class PipelineWindow(NamedTuple):
    """How much may be under way on one line, beyond one command."""

    request_bytes: int
    reply_bytes: int


READING = PipelineWindow(MIB // 4, 8 * MIB)
WRITING = PipelineWindow(16 * MIB, MIB // 8)
SENT_AT_ONCE_BYTES = MIB
"""Small requests are gathered up to this much for one system call."""


class Exchange:
    """Commands for one server. Use `run`, or with others at once `send` and `settle`.

    `problem` is the first error of the server that concerns the whole call. Nothing is sent after it, but what is
    under way is read, so that the line stays in step.
    """

    def __init__(
        self, line: ValkeyLine, commands: Iterable[ValkeyCommand], window: PipelineWindow, *, follow: bool = False
    ) -> None:
        self.line = line
        self.problem: StoreError | None = None
        self.redirected: list[tuple[ValkeyCommand, Redirect]] = []
        """With `follow`: commands that another node of the cluster should be asked."""
        self._waiting = deque(commands)
        self._flying: deque[ValkeyCommand] = deque()
        self._due = 0  # replies to the oldest of them; 0: all
        self._window = window
        self._follow = follow
        self._request_bytes = 0  # of what is flying
        self._reply_bytes = 0

    def run(self) -> None:
        """All of them. Raises StoreError: the line is at fault, unless it is `problem`."""
        self.send()
        while self._flying:
            self.settle()
            self.send()
        if self.problem is not None:
            raise self.problem

    @property
    def under_way(self) -> bool:
        """True if replies are due."""
        return bool(self._flying)

    def send(self) -> None:
        """Send as many as the window has room for; waits until it is half empty."""
        window = self._window
        half_full = self._request_bytes * 2 > window.request_bytes or self._reply_bytes * 2 > window.reply_bytes
        if not self._waiting or self.problem is not None or half_full:
            return
        parts: list[Part] = []
        gathered_bytes = 0
        while self._waiting:
            command = self._waiting[0]
            full = (
                self._request_bytes + command.request_bytes > window.request_bytes
                or self._reply_bytes + command.reply_bytes > window.reply_bytes
            )
            if full and self._flying:
                break
            self._flying.append(self._waiting.popleft())
            self._request_bytes += command.request_bytes
            self._reply_bytes += command.reply_bytes
            parts += command.request
            gathered_bytes += command.request_bytes
            if gathered_bytes >= SENT_AT_ONCE_BYTES:
                self.line.send(parts)
                parts, gathered_bytes = [], 0
        if parts:
            self.line.send(parts)

    def settle(self) -> None:
        """Read a reply to the oldest command that is flying, or several."""
        command = self._flying[0]
        self._due = self._due or command.replies
        settled = command.read_ahead(self.line, self._due)
        first = b"" if settled else self.line.read_line()
        self._due -= settled or 1
        if not self._due:
            self._flying.popleft()
            self._request_bytes -= command.request_bytes
            self._reply_bytes -= command.reply_bytes
        if first[:1] == b"-":
            self._refused(command, first)
        elif not settled:
            command.read(first, self.line)

    def _refused(self, command: ValkeyCommand, first: bytes) -> None:
        refusal = read_refusal(first)
        redirect = read_redirect(refusal) if self._follow else None
        passes = command.passes_over(refusal)
        if redirect is not None:
            self.redirected.append((command, redirect))
            return
        if passes:
            return
        problem = refusal.problem
        denied = problem is StoreProblem.DENIED
        if (problem is None or denied) and command.refuse(denied):
            return
        if self.problem is None:
            self.problem = refusal.error(str(self.line.place), problem or StoreProblem.PROTOCOL)
