"""The files of a directory that belong to a worker process: what the loop knows of them, and questions about them.

Questions block, so they are asked by `TaskOp`s, in a thread of the queue. If the process ends meanwhile they are asked
again: of the next one.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Collection

from tiercache.daemon.tiers.nvme.disk.directory import Home, segments_within
from tiercache.daemon.tiers.nvme.disk.superblock import Superblock

from . import messages
from .opening import Plan
from .packets import receive_message, send_message


class RemoteDirectory:
    """See `Directory`. Attributes are for the event loop; methods block.

    `end()` ends the process, in order: it blocks for some seconds at most.
    """

    def __init__(self, plan: Plan, opened: messages.Opened, end: Callable[[], None]) -> None:
        self.path = plan.path
        self.cap_bytes = plan.cap_bytes
        self.segment_bytes = opened.segment_bytes
        self.cipher = plan.cipher
        self.direct = opened.direct
        self.direct_reason = opened.direct_reason
        self.superblock = Superblock(opened.directory_id, opened.segment_bytes, opened.created_s)
        self.kept_bytes = opened.kept_bytes
        self.home: Home | None = opened.home
        self.trouble = ""
        """What is wrong with the process, for people; empty when nothing is."""
        self.worker_pid = self.worker_starts = 0
        """The process that has it open, 0 while there is none; and how many there were."""
        self._db_reserve_bytes = opened.db_reserve_bytes
        self._segments = set(opened.segments)
        self._end = end
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._line: socket.socket | None = None
        self._asking: socket.socket | None = None
        """The line on which a thread waits for an answer: that thread closes it, if the process has ended."""
        self._gone = ""
        self._closed = False

    @property
    def segments(self) -> list[int]:
        """See `Directory`."""
        return sorted(self._segments)

    @property
    def segment_count(self) -> int:
        """See `Directory`."""
        return len(self._segments)

    @property
    def max_segments(self) -> int:
        """See `Directory`."""
        return segments_within(self.cap_bytes, self.segment_bytes, self._db_reserve_bytes)

    # --- questions, from any one thread ----------------------------------------------------------

    def create_segment(self, segment_id: int) -> None:
        """See `Directory`. A segment that an earlier process has made in full before it ended counts as made."""
        answer = self._ask(messages.CreateSegment(segment_id), lambda: segment_id in self._segments)
        if self._gone:
            raise OSError(errno.EIO, self._gone)
        if isinstance(answer, messages.Bad):
            raise OSError(answer.errno, os.strerror(answer.errno))
        self._segments.add(segment_id)

    def look(self) -> str:
        """See `Directory`. Also why no process can be had that has it open."""
        answer = self._ask(messages.LookAtPath(), lambda: bool(self._gone))
        if self._gone:
            return self._gone
        if isinstance(answer, messages.Bad):
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer.text if isinstance(answer, messages.Good) else ""

    def _ask(self, question: messages.FileQuestion, is_settled: Callable[[], bool]) -> messages.FileAnswer:
        """The answer of a process, unless the question is settled before one can be asked. Raises OSError once closed.

        Waits for the next process if there is none.
        """
        ended: socket.socket | None = None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._line not in (None, ended)) or self._gone or self._closed,  # noqa: B023
                )
                if self._closed:
                    raise OSError(errno.EIO, "the directory is closed")
                if is_settled() or self._gone:
                    return messages.Good()
                asked = self._asking = self._line
                assert asked is not None
            message = _answer_of(asked, question)
            with self._changed:
                self._asking = None
                if asked is not self._line:
                    asked.close()
            if message is not None:
                return messages.decode_file_answer(message)
            ended = asked

    # --- the process -----------------------------------------------------------------------------

    def connect(self, line: socket.socket, segments: Collection[int], pid: int) -> None:
        """A process has it open."""
        self.worker_pid, self.trouble = pid, ""
        self.worker_starts += 1
        with self._changed:
            self._segments |= set(segments)
            self._line = line
            self._changed.notify_all()

    def disconnect(self) -> None:
        """The process is ending."""
        self.worker_pid = 0
        with self._changed:
            if self._line is not None and self._line is not self._asking:
                self._line.close()
            self._line = None

    def give_up(self, why: str) -> None:
        """No process can have it open any more as it was."""
        with self._changed:
            self._gone = why
            self._changed.notify_all()

    def close(self) -> None:
        """End the process. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end()


def _answer_of(line: socket.socket, question: messages.FileQuestion) -> bytes | None:
    """What the process answers; None if it ends. Blocks."""
    try:
        send_message(line, messages.encode(question))
        return receive_message(line)
    except OSError:
        return None
