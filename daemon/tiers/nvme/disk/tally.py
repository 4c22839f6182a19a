"""Counts and histograms of a directory's operations, whoever carries them out."""

from __future__ import annotations

import time

from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.disk.block_io import AnyOp, DiskOutcome, ReadOp, TaskOp
from tiercache.daemon.tiers.nvme.disk.queue import COUNTERS, LATENCIES, DiskPriority
from tiercache.ground.histograms import POWERS_OF_TWO, Histogram, LatencyHistogram


class Tally:
    """What a queue of operations counts; event loop only."""

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
        """From submit to done by priority, and time inside the system calls of one run."""
        self.call_bytes = {"read_call": Histogram(POWERS_OF_TWO), "write_call": Histogram(POWERS_OF_TWO)}
        """Bytes moved by the system calls of one run."""
        self._latency_of = [self.latency[priority.name.lower()] for priority in DiskPriority]

    def _count(self, op: AnyOp) -> None:
        """An operation has ended."""
        outcome = op.outcome
        if outcome is DiskOutcome.CANCELLED:
            self.cancelled += 1
            return
        if outcome is DiskOutcome.ABANDONED:
            self.abandoned += 1
            return
        if outcome is DiskOutcome.IO_ERROR:
            self.errors[op.errno] = self.errors.get(op.errno, 0) + 1
        if isinstance(op, TaskOp):
            return
        self._latency_of[op.priority].observe(time.monotonic_ns() - op.submitted_ns)
        # Raw blocks move what they hold; only an encoded block turns out smaller.
        moved_bytes = op.held_bytes if op.codec == RAW else op.moved_bytes
        if isinstance(op, ReadOp):
            self.reads += 1
            self.read_bytes += moved_bytes
            self.read_calls += op.calls
            self.checksum_failures += outcome is DiskOutcome.CORRUPT
            self.other_key_blocks += outcome is DiskOutcome.OTHER_KEY
        else:
            self.writes += 1
            self.written_bytes += moved_bytes
            self.write_calls += op.calls
        if op.calls:
            kind = "read_call" if isinstance(op, ReadOp) else "write_call"
            self.latency[kind].observe(op.io_ns)
            self.call_bytes[kind].observe(op.io_bytes)

    def _counts(self) -> dict[str, object]:
        """All counts so far, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in (*COUNTERS, "in_flight", "in_flight_bytes")},
            "errors": {str(number): count for number, count in self.errors.items()},
            "latency": {name: histogram.snapshot() for name, histogram in self.latency.items()},
        }
