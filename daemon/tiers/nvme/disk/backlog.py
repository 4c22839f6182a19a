"""Operations that wait, by priority, and the runs that a carrier has taken of them.

    submit ─► [LOAD] [PREFETCH] [WRITE] ─► take: a run, which has one of `width` places ─► finish

Loads come before prefetches, these before writes, and writes leave a share of the places free: a load that arrives
between them begins at once. Blocks in adjoining slots come as one run, which is one system call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .block_io import AnyOp, DiskOutcome, adjoins

MAX_RUN_OPS = 16
MAX_RUN_BYTES = 2 << 20
"""A run is one system call: larger ones gain nothing and delay others."""
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
class DiskRun:
    """Operations that a carrier carries out together."""

    ops: Sequence[AnyOp]
    priority: int
    size_bytes: int = 0
    """Of its blocks, padded."""
    place: int = -1
    io_ns: int = 0
    """Time in system calls, or in the kernel."""
    calls: int = 0
    """System calls."""
    io_bytes: int = 0
    """Bytes moved by them."""

    @property
    def wanted(self) -> list[Sequence[AnyOp]]:
        """What to begin together: all, or, since what is left need not adjoin, each that is still wanted alone."""
        if not any(op.unwanted for op in self.ops):
            return [self.ops]
        return [[op] for op in self.ops if not op.unwanted]


class Backlog:
    """Waiting operations and runs under way. `changed` guards everything; methods without a note need it held.

    Args:
        width: runs that may be under way at a time.
        shares: the free places share what waits of loads, so that no run keeps a part of the device idle.
    """

    def __init__(self, width: int, shares: bool = True) -> None:
        self.changed = threading.Condition()
        self.width = width
        self.waiting: tuple[deque[AnyOp], ...] = tuple(deque() for _ in DiskPriority)
        self.stopping = False
        """Nothing more is accepted."""
        self.gave_up = False
        """Runs under way were left to the kernel: their operations have been handed back as ABANDONED."""
        self.busy = 0
        """Places taken."""
        self._writing = self._behind_bytes = 0
        self._max_writing = max(1, width - max(1, width // FREE_SHARE))
        self._shares = shares
        self._runs: list[DiskRun | None] = [None] * width
        self._started_s = [0.0] * width

    def take(self, may_begin: Callable[[AnyOp], bool] = lambda op: True) -> DiskRun | None:
        """The next run; None when nothing waits that may begin now."""
        if self.busy == self.width:
            return None
        for priority, waiting in enumerate(self.waiting):
            if not waiting or (priority == DiskPriority.WRITE and self._writing >= self._max_writing):
                continue
            if priority != DiskPriority.LOAD and self._behind_bytes >= BEHIND_BYTES:
                break
            if not may_begin(waiting[0]):
                continue
            run = self._pop(priority, waiting)
            run.place = self._runs.index(None)
            self._runs[run.place], self._started_s[run.place] = run, time.monotonic()
            self.busy += 1
            self._writing += priority == DiskPriority.WRITE
            self._behind_bytes += 0 if priority == DiskPriority.LOAD else run.size_bytes
            return run
        return None

    def _pop(self, priority: int, waiting: deque[AnyOp]) -> DiskRun:
        """As many operations from the head as fit one system call."""
        most = MAX_RUN_OPS
        if priority == DiskPriority.LOAD and self._shares:
            # Clients wait for these: no run takes more than its share while places are free.
            most = min(most, -(-len(waiting) // (self.width - self.busy)))
        run = [waiting.popleft()]
        size = run[0].moved_bytes
        while waiting and len(run) < most and adjoins(run[-1], waiting[0]):
            more = waiting[0].moved_bytes
            if size + more > MAX_RUN_BYTES:
                break
            size += more
            run.append(waiting.popleft())
        return DiskRun(run, priority, size)

    def finish(self, runs: Sequence[DiskRun]) -> bool:
        """Free the places of runs whose operations have outcomes; False when they were abandoned meanwhile."""
        if self.gave_up:
            return False
        for run in runs:
            self._runs[run.place], self._started_s[run.place] = None, 0.0
            self._writing -= run.priority == DiskPriority.WRITE
            self._behind_bytes -= 0 if run.priority == DiskPriority.LOAD else run.size_bytes
        self.busy -= len(runs)
        return True

    def cancel(self, priority: DiskPriority | None = None) -> list[DiskRun]:
        """Take back what has not started, of one priority or of all."""
        cancelled = []
        for number, waiting in enumerate(self.waiting):
            if waiting and (priority is None or number == priority):
                cancelled.append(DiskRun(list(waiting), number))
                waiting.clear()
        for run in cancelled:
            for op in run.ops:
                op.outcome = DiskOutcome.CANCELLED
        return cancelled

    def abandon(self) -> list[DiskRun]:
        """Leave what is under way to the kernel, for good."""
        self.gave_up = True
        left = [run for run in self._runs if run is not None]
        self._runs = [None] * self.width
        for run in left:
            for op in run.ops:
                op.outcome = DiskOutcome.ABANDONED
        return left

    def oldest_s(self) -> float:
        """Since when (time.monotonic()) the longest of the runs has been under way; 0 for none. Without `changed`."""
        return min((started_s for started_s in self._started_s if started_s), default=0.0)

    def never_again(self) -> None:
        """The carrier has failed: from now on the disk counts as one that hangs. Without `changed`."""
        self._started_s.append(time.monotonic())
