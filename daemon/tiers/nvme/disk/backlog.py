"""Operations that wait, by priority, and the parts of them that a carrier has taken.

    submit ─► [LOAD] [PREFETCH] [WRITE] ─► take: a part, which has one of `width` places ─► finish

Loads come before prefetches, these before writes, and writes leave a share of the places free: a load that arrives
between them begins at once. Blocks of an operation in adjoining slots come as one part, which is one system call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .block_io import AnyOp, Call, DiskOutcome, TaskOp, is_one_part, part_end

MAX_PART_BLOCKS = 16
MAX_PART_BYTES = 2 << 20
"""A part is one system call; larger ones gain nothing and delay others."""
BEHIND_BYTES = 16 << 20
"""Prefetches and writes under way at a time, together: a load that comes waits in the disk behind no more than that."""
FREE_SHARE = 4
"""One place of this number is not for writes; at least one, where there are two."""


class DiskPriority(IntEnum):
    """Selects the queue; lower goes first."""

    LOAD = 0
    PREFETCH = 1
    WRITE = 2


@dataclass(slots=True, eq=False)
class Part:
    """Blocks `first ..< end` of an operation, which a carrier carries out together."""

    op: AnyOp
    first: int
    end: int
    size_bytes: int = 0
    """Of its blocks, padded."""
    place: int = -1
    io_ns: int = 0
    """Time in system calls, or in the kernel."""
    calls: int = 0
    """System calls."""
    io_bytes: int = 0
    """Bytes moved by them."""


class Backlog:
    """Waiting operations, and parts of them under way. `changed` guards all; methods without a note need it held.

    Args:
        width: parts that may be under way at a time.
        shares: the free places share what waits of loads, so that a large part leaves none of the device idle.
    """

    def __init__(self, width: int, shares: bool = True) -> None:
        self.changed = threading.Condition()
        self.width = width
        self.waiting: tuple[deque[AnyOp], ...] = tuple(deque() for _ in DiskPriority)
        """The first one of each may have begun."""
        self.blocks = [0] * len(DiskPriority)
        """Blocks of these that wait."""
        self.stopping = False
        """Nothing more is accepted."""
        self.gave_up = False
        """Runs under way were left to the kernel: their operations have been handed back as ABANDONED."""
        self.busy = 0
        """Places taken."""
        self._writing = self._behind_bytes = 0
        self._max_writing = max(1, width - max(1, width // FREE_SHARE))
        self._shares = shares
        self._parts: list[Part | None] = [None] * width
        self._started_s = [0.0] * width

    def add(self, ops: Sequence[AnyOp], priority: int) -> int:
        """These wait from now on; returns how many parts they may have."""
        before = self.blocks[priority]
        self.waiting[priority].extend(ops)
        self.blocks[priority] += sum([op.count for op in ops])
        if priority == DiskPriority.LOAD and self._shares:
            return self.blocks[priority] - before
        return sum([1 if isinstance(op, TaskOp) or is_one_part(op) else op.count for op in ops])

    def take(self, may_begin: Callable[[AnyOp, int], bool] = lambda op, place: True) -> Part | None:
        """The next part; None when nothing waits that may begin now."""
        if self.busy == self.width:
            return None
        for priority, waiting in enumerate(self.waiting):
            if not waiting or (priority == DiskPriority.WRITE and self._writing >= self._max_writing):
                continue
            if priority != DiskPriority.LOAD and self._behind_bytes >= BEHIND_BYTES:
                break
            if not may_begin(waiting[0], waiting[0].begun):
                continue
            part = self._next_part(priority, waiting)
            part.place = self._parts.index(None)
            self._parts[part.place], self._started_s[part.place] = part, time.monotonic()
            self.busy += 1
            self._writing += priority == DiskPriority.WRITE
            self._behind_bytes += 0 if priority == DiskPriority.LOAD else part.size_bytes
            return part
        return None

    def _next_part(self, priority: int, waiting: deque[AnyOp]) -> Part:
        """As many blocks of the first operation as fit one system call."""
        op, most = waiting[0], MAX_PART_BLOCKS
        first = op.begun
        if isinstance(op, TaskOp):
            part = Part(op, 0, 1)
        else:
            if priority == DiskPriority.LOAD and self._shares:
                # Clients wait for these: no part takes more than its share while places are free.
                most = min(most, -(-self.blocks[priority] // (self.width - self.busy)))
            end = part_end(op, first, most, MAX_PART_BYTES)
            part = Part(op, first, end, sum(op.sizes[first:end]))
        op.begun = part.end
        self.blocks[priority] -= part.end - first
        if op.begun == op.count:
            waiting.popleft()
        return part

    def finish(self, parts: Sequence[Part]) -> list[AnyOp]:
        """Free the places of parts whose blocks have outcomes; returns operations all of whose blocks have one now.

        None where all were abandoned meanwhile.
        """
        over: list[AnyOp] = []
        for part in () if self.gave_up else parts:
            op = part.op
            self._parts[part.place], self._started_s[part.place] = None, 0.0
            self._writing -= op.priority == DiskPriority.WRITE
            self._behind_bytes -= 0 if op.priority == DiskPriority.LOAD else part.size_bytes
            self.busy -= 1
            if not isinstance(op, TaskOp) and part.calls:
                op.calls.append(Call(part.io_ns, part.calls, part.io_bytes))
            over += self._ended(op, part.end - part.first)
        return over

    @staticmethod
    def _ended(op: AnyOp, count: int) -> list[AnyOp]:
        """So many more blocks of an operation have outcomes; it, if that was the rest."""
        op.ended += count
        return [op] if op.ended == op.count else []

    def cancel(self, priority: DiskPriority | None = None) -> tuple[int, list[AnyOp]]:
        """Take back what has not started, of one priority or of all: how many blocks, and which operations are over."""
        over, blocks = list[AnyOp](), 0
        for number, waiting in enumerate(self.waiting):
            if priority is None or number == priority:
                for op in waiting:
                    op.end(op.begun, op.count, DiskOutcome.CANCELLED)
                    over += self._ended(op, op.count - op.begun)
                blocks += self.blocks[number]
                self.blocks[number] = 0
                waiting.clear()
        return blocks, over

    def abandon(self) -> list[AnyOp]:
        """Leave what is under way to the kernel, for good; returns these operations."""
        self.gave_up = True
        over: list[AnyOp] = []
        for part in self._parts:
            if part is not None:
                part.op.end(part.first, part.end, DiskOutcome.ABANDONED)
                over += self._ended(part.op, part.end - part.first)
        self._parts = [None] * self.width
        return over

    def oldest_s(self) -> float:
        """Since when (time.monotonic()) the longest of the parts has been under way; 0 for none. Without `changed`."""
        return min((started_s for started_s in self._started_s if started_s), default=0.0)

    def never_again(self) -> None:
        """The carrier has failed: from now on the disk counts as one that hangs. Without `changed`."""
        self._started_s.append(time.monotonic())
