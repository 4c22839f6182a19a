"""Promotion, lower tiers to DRAM: fetches blocks into frames and publishes them in order, as if a client stored them.

A promotion reserves frames like any writer, some at a time, so blocks that are already being promoted or stored are
shared, not fetched twice; it commits each block when its bytes have arrived and were found right. Leases that wait for
them grow as they arrive. What a lease waits for in one namespace is a job for each source that has a part of it: of a
chain one job follows the other, and their fetches run side by side.

    chain    DRAM ────►│ job of an NVMe directory ────►│ job of the store ────►│ target
                        requests frames first            begins when the job before it has requested all of its own
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import Steps
from tiercache.protocol.messages import INSTANCE_BYTES, OFFSET_MASK, REGION_SHIFT, BlockState

from .growing_leases import GrowingLeases
from .growing_run import GrowingRun
from .leases import Owner, ReadLease
from .source import Fetch, FetchOutcome, FetchTally, Source, SourceTier
from .writes import Writes

MAX_IN_FLIGHT_BYTES = 256 << 20
"""Per source, so that one hung disk affects one disk only."""
MAX_IN_FLIGHT = 1536
"""Blocks being fetched from one source; below the limit of a disk's queue, since a refused fetch ends its job."""
BATCH = 32
BATCHES_AT_ONCE = 4
"""Batches of blocks requested from one source before the loop serves others: about 1 ms."""
GROW_NS = 1_000_000
"""Time for taking in blocks, growing leases, or checking jobs again, in one turn of the loop; the step in progress is
finished."""
TAKEN_AT_ONCE = 256
"""Blocks whose fetches have ended, taken in before the loop serves others."""
LOOK_AGAIN_S = 0.1
"""How often jobs that wait for others' blocks are checked if nothing has arrived."""


class _Job:
    """Blocks `numbers` of one namespace, which a lease wants from one source; those before `next` were requested.

    Of a chain, `after` is the job for the blocks before these: it requests its own first.
    """

    __slots__ = (
        "after",
        "arrived",
        "asking",
        "broken",
        "fetching",
        "lease",
        "namespace",
        "next",
        "numbers",
        "over",
        "run",
        "source",
        "urgent",
        "writing",
    )

    def __init__(
        self, lease: ReadLease, run: GrowingRun, source: Source, numbers: Sequence[int], after: _Job | None
    ) -> None:
        self.lease = lease
        self.run = run
        self.namespace = run.namespace
        self.source = source
        self.numbers = numbers
        self.after = after
        self.next = 0
        self.fetching = 0
        self.arrived = self.broken = 0  # blocks that it has fetched, and that the source said it has and has not
        self.writing: list[int] = []  # its write leases, ended ones included
        self.asking = True
        self.over = False
        self.urgent = bool(lease.holders)

    @property
    def waits(self) -> bool:
        """True if the blocks before its own have not all been requested."""
        return self.after is not None and self.after.asking

    def give_up(self) -> None:
        """Request no more blocks: those that follow cannot arrive, or are useless alone."""
        self.next = len(self.numbers)

    def awaited(self) -> Iterator[bytes]:
        """Keys of which one must arrive next, from any source."""
        run = self.run
        if run.complete:
            return iter(())
        return map(run.key, self.numbers if self.namespace.table.windowed else (run.end,))


class _Fetch(Fetch):
    """Blocks of a job, into the frames at `places` of a write lease."""

    __slots__ = ("job", "places", "write_lease")

    job: _Job
    places: list[int]
    write_lease: int


