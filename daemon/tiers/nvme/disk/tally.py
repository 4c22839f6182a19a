"""Counts and histograms of a directory's operations, whatever carries them out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import cast

from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.ground.histograms import POWERS_OF_TWO, Histogram, LatencyHistogram

from .backlog import DiskPriority, DiskRun
from .block_io import AnyOp, BlockOp, DiskOutcome, ReadOp, TaskOp, by_done

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
        """Operations accepted and not yet passed to `done`."""
        self.reads = self.read_bytes = self.read_calls = 0
        self.writes = self.written_bytes = self.write_calls = 0
        self.checksum_failures = self.other_key_blocks = self.cancelled = self.abandoned = self.refused = 0
        self.errors: dict[int, int] = {}
        """I/O errors by errno."""
        self.latency = {name: LatencyHistogram() for name in LATENCIES}
        """From submit to done by priority, and time inside the system calls (with AIO: in the kernel) of one run."""
        self.call_bytes = {"read_call": Histogram(POWERS_OF_TWO), "write_call": Histogram(POWERS_OF_TWO)}
        """Bytes moved by the system calls of one run."""
        self._latency_of = [self.latency[priority.name.lower()] for priority in DiskPriority]

    def _counts(self) -> dict[str, object]:
        """All counts so far, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in (*COUNTERS, "in_flight", "in_flight_bytes")},
            "errors": {str(number): count for number, count in self.errors.items()},
            "latency": {name: histogram.snapshot() for name, histogram in self.latency.items()},
        }

    def _count_one(self, run: DiskRun, op: AnyOp) -> None:
        """Count a run of one operation, as large blocks are: each step here finds the CPU's caches cold."""
        if (op.outcome is not DiskOutcome.OK and not self._has_run(op)) or isinstance(op, TaskOp):
            return
        self._latency_of[run.priority].observe(time.monotonic_ns() - op.submitted_ns)
        moved_bytes = op.held_bytes if op.codec == RAW else op.moved_bytes
        if isinstance(op, ReadOp):
            name = "read_call"
            self.reads += 1
            self.read_bytes += moved_bytes
            self.read_calls += run.calls
        else:
            name = "write_call"
            self.writes += 1
            self.written_bytes += moved_bytes
            self.write_calls += run.calls
        if run.calls:
            self.latency[name].observe(run.io_ns)
            self.call_bytes[name].observe(run.io_bytes)

    def _count(self, runs: Sequence[DiskRun]) -> None:
        """Count completed runs, those of a kind together."""
        well = DiskOutcome.OK
        kinds: dict[tuple[int, type], list[DiskRun]] = {}
        for run in runs:
            kinds.setdefault((run.priority, type(run.ops[0])), []).append(run)
        for (priority, kind), alike in kinds.items():
            ops = [op for run in alike for op in run.ops]
            if not all(op.outcome is well for op in ops):
                ops = [op for op in ops if self._has_run(op)]
            if kind is not TaskOp:
                self._count_blocks(priority, issubclass(kind, ReadOp), alike, cast("list[BlockOp]", ops))

    def _count_blocks(self, priority: int, reads: bool, runs: Sequence[DiskRun], ops: Sequence[BlockOp]) -> None:
        now_ns = time.monotonic_ns()
        self._latency_of[priority].observe_all([now_ns - op.submitted_ns for op in ops])
        # Raw blocks move what they hold; only an encoded block turns out smaller.
        saved_bytes = sum([op.held_bytes - op.moved_bytes for op in ops if op.codec != RAW])
        moved_bytes = sum([op.held_bytes for op in ops]) - saved_bytes
        calls = sum([run.calls for run in runs])
        if reads:
            self.reads += len(ops)
            self.read_bytes += moved_bytes
            self.read_calls += calls
        else:
            self.writes += len(ops)
            self.written_bytes += moved_bytes
            self.write_calls += calls
        name = "read_call" if reads else "write_call"
        self.latency[name].observe_all([run.io_ns for run in runs if run.calls])
        self.call_bytes[name].observe_all([run.io_bytes for run in runs if run.calls])

    def _pass_on(self, ops: Sequence[AnyOp]) -> None:
        """Pass operations that have ended to their `done`."""
        self.in_flight -= len(ops)
        self.in_flight_bytes -= sum([op.held_bytes for op in ops])
        for done, ended in by_done(ops):
            try:
                done(ended)
            except Exception:
                log.exception("the owner of a disk operation failed to take it back")

    def _has_run(self, op: AnyOp) -> bool:
        """Count an outcome that may be no good one; whether the disk has dealt with the operation."""
        outcome = op.outcome
        if outcome is DiskOutcome.IO_ERROR:
            self.errors[op.errno] = self.errors.get(op.errno, 0) + 1
        self.cancelled += outcome is DiskOutcome.CANCELLED
        self.abandoned += outcome is DiskOutcome.ABANDONED
        self.checksum_failures += outcome is DiskOutcome.CORRUPT
        self.other_key_blocks += outcome is DiskOutcome.OTHER_KEY
        return outcome is not DiskOutcome.CANCELLED and outcome is not DiskOutcome.ABANDONED
