"""Counts and histograms of a directory's operations, whatever carries them out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import compress

from tiercache.ground.histograms import POWERS_OF_TWO, Histogram, LatencyHistogram

from .backlog import DiskPriority
from .block_io import AnyOp, BlockOp, DiskOutcome, ReadOp, TaskOp

log = logging.getLogger("tiercache.daemon")

LATENCIES = ("load", "prefetch", "write", "read_call", "write_call")
COUNTERS = (
    "reads",
    "read_bytes",
    "read_calls",
    "writes",
    "written_bytes",
    "write_calls",
    "checksum_failures",
    "other_key_blocks",
    "cancelled",
    "abandoned",
    "refused",
)
"""Counters, by name in the stats."""


class Tally:
    """What a queue of operations counts. Event loop only."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        """Bytes (padded) of operations accepted and not yet passed to `done`."""
        self.in_flight = 0
        """Blocks and tasks accepted and not yet passed to `done`."""
        self.reads = self.read_bytes = self.read_calls = 0
        self.writes = self.written_bytes = self.write_calls = 0
        self.checksum_failures = self.other_key_blocks = self.cancelled = self.abandoned = self.refused = 0
        self.errors: dict[int, int] = {}
        """I/O errors by errno."""
        self.latency = {name: LatencyHistogram() for name in LATENCIES}
        """From submit to done by priority, of each block, and time inside the system calls (with AIO: in the kernel) of
        one part of an operation."""
        self.call_bytes = {"read_call": Histogram(POWERS_OF_TWO), "write_call": Histogram(POWERS_OF_TWO)}
        """Bytes moved by the system calls of one part of an operation."""
        self._latency_of = [self.latency[priority.name.lower()] for priority in DiskPriority]

    def _counts(self) -> dict[str, object]:
        """All counts so far, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in (*COUNTERS, "in_flight", "in_flight_bytes")},
            "errors": {str(number): count for number, count in self.errors.items()},
            "latency": {name: histogram.snapshot() for name, histogram in self.latency.items()},
        }

    def _count(self, ops: Sequence[AnyOp]) -> None:
        """Count operations that have ended."""
        for op in ops:
            if isinstance(op, TaskOp):
                self._count_odd(op.outcome, op.errno)
            else:
                self._count_blocks(op)

    def _count_blocks(self, op: BlockOp) -> None:
        blocks, sizes = op.count, op.sizes
        if not op.is_well:
            errnos = op.errnos
            ran = [self._count_odd(outcome, errnos.get(place, 0)) for place, outcome in enumerate(op.outcomes)]
            blocks, sizes = ran.count(True), list(compress(sizes, ran))
        latency = time.monotonic_ns() - op.submitted_ns
        self._latency_of[op.priority].observe_all([latency] * blocks)
        calls, moved_bytes, name = 0, sum(sizes), "read_call" if isinstance(op, ReadOp) else "write_call"
        for call in op.calls:
            self.latency[name].observe(call.io_ns)
            self.call_bytes[name].observe(call.io_bytes)
            calls += call.calls
        if isinstance(op, ReadOp):
            self.reads += blocks
            self.read_bytes += moved_bytes
            self.read_calls += calls
        else:
            self.writes += blocks
            self.written_bytes += moved_bytes
            self.write_calls += calls

    def _pass_on(self, ops: Sequence[AnyOp]) -> None:
        """Pass operations that have ended to their `done`."""
        self.in_flight -= sum([op.count for op in ops])
        self.in_flight_bytes -= sum([op.held_bytes for op in ops])
        for op in ops:
            try:
                op.done(op)
            except Exception:
                log.exception("the owner of a disk operation failed to take it back")

    def _count_odd(self, outcome: DiskOutcome, number: int) -> bool:
        """Count an outcome that may be no good one; whether the disk has dealt with the block. number: an errno."""
        if outcome is DiskOutcome.IO_ERROR:
            self.errors[number] = self.errors.get(number, 0) + 1
        self.cancelled += outcome is DiskOutcome.CANCELLED
        self.abandoned += outcome is DiskOutcome.ABANDONED
        self.checksum_failures += outcome is DiskOutcome.CORRUPT
        self.other_key_blocks += outcome is DiskOutcome.OTHER_KEY
        return outcome is not DiskOutcome.CANCELLED and outcome is not DiskOutcome.ABANDONED
