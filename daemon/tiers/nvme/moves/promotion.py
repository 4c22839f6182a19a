"""Promotion, NVMe to DRAM: blocks are read into frames and published in order, as if a client had stored them.

A promotion reserves frames like any writer, some at a time, so blocks that are already being promoted or stored are
shared, not read twice; it commits each block when its bytes have arrived and passed their checksum. Leases that wait
for them grow as they arrive. What a lease waits for in one namespace is a job of the directory that has the chain; of a
window each directory has a job for its part.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import PINS, Steps
from tiercache.daemon.tiers.dram.growing_leases import GrowingLeases
from tiercache.daemon.tiers.dram.growing_run import GrowingRun
from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.writes import Writes
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, ReadOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.placement import ShelfPlacement
from tiercache.daemon.tiers.nvme.shelf import Shelf
from tiercache.protocol.messages import INSTANCE_BYTES, KEY_BYTES, OFFSET_MASK, REGION_SHIFT, BlockState

MAX_IN_FLIGHT_BYTES = 256 << 20
"""Per directory, so that one hung disk affects one disk only."""
MAX_IN_FLIGHT = 1536
"""Reads of one directory; below its queue's limit, since a refused read ends its job."""
BATCH = 32
BATCHES_AT_ONCE = 4
"""Batches of blocks requested from one directory before the loop serves others: about 1 ms."""
GROW_NS = 1_000_000
"""Leases grow, or jobs are checked again, for so long in one go of the event loop; the step in progress is finished."""
LOOK_AGAIN_S = 0.1
"""How often jobs that wait for others' blocks are checked if nothing has arrived."""
MAX_UNREADABLE = 4096
"""Unreadable blocks that are remembered, until they fail again."""


class _Job:
    """Blocks `numbers` of one namespace, which a lease wants from one directory; those before `next` were requested."""

    __slots__ = (
        "asking",
        "lease",
        "namespace",
        "next",
        "numbers",
        "over",
        "priority",
        "reading",
        "run",
        "shelf",
        "writing",
    )

    def __init__(self, lease: ReadLease, run: GrowingRun, shelf: Shelf, numbers: Sequence[int]) -> None:
        self.lease = lease
        self.run = run
        self.namespace = run.namespace
        self.shelf = shelf
        self.numbers = numbers
        self.next = 0
        self.reading = 0
        self.writing: list[int] = []  # its write leases, ended ones included
        self.asking = True
        self.over = False
        self.priority = DiskPriority.LOAD if lease.holders else DiskPriority.PREFETCH

    def give_up(self) -> None:
        """Request no more blocks: those that follow cannot arrive, or are useless alone."""
        self.next = len(self.numbers)

    def awaited(self) -> Iterator[bytes]:
        """Keys of which one must arrive next, from any source."""
        run = self.run
        if run.complete:
            return iter(())
        return map(run.key, self.numbers if self.namespace.table.windowed else (run.end,))


class _Read(NamedTuple):
    """One block being read into a frame."""

    job: _Job
    write_lease: int
    number: int
    key: bytes
    slot: int
    entry: int


