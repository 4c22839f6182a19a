"""How an NVMe directory grows: by a segment at a time, until it has its part of `nvme_size` or the disk has no more."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable

from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, TaskOp
from tiercache.daemon.tiers.nvme.disk.health import WriteHealth
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority

from .parts import BlockQueue, DirectoryFiles

log = logging.getLogger("tiercache.daemon")

GROW_AGAIN_S = 30.0
"""Retry interval after a segment could not be made."""


class NewSegments:
    """Event loop only; never blocks. `grown(segment)` is called when there is one more.

    `known`: segments that the catalog names, whose numbers are not used again.
    """

    def __init__(
        self,
        directory: DirectoryFiles,
        queue: BlockQueue,
        health: WriteHealth,
        known: Iterable[int],
        grown: Callable[[int], None],
        clock_s: Callable[[], float],
    ) -> None:
        self.trouble = ""
        """Why no further segment could be made last time."""
        self.under_way = False
        self._directory = directory
        self._queue = queue
        self._health = health
        self._grown = grown
        self._clock_s = clock_s
        self._numbers = {*known, *directory.segments}
        self._again_s = 0.0
        if directory.max_segments == 0:
            self.trouble = "its part of nvme_size holds no segment: make that larger, or empty the directory"

    @property
    def is_possible(self) -> bool:
        """True if one more may be made now, as far as known."""
        room = len(self._directory.segments) < self._directory.max_segments
        return room and self._clock_s() >= self._again_s

    def begin(self) -> None:
        """Ask for one more segment, while none is under way; it is there some milliseconds later."""
        segment = max(self._numbers, default=0) + 1
        op = TaskOp(done=lambda op: self._made(segment, op), call=lambda: self._directory.create_segment(segment))
        self.under_way = self._queue.submit(op, DiskPriority.WRITE)

    def _made(self, segment: int, op: TaskOp) -> None:
        self.under_way = False
        if op.outcome is DiskOutcome.OK:
            self._numbers.add(segment)
            self.trouble = ""
            self._grown(segment)
        elif op.outcome is DiskOutcome.IO_ERROR:
            if op.errno == errno.EEXIST:
                self._numbers.add(segment)  # a foreign file: try the next number
            problem = f"no further segment could be made: {os.strerror(op.errno)}"
            if not self._directory.segments:
                self._health.failed(problem)
                return
            # In the existing segments blocks can still be replaced.
            if not self.trouble:
                log.warning("%s: %s; blocks are replaced meanwhile", self._directory.path, problem)
            self.trouble = problem
            self._again_s = self._clock_s() + GROW_AGAIN_S

    def write_worked(self) -> None:
        """A write has worked: if the disk has just come back, segments can be made again too."""
        if self._health.worked():
            self.trouble, self._again_s = "", 0.0
