"""The I/O queue of one directory: bounded queues, a carrier that moves blocks, and the way back to the loop.

    loop ─ submit ─► [LOAD] [PREFETCH] [WRITE] ─► carrier ─► completed ─► deliver on the loop ─► done
                      backlog: bounded queues     parts       by the batch, one wake-up

Every accepted operation is passed to its `done` exactly once, on the event loop. Until then the kernel may be accessing
its frame and slot, so the owner keeps both, whatever happens to leases meanwhile. Tasks, which may block for long, have
a thread of their own: segments are made and removed one at a time, and hold up no block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from .backlog import MAX_PART_BLOCKS, MAX_PART_BYTES, Backlog, DiskPriority, Part
from .block_io import AnyOp, BlocksOp, DiskOutcome, ReadOp, TaskOp, WriteOp
from .carriers import AIO_DEPTH, THREADS, Carrier, start_carrier
from .directory import Directory
from .disk import PAGE_BYTES
from .tally import Tally
from .threads import ThreadCarrier

__all__ = ["DiskOutcome", "DiskPriority", "DiskQueue", "ReadOp", "TaskOp", "WriteOp"]

DELIVER_BATCH = 64
DELIVER_NS = 1_000_000
"""Completions handled in one turn of the loop, about, and the time after which it ends with the few in progress."""
TIMED_OPS = 4
"""Completions between two looks at the clock."""
TELL_WITHIN_NS = 50_000_000
"""The loop is told of a write that ends so long after it was told last, and of all before it, although others wait. Not
sooner: a wake-up costs more than a block does, and nobody waits for a write. So where the disk hangs, the loop is told
of those that had just ended when it counts as offline."""
QUEUE_LIMITS = {DiskPriority.LOAD: 8192, DiskPriority.PREFETCH: 2048, DiskPriority.WRITE: 2048}
"""Blocks that may wait, by priority; of tasks one at a time is asked for."""


def most_together(frame_bytes: int) -> int:
    """How many blocks of that size one operation should have: those of one system call. They end together."""
    return max(1, min(MAX_PART_BLOCKS, MAX_PART_BYTES // frame_bytes))


class DiskQueue(Tally):
    """Queues and carrier of one directory, so that one hung disk affects one disk only.

    All methods are for the event loop's thread, and none blocks except `stop`.

    Args:
        directory: an open one; it must stay open until `stop` has returned.
        announce: arranges for a callable to be called on the loop (`loop.call_soon_threadsafe`);
            called from other threads, at most once per batch of completions.
        again: the same from the loop itself (`loop.call_soon`), which costs no wake-up.
        threads: parts under way at a time where threads carry them.
        depth: parts under way at a time where AIO does.
        limits: blocks that may wait, by priority.
        why_not_aio: in words, if threads must carry blocks; else AIO does where the directory has it.
    """

    def __init__(
        self,
        directory: Directory,
        announce: Callable[[Callable[[], None]], object],
        threads: int = THREADS,
        limits: dict[DiskPriority, int] | None = None,
        again: Callable[[Callable[[], None]], object] | None = None,
        depth: int = AIO_DEPTH,
        why_not_aio: str = "",
    ) -> None:
        self.directory = directory
        super().__init__()
        self._announce = announce
        self._again = again or announce
        self._limits = {**QUEUE_LIMITS, **(limits or {})}
        # Not guarded: appends and pops of a deque are atomic.
        self._completed: deque[AnyOp] = deque()
        self._announced = False
        self._untold, self._told_ns = 0, 0  # writes that have ended; guarded by the backlog of blocks
        self._blocks, self._carrier, self.io_reason = start_carrier(
            directory, self._finished, why_not_aio, threads, depth
        )
        self.io = self._carrier.name
        """What carries blocks: aio or threads. `io_reason` says why it is not aio."""
        self._tasks = Backlog(1)
        self._task_carrier = ThreadCarrier(self._tasks, directory, self._finished)

    # --- the loop's side -------------------------------------------------------------------------

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        """Accept one operation, or False when that queue is full or the queue is stopping."""
        return self.submit_many([op], priority) == 1

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        """Accept as many of `ops`, in order, as there is room for; returns how many.

        An operation is submitted once. All are blocks or all are tasks. Blocks in adjoining slots should be neighbours
        in an operation: they share system calls.
        """
        tasks = bool(ops) and isinstance(ops[0], TaskOp)
        backlog, carrier = (self._tasks, self._task_carrier) if tasks else (self._blocks, self._carrier)
        _check(ops, tasks)
        with backlog.changed:
            room = 0 if backlog.stopping else self._limits[priority] - backlog.blocks[priority]
            accepted, now_ns, held_bytes = list[AnyOp](), time.monotonic_ns(), 0
            for op in ops:
                room -= op.count
                if room < 0:
                    break
                op.submitted_ns, op.priority, op.begun, op.ended = now_ns, priority, 0, 0
                op.held_bytes = op.moved_bytes
                held_bytes += op.held_bytes
                accepted.append(op)
            self.in_flight_bytes += held_bytes
            if accepted:
                self.in_flight += sum([op.count for op in accepted])
                carrier.wake(backlog.add(accepted, priority))
        self.refused += sum([op.count for op in ops[len(accepted) :]])
        return len(accepted)

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        """End all blocks that have not started (of one priority, or of all) as CANCELLED; returns how many.

        Their `done` is called soon, not in here. For a disk that went offline.
        """
        cancelled = 0
        for backlog in (self._blocks, self._tasks):
            with backlog.changed:
                blocks, over = backlog.cancel(priority)
                self._completed.extend(over)
            cancelled += blocks
        self._announce_completed()
        return cancelled

    def queued(self, priority: DiskPriority | None = None) -> int:
        """Blocks and tasks that wait for the carrier."""
        blocks, tasks = self._blocks.blocks, self._tasks.blocks
        return sum(blocks) + sum(tasks) if priority is None else blocks[priority] + tasks[priority]

    def oldest_age_s(self) -> float:
        """How long the longest-running operation has been under way; 0 when there is none.

        Waiting operations do not count: a backlog is no fault of the disk.
        """
        started_s = [start_s for backlog in (self._blocks, self._tasks) if (start_s := backlog.oldest_s())]
        return time.monotonic() - min(started_s) if started_s else 0.0

    def deliver(self) -> None:
        """Pass completed operations to their `done`. Called through `announce` and `again`."""
        until_ns = time.perf_counter_ns() + DELIVER_NS
        handed = 0
        while handed < DELIVER_BATCH and (some := self._hand_over(TIMED_OPS)):
            handed += some
            if time.perf_counter_ns() >= until_ns:
                break
        if self._completed:
            self._again(self.deliver)  # still announced: completions meanwhile need no wake-up
            return
        self._announced = False
        self._announce_completed()  # for what has completed since the last look

    def _hand_over(self, most: int) -> int:
        """Pass at most that many completed operations to their `done`; returns how many there were."""
        completed = self._completed
        ops = [completed.popleft() for _ in range(min(most, len(completed)))]
        self._count(ops)
        self._pass_on(ops)
        return len(ops)

    def stats(self) -> dict[str, object]:
        """All counts so far, as plain numbers, and what carries blocks."""
        return {
            **self._counts(),
            "io": self.io,
            "io_reason": self.io_reason,
            "queued": self.queued(),
            "waiting": {priority.name.lower(): self.queued(priority) for priority in DiskPriority},
            "oldest_age_s": self.oldest_age_s(),
        }

    # --- stopping --------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """Accept nothing more and cancel what waits; running operations are finished. Idempotent."""
        self.cancel_queued()
        for backlog, carrier in self._parts():
            with backlog.changed:
                backlog.stopping = True
                carrier.wake(backlog.width)

    def stop(self, deadline_s: float) -> bool:
        """Stop, wait for running operations until `deadline_s` (time.monotonic()), and pass all to their `done`.

        Blocks. Returns False when something was still in the kernel at the deadline; that is passed to its `done` as
        ABANDONED, and the directory must stay open. May be called again to go on waiting.
        """
        self.begin_stop()
        ended = [carrier.join(deadline_s) for _, carrier in self._parts()]
        for backlog, _ in self._parts():
            with backlog.changed:
                left = backlog.abandon()
                self._completed.extend(left)
        while self._hand_over(DELIVER_BATCH):
            pass
        return all(ended)

    def _parts(self) -> tuple[tuple[Backlog, Carrier], ...]:
        return (self._blocks, self._carrier), (self._tasks, self._task_carrier)

    # --- the carriers' side ----------------------------------------------------------------------

    def _finished(self, parts: Sequence[Part]) -> None:
        """Take parts whose blocks have outcomes, from the thread of a carrier."""
        backlog = self._tasks if isinstance(parts[0].op, TaskOp) else self._blocks
        with backlog.changed:
            over = backlog.finish(parts)
            self._completed.extend(over)
            due = self._is_due(over)
        if due:
            self._announce_completed()

    def _is_due(self, over: Sequence[AnyOp]) -> bool:
        """True if the loop is to be told of these now. Needs `changed` of their backlog held.

        Of writes it is told once as many have ended as wait still: then there is room for as many again.
        """
        if not over or any(isinstance(op, TaskOp) or op.priority != DiskPriority.WRITE for op in over):
            return bool(over)
        self._untold += sum([op.count for op in over])
        now_ns = time.monotonic_ns()
        if self._untold < self._blocks.blocks[DiskPriority.WRITE] and now_ns - self._told_ns < TELL_WITHIN_NS:
            return False
        self._untold, self._told_ns = 0, now_ns
        return True

    def _announce_completed(self) -> None:
        if self._completed and not self._announced:
            # Set before the call: a thread that sees it set knows that a `deliver` is still to come.
            self._announced = True
            self._announce(self.deliver)


def _check(ops: Sequence[AnyOp], tasks: bool) -> None:
    blocks = [op for op in ops if isinstance(op, BlocksOp)]
    assert len(blocks) == (0 if tasks else len(ops)), "tasks and blocks come apart"
    for op in blocks:
        places = reduce(or_, op.slots) | reduce(or_, op.addresses)
        assert not places % PAGE_BYTES, "slots and frames are 4096-aligned"
        assert op.length > 0, "blocks of no bytes are refused long before"
