"""The shared tier: what the daemon has in a store that other hosts use too.

    StoreAccess     whether the store may be asked, jobs for it, and what those tell
    SharedLookups   how far the store extends what this host has ──► Presence: claims, for a short time
    SharedSource    store → DRAM, a source of promotions
    SharedWrites    DRAM → store, behind
    SharedFlushes   flushes by this host, until the store has been told
    Epochs          flushes by any host

All on the event loop, except what the lines do. No request waits for the store longer than the time-out of a look-up,
and nothing waits for one that is away.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiercache.copies.arena import Region
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.source import SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.shared.stores.store import SharedStore
from tiercache.protocol.messages import KEY_BYTES

from .access import StoreAccess, log
from .ancestry import MAX_WALK, Ancestry
from .byte_rate import ByteRate
from .fetches import SharedSource
from .flushes import SharedFlushes
from .lines import Lines, LineUse, ThreadsafeCall
from .lookups import MAX_NAMESPACES, LocalWindows, LookupJob, SharedLookups, split
from .naming import Scope
from .search import ChainAsk, WindowAsk
from .settings import SharedSettings
from .writes import SharedWrites

_POLL_S = 0.01


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
        self.access = StoreAccess(settings, soon, clock_s, make_lines)
        self.flushes = SharedFlushes(self.access)
        self.source = SharedSource(self.access)
        self._regions = regions
        self._clock_s = clock_s
        self._lookups = SharedLookups(settings.lookup_timeout_s, self._later, clock_s)

    def attach(self, space: Space, lookup_local: Callable[[Namespace], Callable[[bytes], bool] | None]) -> None:
        """Attach it below DRAM; `lookup_local`: see `TierBelow.lookup`, of the tiers between."""
        self.access.attach(space)
        self._windows = LocalWindows(space.index, lookup_local)
        self._ancestry = Ancestry(space.index)
        settings = self.access.settings
        budget = ByteRate(settings.write_budget_bytes_per_s, self._clock_s)
        self._writes = SharedWrites(self.access, space, self._regions, self._ancestry, budget)
        if settings.write == "evicted":
            space.index.on_evicted = self._writes.evicted

    def open(self) -> None:
        """Start to ask the store, which need not be there. Raises ConfigError for a `shared_state` that is taken."""
        self.flushes.lock()
        self.access.open()
        self.flushes.open()
        self.access.probe()
        sealed = "sealed" if self.access.settings.form.sealed else "plain"
        log.info("shared store %s: %s", self.store.address, sealed)

    @property
    def store(self) -> SharedStore:
        """The store that other hosts use too."""
        return self.access.store

    @property
    def away(self) -> bool:
        """True if nothing should be asked of the store now."""
        return self.access.away

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    # --- look-ups --------------------------------------------------------------------------------

    def wait(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        lengths: Sequence[int],
        go: Callable[[], None],
        patience_s: float = math.inf,
    ) -> bool:
        """Have `go` called when it is known how far the store extends `lengths`, what this host has of each namespace;
        at the latest after `patience_s`.

        False where there is nothing to wait for; then `go` is not called.
        """
        if self.away or len(namespaces) > MAX_NAMESPACES or self._is_claimed(namespaces, keys, lengths):
            return False
        if any(namespace.spec.dram_only for namespace in namespaces) or not self.access.breaker.admits():
            return False
        if not self._windows.are_short_work(namespaces, len(keys) // KEY_BYTES):
            return False
        return self._lookups.wait(namespaces, keys, go, lambda: self._look_up(namespaces, keys, lengths), patience_s)

    def _is_claimed(self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int]) -> bool:
        """True if the last look-up still answers this: it does not if this host has lost blocks since."""
        claim = self.access.presence.claim(namespaces, keys)
        if claim is None or any(lengths[place] < start for place, start in claim.starts.items()):
            return False
        windowed = [(place, one) for place, one in enumerate(namespaces) if place not in claim.starts]
        return all(self._windows.completes(claim, place, one, keys) for place, one in windowed)

    def _look_up(self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int]) -> None:
        submitted = False
        try:
            # Since it was queued, the store went away (its deadline, and those of all behind it, would pass one after
            # another), or so many blocks came that looking for them takes long.
            if not self.away and self._windows.are_short_work(namespaces, len(keys) // KEY_BYTES):
                self.access.submit(self._look_up_job(namespaces, keys, lengths), LineUse.LOOKUP)
                submitted = True
        finally:
            if not submitted:
                self._later(0.0, lambda: self._lookups.ended(namespaces, keys))

    def _look_up_job(self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int]) -> LookupJob:
        asks: list[ChainAsk | WindowAsk] = []
        one_by_one = split(keys) if any(namespace.table.windowed for namespace in namespaces) else []
        for namespace, length in zip(namespaces, lengths, strict=True):
            if namespace.table.windowed:
                asks.append(WindowAsk(namespace.spec.window_blocks, self._windows.here(namespace, one_by_one)))
            else:
                asks.append(ChainAsk(length))
        pack = math.lcm(*map(self.access.pack_of, namespaces))  # where packs of all of these end
        bad = self.access.presence.unfetchable(namespaces)
        return LookupJob(self, self.access.epochs, namespaces, keys, asks, pack, bad)

    def job_ended(self, job: LookupJob) -> None:
        """See `JobOwner`."""
        try:
            self.access.took_in(job)
            still = all(self.access.epochs.of(scope) == epoch for scope, epoch in job.epochs.items())
            if job.found and still and not self.away:
                starts = {place: ask.start for place, ask in enumerate(job.asks) if isinstance(ask, ChainAsk)}
                self.access.presence.claimed(job.namespaces, job.keys, Claim(job.end, starts, job.stored), job.bad)
                self.access.presence.said(job.said)
        finally:  # else requests would wait for it, and a few such would be all that may be under way
            self._lookups.ended(job.namespaces, job.keys)

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """What a look-up found a short time ago."""
        return None if self.away else self.access.presence.claim(namespaces, keys)

    # --- promotion -------------------------------------------------------------------------------

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        """See `SourceTier`: the lease's target is what was claimed, so the store has all that the tiers above lack."""
        yield from ()
        if self.away or namespace.spec.dram_only:
            return TierParts([], wanted)
        return TierParts([SourcePart(self.source, wanted)], ())

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
        if not self.access.is_open:
            return False
        if self.access.breaker.wants_probe():
            self.access.probe()
        return self._writes.pump()

    def begin_flush(
        self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[bool], None], named: bool = False
    ) -> Callable[[], None]:
        """Make all blocks of these namespaces unreachable, for every host; with a `key`, those of its chain's bucket.

        Where no block of that chain is in DRAM, its bucket is not known: then all of the namespace. A flush of
        everything includes namespaces that only other hosts know, unless they are `named`; one of a `key` never does.
        `done(durable)` once the store has been told, or a few seconds later if it is away; it is told when it is back.

        Returns what is to be called once DRAM has forgotten all of it. Until then this host sends nothing of these.
        """
        self.access.presence.forget(namespace.number for namespace in namespaces)
        names = self._flushed_notes([one for one in namespaces if not one.spec.dram_only], key, named)
        if not names or not self.access.opened:
            done(True)
            return lambda: None
        if self.access.epochs.naming.deployment_note in names:
            self.access.presence.forget()
        number = self.flushes.begin(names, done)
        return lambda: self._writes.flushed(self.flushes.end(number))

    def _flushed_notes(self, namespaces: Sequence[Namespace], key: bytes, named: bool) -> list[bytes]:
        naming = self.access.epochs.naming
        if not key:
            every = [naming.namespace_note(one.fingerprint) for one in namespaces]
            return every if named else [naming.deployment_note]
        # A key stands for all blocks before it, so its first block is the same in every namespace of a tenant.
        of_tenant = dict[str, list[Namespace]]()
        for one in namespaces:
            of_tenant.setdefault(one.spec.tenant, []).append(one)
        notes = list[bytes]()
        for ones in of_tenant.values():
            root = self._ancestry.root_of(ones, key, MAX_WALK // len(of_tenant))
            if root is None:
                notes += [naming.namespace_note(one.fingerprint) for one in ones]
            else:
                bucket = naming.bucket(root)
                notes += [naming.bucket_note(Scope(one.fingerprint, bucket)) for one in ones]
        return notes

    def check_integrity(self) -> list[str]:
        """Every way in which the parts of this tier on this host disagree."""
        parts = self._writes, self.access.presence, self._lookups
        return [finding for part in parts for finding in part.check_integrity()]

    # --- the end ---------------------------------------------------------------------------------

    async def close(self, grace_s: float) -> int:
        """Send what waits for at most `grace_s`; returns how many blocks were left."""
        if not self.access.is_open:
            return 0
        deadline_s = time.monotonic() + grace_s
        self._writes.close()
        while not self._writes.idle and self.access.breaker.may_write and time.monotonic() < deadline_s:
            if not self._writes.pump():
                await asyncio.sleep(_POLL_S)
        left = self._writes.queued
        await self.access.close()
        self.flushes.close()
        return left

    # --- stats -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `TierBelow`."""
        tally, writes, lookups = self.source.tally, self._writes, self._lookups
        return {
            "store": self.store.address,
            "sealed": self.access.settings.form.sealed,
            "breaker": self.access.breaker.stats(),
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
            "epoch_changes": self.access.epochs.changes,
            "flushes_waiting": len(self.flushes),
            "flush_tries": self.flushes.tries,
        }

    def reasons(self) -> list[str]:
        """What is not well, for `health`."""
        found = []
        if not self.access.breaker.closed:
            found.append(f"the shared store {self.store.address} is away: {self.access.breaker.problem}")
        elif refusal := self.access.breaker.refusal:
            found.append(f"the shared store {self.store.address} takes no writes: {refusal}")
        elif trouble := self.store.trouble:
            found.append(f"the shared store {self.store.address}: {trouble}")
        if self.flushes.waiting:
            found.append(f"the shared store {self.store.address} has not been told of a flush yet")
            if self.flushes.trouble:
                found.append(self.flushes.trouble)
        return found
