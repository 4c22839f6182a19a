"""The tiers below DRAM together, where there is a shared one: the nearer tiers first, the store last.

    look-up     DRAM ──► NVMe ──► what the store was found to have behind that      (claims: see `shared/`)
    promotion   one job for each tier's part of a chain, side by side
    flush       each tier is told; the answer is that of all

NVMe has an index on this host, so questions about single blocks go to it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import Touch
from tiercache.daemon.tiers.dram.below import Claim, FlushBelow, GrantsBelow, NoTierBelow, TierBelow
from tiercache.daemon.tiers.dram.growing_leases import GrowingLeases
from tiercache.daemon.tiers.dram.leases import HeldBelow, ReadLease
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.dram.writes import Writes
from tiercache.daemon.tiers.shared.tier import SharedTier
from tiercache.protocol.messages import BlockView


class LowerTiers:
    """Implements `TierBelow` for NVMe, if there is any, and a shared tier. Event loop only; never blocks.

    local: the NVMe tier, already attached with the shared tier below it, or None.
    """

    def __init__(self, local: TierBelow | None, shared: SharedTier) -> None:
        self.local: TierBelow = local or NoTierBelow()
        self.shared = shared
        self.tiers = (*self.local.tiers, shared.name)
        self._has_local = local is not None
        self._promotion: Promotion | None = None

    def attach(
        self,
        space: Space,
        growing: GrowingLeases,
        writes: Writes,
        events: Events | None,
        regions: dict[int, Region],
        landed: Callable[[], None],
        soon: Callable[[], None] = lambda: None,
    ) -> None:
        """Attach the shared tier, and without NVMe the promotions; for `landed` and `soon` see those."""
        self.shared.attach(space, self.local.lookup)
        if not self._has_local:
            self._promotion = Promotion(growing, writes, events, regions, [self.shared], landed, soon)

    # --- both ------------------------------------------------------------------------------------

    def matched(
        self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> None:
        """See `TierBelow`."""
        self.local.matched(namespaces, keys, dram_blocks, found_blocks, how)
        self.shared.matched(namespaces, keys, dram_blocks)

    @property
    def may_extend(self) -> bool:
        """See `TierBelow`."""
        return not self.shared.away

    def wait(
        self, namespaces: Sequence[Namespace], keys: bytes, lengths: Sequence[int], go: Callable[[], None]
    ) -> bool:
        """See `TierBelow`."""
        return self.shared.wait(namespaces, keys, lengths, go)

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """See `TierBelow`."""
        return self.shared.claim(namespaces, keys)

    def promote(self, lease: ReadLease) -> None:
        """See `TierBelow`."""
        if self._promotion is None:
            self.local.promote(lease)
        else:
            self._promotion.start(lease)

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        """See `TierBelow`."""
        self.local.published(namespace, keys, before)
        if self._promotion is not None:
            self._promotion.note_published()
        self.shared.published(namespace, keys, before)

    def begin_flush(
        self,
        namespaces: Sequence[Namespace],
        key: bytes,
        done: Callable[[int, bool], None],
        named: bool = False,
        tier: str = "all",
    ) -> FlushBelow:
        """See `TierBelow`."""
        together = _FlushOfBoth(self.shared, done)
        if self._has_local and tier != self.shared.name:
            together.add(self.local.begin_flush(namespaces, key, together.local_done, named))
        if tier in ("all", self.shared.name):
            # Now, while DRAM has the chain: it tells which bucket is concerned.
            together.waiting += 1
            together.shared_end = self.shared.begin_flush(namespaces, key, together.shared_done, named)
        return together

    @property
    def settled(self) -> bool:
        """See `TierBelow`. What waits for the store never counts: it may be away for hours."""
        return self.local.settled and (self._promotion is None or self._promotion.idle)

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        """See `TierBelow`."""
        return *self.local.kinds, self._look, self._begin, self.shared.work, self._land

    def _look(self) -> bool:
        return self._promotion is not None and self._promotion.look()

    def _begin(self) -> bool:
        return self._promotion is not None and self._promotion.begin()

    def _land(self) -> bool:
        return self._promotion is not None and self._promotion.land()

    def stats_by_tier(self) -> dict[str, dict[str, Any]]:
        """See `TierBelow`."""
        return {**self.local.stats_by_tier(), self.shared.name: self.shared.stats()}

    def end(self) -> None:
        """The daemon ends: nothing more is promoted."""
        if self._promotion is not None:
            self._promotion.closed = True

    # --- the tier with an index here ---------------------------------------------------------------

    @property
    def grants(self) -> GrantsBelow | None:
        """See `TierBelow`."""
        return self.local.grants

    @property
    def unlinking(self) -> bool:
        """See `TierBelow`."""
        return self.local.unlinking

    def expire(self) -> None:
        """See `TierBelow`."""
        self.local.expire()

    def writer_gone(self, instance: bytes) -> None:
        """See `TierBelow`."""
        self.local.writer_gone(instance)

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """See `TierBelow`."""
        return self.local.length(namespace, keys, limit)

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        """See `TierBelow`."""
        return self.local.lookup(namespace)

    def holders(self, namespace: Namespace, keys: bytes) -> list[tuple[Index, Table]]:
        """See `TierBelow`."""
        return self.local.holders(namespace, keys)

    def hold(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> HeldBelow | None:
        """See `TierBelow`."""
        return self.local.hold(namespaces, keys, first)

    def check(self) -> Steps[list[str]]:
        """See `TierBelow`."""
        findings = yield from self.local.check()
        return findings + self.shared.check_integrity()

    def scan(
        self, sample: int, bytes_per_s: int, wanted: Callable[[], bool], done: Callable[[list[str], int], None]
    ) -> bool:
        """See `TierBelow`."""
        return self.local.scan(sample, bytes_per_s, wanted, done)

    def places(self, namespace: Namespace, key: bytes) -> list[BlockView]:
        """See `TierBelow`."""
        return self.local.places(namespace, key)

    def chain(self, namespace: Namespace, key: bytes) -> Steps[list[bytes]]:
        """See `TierBelow`."""
        return self.local.chain(namespace, key)

    def blocks_of(self, number: int) -> int:
        """See `TierBelow`."""
        return self.local.blocks_of(number)


class _FlushOfBoth:
    """A flush of several tiers: `done` is called when each has answered and all parts were told."""

    def __init__(self, shared: SharedTier, done: Callable[[int, bool], None]) -> None:
        self.waiting = 1  # until `end`
        self.unconfirmed: list[str] = []
        self.lost = ""
        self.shared_end: Callable[[], None] = lambda: None
        self._shared = shared
        self._local: FlushBelow | None = None
        self._done: Callable[[int, bool], None] | None = done  # until it was called: it may refer to this flush
        self._blocks = 0

    def add(self, flush: FlushBelow) -> None:
        """The flush of the local tier."""
        self.waiting += 1
        self._local = flush

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """See `FlushBelow`. The store was told at the beginning."""
        if self._local is not None:
            self._local.forget(namespaces)

    def end(self) -> None:
        """See `FlushBelow`."""
        done, self._done = self._done, None  # if this raises, the flush is over with the local one
        try:
            self.shared_end()
        finally:
            if self._local is not None:
                self._local.end()
        self._done = done
        self._answered()

    @property
    def settled(self) -> bool:
        """See `FlushBelow`."""
        return self._done is None and (self._local is None or self._local.settled)

    def local_done(self, blocks: int, durable: bool) -> None:
        """A tier on this host has answered."""
        self._blocks += blocks
        if not durable and self._local is not None:
            self.unconfirmed += self._local.unconfirmed
        self._answered()

    def shared_done(self, durable: bool) -> None:
        """The store has answered, or is away."""
        if not durable:
            self.unconfirmed.append(self._shared.name)
            self.lost = self._shared.flushes.trouble
        self._answered()

    def _answered(self) -> None:
        self.waiting -= 1
        if not self.waiting and self._done is not None:
            done, self._done = self._done, None
            done(self._blocks, not self.unconfirmed)
