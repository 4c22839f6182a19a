"""The shared tier: what the daemon has in a store that other hosts use too.

    SharedLookups   how far the store extends what this host has ──► Presence: claims, for a short time
    SharedSource    store → DRAM, a source of promotions
    SharedWrites    DRAM → store, behind
    SharedFlushes   flushes by this host, until the store has been told
    Epochs          flushes by any host
    Breaker         whether to ask the store at all
    Lines           threads, each with a connection

All on the event loop, except what the lines do. No request waits for the store longer than the time-out of a look-up,
and nothing waits for one that is away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiercache.copies.arena import Region
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.source import Fetch, SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.shared.stores.store import Connection, NotReplicated, SharedStore, StoreError, StoreProblem
from tiercache.protocol.messages import KEY_BYTES

from .ancestry import Ancestry
from .breaker import Breaker, BreakerState
from .byte_rate import ByteRate
from .epochs import Epochs, deadline
from .fetches import FetchJob, SharedSource
from .flushes import FlushJob, SharedFlushes
from .lines import Lines, LineUse, SharedJob, ThreadsafeCall
from .lookups import MAX_NAMESPACES, LocalWindows, LookupJob, SharedLookups, split
from .naming import Scope
from .presence import Presence
from .search import ChainAsk, WindowAsk
from .settings import SharedSettings
from .value import pack_of
from .write_job import WriteJob
from .writes import SharedWrites

log = logging.getLogger("tiercache.daemon")

LOOKUP_LINES = 2
CLOSE_S = 5.0
_NOT_THERE = StoreError(
    StoreProblem.PROTOCOL, "it says that it has blocks, and then has none of them: is it full, and evicts at random?"
)
_POLL_S = 0.01


PROBE_S = 2.0


class ProbeJob(SharedJob):
    """Reads the deployment's note."""

    def __init__(self, note: bytes, ended: Callable[[ProbeJob], None]) -> None:
        super().__init__()
        self.learned: dict[bytes, bytes] = {}
        self._note = note
        self._ended = ended

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        note = connection.exists((), (self._note,), deadline(PROBE_S)).notes[0]
        if note:
            self.learned[self._note] = note

    def ended(self) -> None:
        """See `SharedJob`."""
        self._ended(self)


