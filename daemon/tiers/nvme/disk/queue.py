"""The I/O queue of one directory: threads that move blocks between frames and slots.

    loop ─ submit ─► [LOAD] [PREFETCH] [WRITE] ─► workers ─► completed ─► deliver on the loop ─► op.done(op)
                      bounded queues          one run each     one wake-up per batch

Every accepted operation is passed to its `done` exactly once, on the event loop. Until then the kernel may be accessing
its frame and slot, so the owner keeps both, whatever happens to leases meanwhile. Loads come before prefetches, these
before writes; blocks in adjoining slots share a system call.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice

from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.disk.block_io import AnyOp, BlockMover, DiskOutcome, ReadOp, TaskOp, WriteOp, adjoins
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.ground.histograms import POWERS_OF_TWO, Histogram, LatencyHistogram

__all__ = ["DiskOutcome", "DiskPriority", "DiskQueue", "ReadOp", "TaskOp", "WriteOp"]

log = logging.getLogger("tiercache.daemon")

MAX_RUN_OPS = 16
MAX_RUN_BYTES = 2 << 20
"""A run is one system call: larger ones gain nothing and delay others."""
DELIVER_BATCH = 64
DELIVER_NS = 1_000_000
"""Completions handled in one go of the loop: so many, or for so long plus the one in progress."""
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
_IDLE_LOOK_S = 60.0


class DiskPriority(IntEnum):
    """Selects the queue; lower goes first."""

    LOAD = 0
    PREFETCH = 1
    WRITE = 2


QUEUE_LIMITS = {DiskPriority.LOAD: 8192, DiskPriority.PREFETCH: 2048, DiskPriority.WRITE: 2048}
"""Operations that may wait, by priority."""


class DiskQueue:
    """Worker threads and queues of one directory, so that one hung disk affects one disk only.

    All methods are for the event loop's thread, and none blocks except `stop`.

    Args:
        directory: an open one; it must stay open until `stop` has returned.
        announce: arranges for a callable to be called on the loop (`loop.call_soon_threadsafe`);
            called from the workers, at most once per batch of completions.
        again: the same from the loop itself (`loop.call_soon`), which costs no wake-up.
        threads: 8 for throughput, 4 for the latency of single blocks.
        limits: operations that may wait, by priority.
    """

    def __init__(
        self,
        directory: Directory,
        announce: Callable[[Callable[[], None]], object],
        threads: int = 8,
        limits: dict[DiskPriority, int] | None = None,
        again: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.directory = directory
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
        self._announce = announce
        self._again = again or announce
        self._limits = {**QUEUE_LIMITS, **(limits or {})}
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._waiting: tuple[deque[AnyOp], ...] = (deque(), deque(), deque())
        self._runs: list[Sequence[AnyOp]] = [()] * threads  # the run of each worker
        self._started_s = [0.0] * threads
        self._busy = self._writing = 0
        self._stopping = self._gave_up = False
        # Keeps a worker free for a load that arrives amid writes.
        self._max_writing = max(1, threads - 1)
        # Not guarded: appends and pops of a deque are atomic.
        self._completed: deque[AnyOp] = deque()
        self._announced = False
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"disk-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- the loop's side -------------------------------------------------------------------------

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        """Accept one operation, or False when that queue is full or the queue is stopping."""
        return self.submit_many([op], priority) == 1

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        """Accept as many of `ops`, in order, as there is room for; returns how many.

        An operation is submitted once. Blocks in adjoining slots should come together and in order: they share system
        calls.
        """
        with self._changed:
            waiting = self._waiting[priority]
            room = 0 if self._stopping else max(0, self._limits[priority] - len(waiting))
            accepted = list(islice(ops, room))
            for op in accepted:
                _check(op)
            now_ns, pending = time.monotonic_ns(), DiskOutcome.PENDING
            for op in accepted:
                op.submitted_ns, op.priority, op.outcome = now_ns, priority, pending
                op.held_bytes = op.moved_bytes
                self.in_flight_bytes += op.held_bytes
            self.in_flight += len(accepted)
            waiting.extend(accepted)
            self._changed.notify(len(accepted))
        self.refused += len(ops) - len(accepted)
        return len(accepted)

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        """End everything that has not started (of one priority, or of all) as CANCELLED; returns how many.

        Their `done` is called soon, not in here. For a disk that went offline.
        """
        cancelled: list[AnyOp] = []
        with self._changed:
            for number, waiting in enumerate(self._waiting):
                if priority is None or number == priority:
                    cancelled += waiting
                    waiting.clear()
        for op in cancelled:
            op.outcome = DiskOutcome.CANCELLED
        self._completed.extend(cancelled)
        self._announce_completed()
        return len(cancelled)

    def queued(self, priority: DiskPriority | None = None) -> int:
        """Operations that wait for a worker."""
        if priority is not None:
            return len(self._waiting[priority])
        return sum(map(len, self._waiting))

    def oldest_age_s(self) -> float:
        """How long the longest-running operation has been with its worker; 0 when all are idle.

        Waiting operations do not count: a backlog is no fault of the disk.
        """
        started_s = [start_s for start_s in self._started_s if start_s]
        return time.monotonic() - min(started_s) if started_s else 0.0

    def deliver(self) -> None:
        """Pass completed operations to their `done`. Called through `announce` and `again`."""
        until_ns = time.perf_counter_ns() + DELIVER_NS
        for _ in range(min(DELIVER_BATCH, len(self._completed))):
            self._deliver_one(self._completed.popleft())
            if time.perf_counter_ns() >= until_ns:
                break
        if self._completed:
            self._again(self.deliver)  # still announced: completions meanwhile need no wake-up
            return
        self._announced = False
        self._announce_completed()  # for what has completed since the last look

    def _deliver_one(self, op: AnyOp) -> None:
        self.in_flight -= 1
        self.in_flight_bytes -= op.held_bytes
        self._count(op)
        try:
            op.done(op)
        except Exception:
            log.exception("the owner of a disk operation failed to take it back")

    def stats(self) -> dict[str, object]:
        """All counts so far, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in (*COUNTERS, "in_flight", "in_flight_bytes")},
            "queued": self.queued(),
            "waiting": {priority.name.lower(): self.queued(priority) for priority in DiskPriority},
            "oldest_age_s": self.oldest_age_s(),
            "errors": {str(number): count for number, count in self.errors.items()},
            "latency": {name: histogram.snapshot() for name, histogram in self.latency.items()},
        }

    def _count(self, op: AnyOp) -> None:
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

    # --- stopping --------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """Accept nothing more and cancel what waits; running operations are finished. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.cancel_queued()

    def stop(self, deadline_s: float) -> bool:
        """Stop, wait for running operations until `deadline_s` (time.monotonic()), and pass all to their `done`.

        Blocks. Returns False when something was still in the kernel at the deadline; that is passed to its `done` as
        ABANDONED, and the directory must stay open. May be called again to go on waiting.
        """
        self.begin_stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            self._gave_up = True
            left = [op for run in self._runs for op in run]
            self._runs = [()] * len(self._threads)
        for op in left:
            op.outcome = DiskOutcome.ABANDONED
        self._completed.extend(left)
        while self._completed:
            self._deliver_one(self._completed.popleft())
        return not any(thread.is_alive() for thread in self._threads)

    # --- the workers' side -----------------------------------------------------------------------

    def _work(self, number: int) -> None:
        mover = BlockMover(self.directory)
        while run := self._take(number):
            _carry_out(mover, run)
            with self._changed:
                if self._gave_up:
                    return
                self._runs[number], self._started_s[number] = (), 0.0
                self._busy -= 1
                self._writing -= run[0].priority == DiskPriority.WRITE
                self._completed.extend(run)
            self._announce_completed()

    def _take(self, number: int) -> Sequence[AnyOp]:
        """The next run for a worker, waiting for one; empty when the queue stops."""
        with self._changed:
            while True:
                for priority, waiting in enumerate(self._waiting):
                    if waiting and not (priority == DiskPriority.WRITE and self._writing >= self._max_writing):
                        run = self._pop_run(priority, waiting)
                        self._runs[number], self._started_s[number] = run, time.monotonic()
                        self._busy += 1
                        self._writing += priority == DiskPriority.WRITE
                        return run
                if self._stopping:
                    return ()
                self._changed.wait(_IDLE_LOOK_S)

    def _pop_run(self, priority: int, waiting: deque[AnyOp]) -> list[AnyOp]:
        """As many operations from the head as fit one system call."""
        most = MAX_RUN_OPS
        if priority == DiskPriority.LOAD:
            # Clients wait for these: no worker takes more than its share while others are idle.
            most = min(most, -(-len(waiting) // (len(self._threads) - self._busy)))
        run = [waiting.popleft()]
        size = run[0].moved_bytes
        while waiting and len(run) < most and adjoins(run[-1], waiting[0]):
            size += waiting[0].moved_bytes
            if size > MAX_RUN_BYTES:
                break
            run.append(waiting.popleft())
        return run

    def _announce_completed(self) -> None:
        if self._completed and not self._announced:
            self._wake()

    def _wake(self) -> None:
        # Set before the call: a thread that sees it set knows that a `deliver` is still to come.
        self._announced = True
        self._announce(self.deliver)


def _check(op: AnyOp) -> None:
    if not isinstance(op, TaskOp):
        assert op.length > 0, "blocks of no bytes are refused long before"
        assert op.slot % PAGE_BYTES == 0, "slots are 4096-aligned"
        assert op.address % PAGE_BYTES == 0, "frames are 4096-aligned"


def _carry_out(mover: BlockMover, run: Sequence[AnyOp]) -> None:
    """Give every operation of a run its outcome. Raises nothing: a worker survives any of them."""
    wanted = [op for op in run if not op.unwanted]
    try:
        if len(wanted) == len(run):
            mover.run(run)
        else:  # the rest need not adjoin
            for op in wanted:
                mover.run([op])
    except Exception:
        log.exception("a disk worker met something unforeseen")
    for op in run:
        if op.outcome is DiskOutcome.PENDING:
            op.outcome = DiskOutcome.CANCELLED if op.unwanted else DiskOutcome.IO_ERROR
            op.errno = 0 if op.unwanted else errno.EIO