class Promotion:
    """Event loop only; never blocks."""

    def __init__(
        self,
        growing: GrowingLeases,
        writes: Writes,
        events: Events | None,
        regions: dict[int, Region],
        placement: ShelfPlacement,
    ) -> None:
        self.promoted_blocks = 0
        self.promoted_bytes = 0
        self.bad_blocks = 0
        self.failed_reads = 0
        self._growing = growing
        self._writes = writes
        self._events = events
        self._regions = regions
        self._placement = placement
        self._owner = Owner(bytes(INSTANCE_BYTES), internal=True)
        self._jobs: dict[Shelf, tuple[deque[_Job], deque[_Job]]] = {}  # for waiting clients, and for prefetches
        self._read_bytes: dict[Shelf, int] = {}  # in progress
        self._reads: dict[Shelf, int] = {}  # in progress
        self._reading: dict[Shelf, set[_Job]] = {}  # jobs with reads in progress
        self._unreadable: dict[tuple[int, bytes], None] = {}  # blocks that the disk failed to read, once
        self._look_again_s = 0.0
        self._planning: deque[Steps[None]] = deque()
        self._of_lease: dict[int, int] = {}  # number of unfinished jobs, by lease
        self._waiting: set[_Job] = set()
        self._again: deque[_Job] = deque()  # jobs to check again
        self._landed = False
        self._to_grow: deque[ReadLease] = deque()  # leases not yet told of arrived blocks

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._of_lease or self._planning)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the reads in progress."""
        return sum(self._read_bytes.values())

    def start(self, lease: ReadLease) -> None:
        """Promote what `lease` wants; a lease without holders is a prefetch, and comes last."""
        self._planning.append(self._plan(lease))
        self.pump()

    def _plan(self, lease: ReadLease) -> Steps[None]:
        """Find out which directory has which part: of wide windows in slices."""
        jobs: list[_Job] = []
        for run in list(lease.runs):
            if not run.complete:
                jobs += yield from self._jobs_for(lease, run)
        if lease.over or lease.lease_id not in self._growing.leases:
            return
        jobs = [job for job in jobs if not job.shelf.offline]
        if not jobs:  # the blocks are gone
            self._growing.stop(lease)
            return
        self._of_lease[lease.lease_id] = len(jobs)
        for job in jobs:
            queues = self._jobs.setdefault(job.shelf, (deque(), deque()))
            queues[0 if lease.holders else 1].append(job)

    def _jobs_for(self, lease: ReadLease, run: GrowingRun) -> Steps[list[_Job]]:
        """Jobs, by directory, for the part of a run that is not in DRAM."""
        if not run.namespace.table.windowed:
            shelf, _ = self._placement.find(run.namespace, lease.keys, lease.target)
            return [] if shelf is None else [_Job(lease, run, shelf, range(run.end, lease.target))]
        parts: dict[Shelf, list[int]] = {}
        for looked, number in enumerate(sorted(run.missing), 1):
            shelf = self._placement.with_block(run.namespace, run.key(number), to_read=True)
            if shelf is not None:
                parts.setdefault(shelf, []).append(number)
            if not looked % PINS:
                yield
        return [_Job(lease, run, shelf, numbers) for shelf, numbers in parts.items()]

    def pump(self) -> bool:
        """Start reads, those that clients wait for first; True when it stopped to let others run."""
        if self._planning:
            steps = self._planning.popleft()
            if next(steps, self) is not self:
                self._planning.append(steps)
        more = bool(self._planning)
        for shelf, queues in self._jobs.items():
            batches = 0
            for queue in queues:
                while queue and batches < BATCHES_AT_ONCE and self._has_room(shelf):
                    batches += 1
                    job = queue.popleft()
                    if self._read_batch(job):
                        queue.append(job)  # in turn with the others
                    else:
                        job.asking = False
                        self._settle(job)
            more = more or batches == BATCHES_AT_ONCE
        return more

    def _has_room(self, shelf: Shelf) -> bool:
        return self._read_bytes.get(shelf, 0) < MAX_IN_FLIGHT_BYTES and self._reads.get(shelf, 0) < MAX_IN_FLIGHT

    def give_up(self, shelf: Shelf) -> None:
        """The disk hangs: stop waiting for it. Its frames belong to the kernel until that releases them."""
        shelf.queue.cancel_queued()
        queues = self._jobs.pop(shelf, (deque(), deque()))
        for job in {*queues[0], *queues[1], *self._reading.pop(shelf, ())}:
            for write_lease in job.writing:
                self._writes.abort(self._owner, write_lease, finished=False)
            job.give_up()
            job.asking = False
            self._end(job)

    def _read_batch(self, job: _Job) -> bool:
        """Request the next blocks; False when those were the last, or no more can arrive."""
        lease, numbers = job.lease, job.numbers[job.next : job.next + BATCH]
        if lease.over or not numbers:
            return False
        keys, count = b"".join(map(job.run.key, numbers)), len(numbers)
        parent = job.run.key(numbers[0] - 1) if numbers[0] else b""
        events = self._events
        named = None if events is None else events.known(job.namespace.number, keys).__getitem__
        got = self._writes.reserve(self._owner, job.namespace, parent, keys, math.inf, named)
        if got.parent_missing:
            return False
        if got.frames:
            job.writing.append(got.lease_id)
        ops, frames = [], iter(got.frames)
        for number, state in enumerate(got.states):
            if state is BlockState.FRAME:
                key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
                op = self._read(job, got.lease_id, number, key, next(frames))
                if op is None:  # evicted since the match, with all that follows it
                    self._give_up(got.lease_id, range(number, count))
                    break
                ops.append(op)
        for op in ops[job.shelf.queue.submit_many(ops, job.priority) :]:
            op.outcome = DiskOutcome.CANCELLED
            op.done(op)
        job.next += count
        return BlockState.NONE not in got.states and len(ops) == got.states.count(BlockState.FRAME)

    def _give_up(self, write_lease: int, numbers: range) -> None:
        """These blocks of a batch will not be read."""
        for number in numbers:
            self._writes.fail(self._owner, write_lease, number)

    def _read(self, job: _Job, write_lease: int, number: int, key: bytes, frame: int) -> ReadOp | None:
        """The operation that fills one frame, with its slot held; None when the block is not here."""
        shelf, spec = job.shelf, job.namespace.spec
        stored = shelf.find(job.namespace, key)
        if stored is None:
            return None
        read = _Read(job, write_lease, number, key, stored.slot, stored.entry)
        # The pinned entry keeps its slot; slot and frame belong to the kernel until the read ends.
        shelf.index.touch(stored.entry)
        shelf.index.pin(stored.entry)
        shelf.allocator.hold(stored.slot)
        job.reading += 1
        self._reading.setdefault(shelf, set()).add(job)
        self._reads[shelf] = self._reads.get(shelf, 0) + 1
        self._read_bytes[shelf] = self._read_bytes.get(shelf, 0) + job.namespace.size_class.frame_bytes
        region = self._regions[frame >> REGION_SHIFT]
        return ReadOp(
            done=lambda op: self._done(read, op),
            slot=stored.slot,
            address=region.address + (frame & OFFSET_MASK),
            length=spec.block_bytes,
            key=key,
            fingerprint=job.namespace.fingerprint,
            stored_length=stored.stored_length,
            checksum=stored.checksum,
            codec=stored.codec,
            kind=stored.kind,
        )

    def _done(self, read: _Read, op: ReadOp) -> None:
        job = read.job
        job.reading -= 1
        self._reads[job.shelf] -= 1
        self._read_bytes[job.shelf] -= job.namespace.size_class.frame_bytes
        if not job.reading:
            self._reading.get(job.shelf, set()).discard(job)
        if job.shelf.retired and not self._reads[job.shelf]:
            del self._reads[job.shelf], self._read_bytes[job.shelf]
        if op.outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still write to the frame
        job.shelf.allocator.unhold(read.slot)
        job.shelf.index.unpin(read.entry)
        if op.outcome is DiskOutcome.OK:
            self.promoted_blocks += 1
            self.promoted_bytes += op.stored_length
            self._unreadable.pop((job.namespace.number, read.key), None)
            self._writes.commit(self._owner, read.write_lease, [read.number])
        else:
            self._failed(read, op)
        self._landed = True
        self._settle(job)

    def _failed(self, read: _Read, op: ReadOp) -> None:
        """A bad block is dropped, with all that follows it; an unreadable block gets a second chance."""
        self._writes.fail(self._owner, read.write_lease, read.number)
        read.job.give_up()
        name = read.job.namespace.number, read.key
        if op.outcome is DiskOutcome.CORRUPT:
            self.bad_blocks += 1
            read.job.shelf.drop_damaged(read.job.namespace, read.key)
        elif op.outcome is DiskOutcome.OTHER_KEY:
            read.job.shelf.drop(read.job.namespace, read.key)
        elif op.outcome is DiskOutcome.IO_ERROR:
            self.failed_reads += 1
            if name in self._unreadable:  # else it would be found, and missed, for ever
                del self._unreadable[name]
                read.job.shelf.drop(read.job.namespace, read.key)
            else:
                if len(self._unreadable) >= MAX_UNREADABLE:
                    del self._unreadable[next(iter(self._unreadable))]
                self._unreadable[name] = None

    def _settle(self, job: _Job) -> None:
        """End a job without reads in progress, unless others are promoting what it waits for."""
        if job.asking or job.reading or job.over:
            return
        lease = job.lease
        if not lease.over:
            self._growing.grow(lease)
            pending = self._writes.pending.by_key
            if any((job.namespace.number, key) in pending for key in job.awaited()):
                self._waiting.add(job)
                return
        self._end(job)

    def _end(self, job: _Job) -> None:
        if job.over:
            return
        lease, job.over = job.lease, True
        self._waiting.discard(job)
        self._landed = True
        self._of_lease[lease.lease_id] -= 1
        if self._of_lease[lease.lease_id] == 0:
            del self._of_lease[lease.lease_id]
            if not lease.over:
                self._growing.stop(lease)

    def look_again(self) -> None:
        """Check a slice of the jobs that wait for others, if there can be news for them."""
        if not self._again:
            now_s = time.monotonic()
            if not self._waiting or not (self._landed or now_s >= self._look_again_s):
                return
            self._look_again_s = now_s + LOOK_AGAIN_S
            self._again.extend(self._waiting)
        until_ns = time.perf_counter_ns() + GROW_NS
        while self._again:
            job = self._again.popleft()
            if job in self._waiting:
                self._settle(job)
            if time.perf_counter_ns() >= until_ns:
                return

    def note_published(self) -> None:
        """A block has become visible in DRAM, from any source: some lease may grow by it."""
        self._landed = self._landed or bool(self._growing.leases)

    def take_landed(self) -> bool:
        """Let leases grow by the blocks that have arrived, a slice of them; True if any has."""
        if not self._to_grow:
            if not self._landed:
                return False
            self._landed = False
            self._to_grow.extend(self._growing.leases.values())
        until_ns = time.perf_counter_ns() + GROW_NS
        while self._to_grow:
            lease = self._to_grow.popleft()
            if lease.lease_id in self._growing.leases:
                self._growing.grow(lease)
            if time.perf_counter_ns() >= until_ns:
                break
        return True

    @property
    def has_landed(self) -> bool:
        """Whether `take_landed` or `look_again` has something to do."""
        return self._landed or bool(self._to_grow or self._again)