class SharedTier:
    """The shared tier of one daemon: made, attached below DRAM, opened, and closed once. Event loop only.

    `soon()` asks for a slice of `work` before the next tick; `clock_s`: monotonic; `make_lines`: see `Lines`.
    """

    name = "shared"

    def __init__(
        self,
        settings: SharedSettings,
        regions: dict[int, Region],
        soon: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
        make_lines: Callable[[SharedStore, list[tuple[LineUse, ...]], ThreadsafeCall], Lines] = Lines,
    ) -> None:
        self.settings = settings
        self.store = settings.store
        self.breaker = Breaker(clock_s)
        self.presence = Presence(clock_s)
        self.epochs = Epochs(settings.naming)
        self.flushes = SharedFlushes(
            self.epochs, settings.state, self._submit_flush, self._flush_ended, lambda: not self.breaker.closed
        )
        self.source = SharedSource(
            self._fetch, self.scope_of, self.pack_of, lambda: self.away, self.presence, soon, self._kept_word
        )
        self._regions = regions
        self._soon = soon
        self._clock_s = clock_s
        self._make_lines = make_lines
        self._lines: Lines | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lookups = SharedLookups(settings.lookup_timeout_s, self._later, clock_s)
        self._closing = False

    def attach(self, space: Space, lookup_local: Callable[[Namespace], Callable[[bytes], bool] | None]) -> None:
        """Attach it below DRAM; `lookup_local`: see `TierBelow.lookup`, of the tiers between."""
        self._space = space
        self._windows = LocalWindows(space.index, lookup_local)
        settings = self.settings
        self._ancestry = Ancestry(space.index)
        self._writes = SharedWrites(
            space,
            self._regions,
            settings.form,
            self.epochs,
            self.presence,
            self._ancestry,
            when=settings.write,
            budget=ByteRate(settings.write_budget_bytes_per_s, self._clock_s),
            ttl_s=settings.ttl_s,
            pack_of=self.pack_of,
            scope_of=self.scope_of,
            may_write=lambda: self.breaker.may_write,
            submit=lambda job: self._submit(job, LineUse.WRITE, self._gone),
            share=lambda: self.breaker.share,
            ended=self._job_ended,
            soon=self._soon,
        )
        if settings.write == "evicted":
            space.index.on_evicted = self._writes.evicted

    def open(self) -> None:
        """Start the lines. The store need not be there."""
        self._loop = asyncio.get_running_loop()
        transfers = max(1, self.store.connections)
        uses: list[tuple[LineUse, ...]] = [(LineUse.LOOKUP,)] * LOOKUP_LINES
        writers = max(1, transfers // 2)
        both, fetch = (LineUse.FETCH, LineUse.WRITE), (LineUse.FETCH,)
        uses += [both if number < writers else fetch for number in range(transfers)]
        self._lines = self._make_lines(self.store, uses, self._loop.call_soon_threadsafe)
        self.flushes.open()
        self._probe()
        log.info("shared store %s: %s", self.store.address, "sealed" if self.settings.form.sealed else "plain")

    # --- names -----------------------------------------------------------------------------------

    def scope_of(self, namespace: Namespace, root: bytes) -> Scope:
        """The scope of a chain that begins with `root`."""
        return Scope(namespace.fingerprint, self.epochs.naming.bucket(root))

    def pack_of(self, namespace: Namespace) -> int:
        """How many blocks of this namespace are one value."""
        return 1 if namespace.table.windowed else pack_of(namespace.spec.block_bytes, self.store.pack_blocks)

    # --- jobs ------------------------------------------------------------------------------------

    @property
    def away(self) -> bool:
        """True if nothing should be asked of the store now."""
        return self._lines is None or self._closing or not self.breaker.closed

    def _submit(self, job: SharedJob, use: LineUse, given_up: Callable[[], bool] | None = None) -> None:
        assert self._lines is not None
        job.given_up = given_up or job.given_up
        self._lines.submit(job, use)

    def _gone(self) -> bool:
        """True if the breaker is open. Any thread: this only reads one field."""
        return not self.breaker.closed

    def _submit_flush(self, job: SharedJob) -> None:
        self._submit(job, LineUse.LOOKUP)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_later(seconds, call)

    def _job_ended(self, job: LookupJob | FetchJob | WriteJob | ProbeJob) -> None:
        """Take in what each job tells: notes, and whether the store is well."""
        self._names_changed(self.epochs.learn(job.learned))
        if job.problem is not None and not self._closing:
            self._failed(job.problem, type(job))
        elif job.problem is None and not job.idle:
            self._worked(type(job))

    def _flush_ended(self, job: FlushJob) -> None:
        self._names_changed(job.replaced)  # of more than was flushed, where a note stands for several
        if job.problem is None or job.was_cut_short:
            self._worked(FlushJob)
        elif isinstance(job.problem, NotReplicated):
            log.warning("a flush of the shared store is tried again: %s", job.problem.text)
        elif not self._closing:
            self._failed(job.problem, FlushJob)

    def _names_changed(self, notes: Sequence[bytes]) -> None:
        """A flush has reached the store, from any host, or the store has lost notes."""
        if not notes:
            return
        about = {self.epochs.naming.fingerprint_of(note) for note in notes}
        self.presence.forget(None if "" in about else self._space.numbers(about).values())

    def _worked(self, kind: object) -> None:
        was = self.breaker.state
        self.breaker.worked(kind)
        self._may_be_back(was)

    def _failed(self, error: StoreError, kind: object = None) -> None:
        was = self.breaker.state
        if self.breaker.failed(error, kind):
            log.error("the shared store %s is away: %s", self.store.address, error.text)
            self.presence.drop_claims()
        self._may_be_back(was)  # one that is full, or takes no writes, answers

    def _kept_word(self, kept: bool) -> None:
        """Blocks have arrived, or nothing of a prompt of which the store said that it has some."""
        if kept:
            self._worked(Claim)
        elif not self._closing:
            self._failed(_NOT_THERE, Claim)

    def _may_be_back(self, was: BreakerState) -> None:
        if was is BreakerState.HALF_OPEN and self.breaker.closed:
            log.warning("the shared store %s answers again", self.store.address)
            self.presence.drop_claims()
            self.flushes.store_is_back()

    def _probe(self) -> None:
        self._submit(ProbeJob(self.epochs.naming.deployment_note, self._job_ended), LineUse.LOOKUP)

    # --- look-ups --------------------------------------------------------------------------------

    def wait(
        self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int], go: Callable[[], None]
    ) -> bool:
        """Have `go` called when it is known how far the store extends `lengths`, what this host has of each namespace.

        False where there is nothing to wait for; then `go` is not called.
        """
        if self.away or len(namespaces) > MAX_NAMESPACES or self._is_claimed(namespaces, keys, lengths):
            return False
        if any(namespace.spec.dram_only for namespace in namespaces) or not self.breaker.admits():
            return False
        if not self._windows.are_short_work(namespaces, len(keys) // KEY_BYTES):
            return False
        return self._lookups.wait(namespaces, keys, go, lambda: self._look_up(namespaces, keys, lengths))

    def _is_claimed(self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int]) -> bool:
        """True if the last look-up still answers this: it does not if this host has lost blocks since."""
        claim = self.presence.claim(namespaces, keys)
        if claim is None or any(lengths[place] < start for place, start in claim.starts.items()):
            return False
        windowed = [(place, one) for place, one in enumerate(namespaces) if place not in claim.starts]
        return all(self._windows.completes(claim, place, one, keys) for place, one in windowed)

    def _look_up(self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int]) -> None:
        # Since it was queued, the store went away (its deadline, and those of all behind it, would pass one after
        # another), or so many blocks came that looking for them takes long.
        if self.away or not self._windows.are_short_work(namespaces, len(keys) // KEY_BYTES):
            self._later(0.0, lambda: self._lookups.ended(namespaces, keys))
            return
        asks: list[ChainAsk | WindowAsk] = []
        one_by_one = split(keys) if any(namespace.table.windowed for namespace in namespaces) else []
        for namespace, length in zip(namespaces, lengths, strict=True):
            if namespace.table.windowed:
                asks.append(WindowAsk(namespace.spec.window_blocks, self._windows.here(namespace, one_by_one)))
            else:
                asks.append(ChainAsk(length))
        pack = max(self.pack_of(namespace) for namespace in namespaces)
        bad = self.presence.unfetchable(namespaces)
        job = LookupJob(self.epochs, namespaces, keys, asks, pack, bad, self._looked_up)
        self._submit(job, LineUse.LOOKUP)

    def _looked_up(self, job: LookupJob) -> None:
        self._job_ended(job)
        still = all(self.epochs.of(scope) == epoch for scope, epoch in job.epochs.items())
        if job.found and still and not self.away:
            starts = {place: ask.start for place, ask in enumerate(job.asks) if isinstance(ask, ChainAsk)}
            self.presence.claimed(job.namespaces, job.keys, Claim(job.end, starts, job.stored), job.bad)
            self.presence.said(job.said)
        self._lookups.ended(job.namespaces, job.keys)

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """What a look-up found a short time ago."""
        return None if self.away else self.presence.claim(namespaces, keys)

    # --- promotion -------------------------------------------------------------------------------

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        """See `LowerTier`: the lease's target is what was claimed, so the store has all that the tiers above lack."""
        yield from ()
        if self.away or namespace.spec.dram_only:
            return TierParts([], wanted)
        return TierParts([SourcePart(self.source, wanted)], ())

    def _fetch(self, fetches: list[Fetch]) -> None:
        ttl_s = self.settings.ttl_s
        job = FetchJob(self.settings.form, self.epochs, fetches, ttl_s, self._job_ended)
        self._submit(job, LineUse.FETCH, self._gone)

    # --- what DRAM tells -------------------------------------------------------------------------

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        """See `TierBelow`."""
        for key in keys:
            self._writes.published(namespace, key, before)

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int) -> None:
        """See `TierBelow`."""
        self._writes.matched(namespaces, keys, dram_blocks)

    def work(self) -> bool:
        """A slice of deferred work; True while there is more."""
        if self._lines is None or self._closing:
            return False
        if self.breaker.wants_probe():
            self._probe()
        return self._writes.pump()

    def begin_flush(
        self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[bool], None], named: bool = False
    ) -> Callable[[], None]:
        """Make all blocks of these namespaces unreachable, for every host; with a `key`, those of its chain's bucket.

        Where no block of that chain is in DRAM, its bucket is not known: then all of the namespace. Unless the
        namespaces are `named`, a flush of everything includes those that only other hosts know. `done(durable)` once
        the store has been told, or a few seconds later if it is away; it is told when it is back.

        Returns what is to be called once DRAM has forgotten all of it. Until then this host sends nothing of these.
        """
        self.presence.forget(namespace.number for namespace in namespaces)
        names = self._flushed_notes([one for one in namespaces if not one.spec.dram_only], key, named)
        if not names or self._lines is None:
            done(True)
            return lambda: None
        if self.epochs.naming.deployment_note in names:
            self.presence.forget()
        number = self.flushes.begin(names, done)
        return lambda: self._writes.flushed(self.flushes.end(number))

    def _flushed_notes(self, namespaces: Sequence[Namespace], key: bytes, named: bool) -> list[bytes]:
        naming = self.epochs.naming
        if not key:
            every = [naming.namespace_note(one.fingerprint) for one in namespaces]
            return every if named else [naming.deployment_note]
        # A key stands for all blocks before it, so its first block is the same in every namespace of a tenant.
        of_tenant = dict[str, list[Namespace]]()
        for one in namespaces:
            of_tenant.setdefault(one.spec.tenant, []).append(one)
        roots = {tenant: self._ancestry.root_of(ones, key) for tenant, ones in of_tenant.items()}
        return [
            naming.namespace_note(one.fingerprint)
            if (root := roots[one.spec.tenant]) is None
            else naming.bucket_note(self.scope_of(one, root))
            for one in namespaces
        ]

    def check_integrity(self) -> list[str]:
        """Every way in which the parts of this tier on this host disagree."""
        parts = self._writes, self.presence, self._lookups
        return [finding for part in parts for finding in part.check_integrity()]

    # --- the end ---------------------------------------------------------------------------------

    async def close(self, grace_s: float) -> int:
        """Send what waits for at most `grace_s`; returns how many blocks were left."""
        if self._lines is None:
            return 0
        deadline_s = time.monotonic() + grace_s
        self._writes.close()
        while not self._writes.idle and self.breaker.may_write and time.monotonic() < deadline_s:
            if not self._writes.pump():
                await asyncio.sleep(_POLL_S)
        left, self._closing = self._writes.queued, True
        await asyncio.get_running_loop().run_in_executor(None, self._lines.stop, time.monotonic() + CLOSE_S)
        while self._lines.waiting:
            self._lines.deliver()
        self.store.close()
        self.flushes.close()
        return left

    # --- stats -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `TierBelow`."""
        tally, writes, lookups = self.source.tally, self._writes, self._lookups
        return {
            "store": self.store.address,
            "sealed": self.settings.form.sealed,
            "breaker": self.breaker.stats(),
            "lookups": lookups.asked,
            "lookups_shared": lookups.shared,
            "lookups_late": lookups.late,
            "lookups_under_way": len(lookups),
            "fetched_blocks": tally.blocks,
            "fetched_bytes": tally.stored_bytes,
            "bad_blocks": tally.bad_blocks,
            "other_version_blocks": tally.other_version,
            "failed_fetches": tally.failed,
            "written_blocks": writes.written_blocks,
            "written_bytes": writes.written_bytes,
            "there_blocks": writes.there_blocks,
            "write_failed_blocks": writes.failed_blocks,
            "write_queue_blocks": writes.queued,
            "write_in_flight_bytes": writes.in_flight_bytes,
            "skipped_queue_full": writes.skipped_queue_full,
            "skipped_evicted": writes.skipped_evicted,
            "skipped_unplaced": writes.skipped_unplaced,
            "epoch_changes": self.epochs.changes,
            "flushes_waiting": len(self.flushes),
            "flush_tries": self.flushes.tries,
        }

    def reasons(self) -> list[str]:
        """What is not well, for `health`."""
        found = []
        if not self.breaker.closed:
            found.append(f"the shared store {self.store.address} is away: {self.breaker.problem}")
        elif self.breaker.refuses_writes:
            found.append(f"the shared store {self.store.address} takes no writes: {self.breaker.problem}")
        elif trouble := self.store.trouble:
            found.append(f"the shared store {self.store.address}: {trouble}")
        if self.flushes.waiting:
            found.append(f"the shared store {self.store.address} has not been told of a flush yet")
            if self.flushes.trouble:
                found.append(self.flushes.trouble)
        return found