class Promotion:
    """Event loop only; never blocks. `tiers`: those below DRAM, the nearest first."""

    def __init__(
        self,
        growing: GrowingLeases,
        writes: Writes,
        events: Events | None,
        regions: dict[int, Region],
        tiers: Sequence[SourceTier],
        landed: Callable[[], None] = lambda: None,
        soon: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`landed()` is called after leases have grown by blocks that arrived; `soon()` asks for a `land`."""
        self.closed = False
        """Nothing more is begun or landed: the daemon ends."""
        self.committing: Source | None = None
        """The source of the blocks that are being committed; what waited for them is published with them."""
        self._growing = growing
        self._writes = writes
        self._events = events
        self._regions = regions
        self._tiers = tiers
        self._tell_landed = landed
        self._soon = soon
        self._clock_s = clock_s
        self._ended: deque[_Fetch] = deque()  # fetches that have ended, and are not taken in
        self._owner = Owner(bytes(INSTANCE_BYTES), internal=True)
        self._jobs: dict[Source, tuple[deque[_Job], deque[_Job]]] = {}  # for waiting clients, and for prefetches
        self._fetch_bytes: dict[Source, int] = {}  # in progress
        self._on_done = self._done
        self._fetches: dict[Source, int] = {}  # blocks in progress
        self._fetching: dict[Source, dict[_Job, None]] = {}  # jobs with fetches in progress
        self._look_again_s = 0.0
        self._planning: deque[Steps[None]] = deque()
        self._of_lease: dict[int, int] = {}  # number of unfinished jobs, by lease
        self._waiting: dict[_Job, None] = {}
        self._again: deque[_Job] = deque()  # jobs to check again
        self._given_up: deque[_Job] = deque()  # to be ended: their sources hang or are gone
        self._landed = False
        self._to_grow: deque[ReadLease] = deque()  # leases not yet told of arrived blocks

    # Three kinds of deferred work: True while there is more.

    def look(self) -> bool:
        """Check jobs that wait for others; `land` says whether there is more."""
        if not self.closed:
            self.look_again()
        return False

    def begin(self) -> bool:
        """Begin fetches."""
        return not self.closed and self.pump()

    def land(self) -> bool:
        """Take in what has arrived, and let leases grow by it."""
        self.take_in()
        if self.take_landed() and not self.closed:
            self._tell_landed()
        return not self.closed and (self.has_landed or self._growing.busy)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._of_lease or self._planning or self._ended)

    def in_flight_bytes(self, tally: FetchTally) -> int:
        """Bytes of the fetches in progress from the sources of one tier."""
        return sum(size for source, size in self._fetch_bytes.items() if source.tally is tally)

    def start(self, lease: ReadLease) -> None:
        """Promote what `lease` wants; a lease without holders is a prefetch, and comes last."""
        self._planning.append(self._plan(lease))
        self.pump()

    def _plan(self, lease: ReadLease) -> Steps[None]:
        """Find out which source has which part: of wide windows in slices."""
        jobs: list[_Job] = []
        for run in list(lease.runs):
            if not run.complete:
                jobs += yield from self._jobs_for(lease, run)
        if lease.lease_id not in self._growing.leases:
            return
        for job in jobs:
            job.asking = not job.source.offline  # those that follow a job that asks for nothing do not wait for it
        jobs = [job for job in jobs if job.asking]
        if not jobs:  # the blocks are gone
            self._growing.stop(lease)
            return
        self._of_lease[lease.lease_id] = len(jobs)
        for job in jobs:
            queues = self._jobs.setdefault(job.source, (deque(), deque()))
            queues[0 if job.urgent else 1].append(job)

    def _jobs_for(self, lease: ReadLease, run: GrowingRun) -> Steps[list[_Job]]:
        """Jobs, by source, for the part of a run that is not in DRAM."""
        windowed, jobs = run.namespace.table.windowed, list[_Job]()
        wanted: Sequence[int] = sorted(run.missing) if windowed else range(run.end, lease.target)
        for tier in self._tiers:
            parts, wanted = yield from tier.parts(run.namespace, lease.keys, wanted)
            for source, numbers in parts:
                jobs.append(_Job(lease, run, source, numbers, None if windowed or not jobs else jobs[-1]))
            if not wanted:
                break
        return jobs

    def pump(self) -> bool:
        """Begin fetches, those that clients wait for first; True when it stopped to let others run."""
        if self._planning:
            steps = self._planning.popleft()
            if next(steps, self) is not self:
                self._planning.append(steps)
        more = bool(self._planning)
        for source, queues in self._jobs.items():
            batches = 0
            for queue in queues:
                turns = len(queue)
                while queue and turns > 0 and batches < BATCHES_AT_ONCE and self._has_room(source):
                    job = queue.popleft()
                    if job.waits:
                        turns -= 1
                        queue.append(job)
                        continue
                    batches += 1
                    turns = len(queue) + 1
                    if self._fetch_batch(job):
                        queue.append(job)  # in turn with the others
                    else:
                        job.asking = False
                        more = more or bool(self._tiers[1:])  # one may wait for this
                        self._settle(job)
            more = more or batches == BATCHES_AT_ONCE
        return more

    def _has_room(self, source: Source) -> bool:
        if not source.trusted and self._fetching.get(source):
            return False
        return self._fetch_bytes.get(source, 0) < MAX_IN_FLIGHT_BYTES and self._fetches.get(source, 0) < MAX_IN_FLIGHT

    def give_up(self, source: Source) -> None:
        """The source hangs: stop waiting for it. Frames of its fetches are not reused before these have ended.

        Its jobs ask for nothing more; `look_again` ends them, some in each slice.
        """
        source.cancel()
        if not self._fetches.get(source):  # else those that end forget it, if it is gone for good
            self._fetches.pop(source, None)
            self._fetch_bytes.pop(source, None)
        queues = self._jobs.pop(source, (deque(), deque()))
        for job in dict.fromkeys([*queues[0], *queues[1], *self._fetching.pop(source, ())]):
            job.give_up()
            job.asking = False
            self._given_up.append(job)

    def _end_given_up(self) -> None:
        job = self._given_up.popleft()
        for write_lease in job.writing:
            self._writes.abort(self._owner, write_lease, finished=False)
        self._end(job)

    def _fetch_batch(self, job: _Job) -> bool:
        """Request the next blocks; False when those were the last, or no more can arrive."""
        lease, numbers = job.lease, _leading_run(job.numbers[job.next : job.next + BATCH])
        if lease.over or not numbers:
            return False
        keys, count = b"".join(job.run.keys(numbers)), len(numbers)
        parent = job.run.key(numbers[0] - 1) if numbers[0] else b""
        events = self._events
        named = None if events is None else events.known(job.namespace.number, keys).__getitem__
        got = self._writes.reserve(self._owner, job.namespace, parent, keys, math.inf, named)
        if got.parent_missing:
            return False
        if got.frames:
            job.writing.append(got.lease_id)
        source, places = job.source, [place for place, state in enumerate(got.states) if state is BlockState.FRAME]
        fetches = self._prepare(job, got.lease_id, places, [numbers[place] for place in places], got.frames)
        began = sum([len(fetch.places) for fetch in fetches])
        if began < len(places):  # evicted since the match, with all that follows it
            self._give_up(got.lease_id, range(places[began], count))
        if fetches:
            job.fetching += began
            self._fetching.setdefault(source, {})[job] = None
            self._fetches[source] = self._fetches.get(source, 0) + began
            fetch_bytes = began * job.namespace.size_class.frame_bytes
            self._fetch_bytes[source] = self._fetch_bytes.get(source, 0) + fetch_bytes
        job.next += count
        all_began = (not fetches or source.fetch(fetches)) and began == len(places)
        return BlockState.NONE not in got.states and all_began and job.next < len(job.numbers)

    def _give_up(self, write_lease: int, numbers: range) -> None:
        """These blocks of a batch will not be fetched."""
        for number in numbers:
            self._writes.fail(self._owner, write_lease, number)

    def _prepare(
        self, job: _Job, write_lease: int, places: list[int], numbers: Sequence[int], frames: Sequence[int]
    ) -> list[_Fetch]:
        """The fetches that fill the frames at `places` of a write lease with blocks `numbers`, up to one not there.

        A frame belongs to whatever writes to it until its fetch has ended.
        """
        regions, fetches = self._regions, list[_Fetch]()
        if not numbers:
            return fetches
        held, most = job.source.hold(job.namespace, job.lease.keys, numbers), job.source.most_together(job.namespace)
        for first in range(0, len(held), most):
            end = min(first + most, len(held))
            addresses = [regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK) for frame in frames[first:end]]
            keys = job.run.keys(numbers[first:end])
            fetch = _Fetch(job.namespace, keys, addresses, job.urgent, held[first:end], self._on_done)
            fetch.job, fetch.write_lease, fetch.places = job, write_lease, places[first:end]
            fetches.append(fetch)
        return fetches

    def _done(self, fetch: _Fetch) -> None:
        """A fetch has ended: `take_in` sees to it, with those that end at the same time."""
        source, blocks = fetch.job.source, len(fetch.places)
        self._fetches[source] -= blocks
        self._fetch_bytes[source] -= blocks * fetch.namespace.size_class.frame_bytes
        if source.retired and not self._fetches[source]:
            del self._fetches[source], self._fetch_bytes[source]
        self._ended.append(fetch)
        self._soon()

    def take_in(self) -> None:
        """Commit a slice of the blocks that have arrived, those of one batch together; drop what did not."""
        ended, left, until_ns = self._ended, TAKEN_AT_ONCE, time.perf_counter_ns() + GROW_NS
        while ended and left > 0:
            fetch = ended.popleft()
            fetches = [fetch]
            while ended and ended[0].write_lease == fetch.write_lease and ended[0].job is fetch.job:
                fetches.append(ended.popleft())
            left -= self._take_in_batch(fetch.job, fetches)
            if time.perf_counter_ns() >= until_ns:
                break  # each job that ends lets all of its lease grow, which may have very many namespaces

    def _take_in_batch(self, job: _Job, fetches: Sequence[_Fetch]) -> int:
        """Fetches of one batch have ended, in this order; returns of how many blocks."""
        source, blocks = job.source, sum([len(fetch.places) for fetch in fetches])
        job.fetching -= blocks
        if not job.fetching:
            self._fetching.get(source, {}).pop(job, None)
        # Only at shutdown: something may still write to the frames of these.
        fetches = [fetch for fetch in fetches if FetchOutcome.ABANDONED not in fetch.outcomes]
        if not fetches:
            return blocks
        source.let_go(fetches)
        arrived = [place for fetch in fetches for place in _arrived(fetch)]
        if arrived:
            source.tally.blocks += len(arrived)
            job.arrived += len(arrived)
            source.kept_word(True)
            source.tally.stored_bytes += sum([fetch.stored_bytes for fetch in fetches])
            self.committing = source
            self._writes.complete(self._owner, fetches[0].write_lease, arrived)
            self.committing = None
        if len(arrived) < sum([len(fetch.places) for fetch in fetches]):
            for fetch in fetches:
                for number, outcome in enumerate(fetch.outcomes):
                    if outcome is not FetchOutcome.OK:
                        self._fail(job, fetch, number)
        self._landed = True
        self._settle(job)
        return blocks

    def _fail(self, job: _Job, fetch: _Fetch, number: int) -> None:
        """A block has not arrived, or is not the right one: drop it, and what hangs below it."""
        source, outcome = job.source, fetch.outcomes[number]
        self._writes.fail(self._owner, fetch.write_lease, fetch.places[number])
        job.give_up()
        source.tally.bad_blocks += outcome is FetchOutcome.CORRUPT
        source.tally.other_version += outcome is FetchOutcome.OTHER_VERSION
        source.tally.failed += outcome is FetchOutcome.FAILED
        job.broken += source.failed(fetch, number)

    def _settle(self, job: _Job) -> None:
        """Let the lease of a job without fetches in progress grow: between batches only that keeps what has arrived.

        End the job if it asks for nothing more, unless others are promoting what it waits for.
        """
        if job.fetching or job.over:
            return
        lease = job.lease
        if not lease.over:
            self._growing.grow(lease)
        if job.asking:
            return
        pending = self._writes.pending.by_key
        if not lease.over and any((job.namespace.number, key) in pending for key in job.awaited()):
            self._waiting[job] = None
        else:
            self._end(job)

    def _end(self, job: _Job) -> None:
        if job.over:
            return
        lease, job.over = job.lease, True
        if job.broken and not job.arrived:
            job.source.kept_word(False)
        self._waiting.pop(job, None)
        self._landed = True
        self._of_lease[lease.lease_id] -= 1
        if self._of_lease[lease.lease_id] == 0:
            del self._of_lease[lease.lease_id]
            if not lease.over:
                self._growing.stop(lease)

    def look_again(self) -> None:
        """End a slice of the jobs that were given up, then check those that wait for others, if there can be news."""
        until_ns = time.perf_counter_ns() + GROW_NS
        while self._given_up:
            self._end_given_up()
            if time.perf_counter_ns() >= until_ns:
                return
        if not self._again:
            now_s = self._clock_s()
            if not self._waiting or not (self._landed or now_s >= self._look_again_s):
                return
            self._look_again_s = now_s + LOOK_AGAIN_S
            self._again.extend(self._waiting)
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
        """True if `take_landed` or `look_again` has something to do."""
        return self._landed or bool(self._to_grow or self._again or self._given_up or self._ended)


def _arrived(fetch: _Fetch) -> list[int]:
    """Which blocks of a write lease a fetch has brought."""
    if fetch.outcomes.count(FetchOutcome.OK) == len(fetch.outcomes):
        return fetch.places
    return [place for place, outcome in zip(fetch.places, fetch.outcomes, strict=True) if outcome is FetchOutcome.OK]


def _leading_run(numbers: Sequence[int]) -> Sequence[int]:
    """The first of these ascending numbers, and those that follow it without a gap.

    A window may lack any of its blocks, but a store names the block before each of its own.
    """
    if numbers and numbers[-1] - numbers[0] >= len(numbers):
        for place, number in enumerate(numbers):
            if number != numbers[0] + place:
                return numbers[:place]
    return numbers
