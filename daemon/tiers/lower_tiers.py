"""The tiers below DRAM together: NVMe, then the store that hosts share. Made, attached, opened and closed together.

    look-up     DRAM ──► NVMe ──► what the store was found to have behind that      (claims: see `shared/`)
    promotion   one job for each tier's part of a chain, side by side
    flush       each tier is told; the answer is that of all

Questions about single blocks go to `local`: NVMe has an index on this host.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.policy import Touch
from tiercache.daemon.tiers.dram.below import Claim, FlushBelow, TierBelow
from tiercache.daemon.tiers.dram.growing_leases import GrowingLeases
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.source import SourceTier
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.dram.writes import Writes

if TYPE_CHECKING:  # a daemon without disks needs no SQLite, and most daemons serve one host
    from tiercache.daemon.tiers.nvme.tier import NvmeTier
    from tiercache.daemon.tiers.shared.tier import SharedTier

log = logging.getLogger("tiercache.daemon")

OPENING_S = 2.0
"""How long the daemon waits at the start for directories, before it serves without the slower ones."""


class LowerTiers(TierBelow):
    """NVMe and the shared tier; None each where there is none. Event loop only; never blocks.

    `landed()` is called after promoted blocks have arrived; `soon()` asks for deferred work before the next tick;
    `clock_s` is monotonic seconds.
    """

    def __init__(
        self,
        nvme: NvmeTier | None,
        shared: SharedTier | None,
        regions: dict[int, Region],
        landed: Callable[[], None] = lambda: None,
        soon: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nvme = nvme
        self.shared = shared
        self._local: TierBelow = nvme or TierBelow()
        self.tiers = (*self.local.tiers, *(() if shared is None else (shared.name,)))
        self._regions = regions
        self._landed = landed
        self._soon = soon
        self._clock_s = clock_s

    @classmethod
    def of(
        cls, config: DaemonConfig, regions: dict[int, Region], landed: Callable[[], None], soon: Callable[[], None]
    ) -> LowerTiers:
        """Those that the settings ask for. Raises ConfigError for a setting that can never work."""
        nvme: NvmeTier | None = None
        shared: SharedTier | None = None
        if config.nvme_dirs:
            from tiercache.daemon.tiers.nvme.tier import NvmeTier

            nvme = NvmeTier(config, regions, soon=soon)
        if config.shared:
            from tiercache.daemon.tiers.shared.settings import shared_settings
            from tiercache.daemon.tiers.shared.tier import SharedTier

            shared = SharedTier(shared_settings(config), regions, soon=soon)
        return cls(nvme, shared, regions, landed, soon)

    def attach(self, space: Space, growing: GrowingLeases, writes: Writes, events: Events | None = None) -> None:
        """Attach them to the DRAM tier that was made with them."""
        sources: list[SourceTier] = [] if self.nvme is None else [self.nvme.sources]
        sources += [] if self.shared is None else [self.shared]
        self.promotion = Promotion(
            growing, writes, events, self._regions, sources, self._landed, self._soon, self._clock_s
        )
        if self.nvme is not None:
            self.nvme.attach(space, events, self.promotion)
        if self.shared is not None:
            self.shared.attach(space, self.local.lookup)

    def add_region(self, region: Region, fd: int) -> None:
        """The arena has one more region, in this file: the descriptor stays the caller's."""
        if self.nvme is not None:
            self.nvme.add_region(region, fd)

    async def open(self, stopping: asyncio.Event) -> None:
        """Begin to open them; returns early once `stopping`. Raises ConfigError for a setting that can never work.

        Directories that have not opened after a little while, or cannot be, are retried while the daemon serves without
        them, and so is a store that is away.
        """
        if self.nvme is not None:
            opening = asyncio.ensure_future(self.nvme.open(OPENING_S))
            stopped = asyncio.ensure_future(stopping.wait())
            try:
                await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
            finally:
                opening.cancel()
                stopped.cancel()
        if self.shared is not None:
            self.shared.open()

    async def close(self, grace_s: float) -> None:
        """Write what waits: to the disks, and meanwhile to the store. No client is served any more."""
        self.end()
        ended = await asyncio.gather(self._close_shared(grace_s), self._close_nvme(grace_s), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    def end(self) -> None:
        """The daemon ends: nothing more is promoted."""
        self.promotion.closed = True

    async def _close_shared(self, grace_s: float) -> None:
        if self.shared is not None:
            left = await self.shared.close(grace_s)
            if left:
                log.info("%d blocks were not sent to the shared store when the daemon stopped", left)

    async def _close_nvme(self, grace_s: float) -> None:
        if self.nvme is not None:
            # What DRAM holds now is all there is to write.
            left = await self.nvme.close(grace_s)
            if left:
                log.info("%d blocks of DRAM were not on nvme when the daemon stopped", left)

    @property
    def local(self) -> TierBelow:
        """See `TierBelow`."""
        return self._local

    # --- both ------------------------------------------------------------------------------------

    def matched(
        self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> None:
        """See `TierBelow`."""
        self.local.matched(namespaces, keys, dram_blocks, found_blocks, how)
        if self.shared is not None:
            self.shared.matched(namespaces, keys, dram_blocks)

    @property
    def may_extend(self) -> bool:
        """See `TierBelow`."""
        return self.shared is not None and not self.shared.away

    def wait(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        lengths: Sequence[int],
        go: Callable[[], None],
        patience_s: float = math.inf,
    ) -> bool:
        """See `TierBelow`."""
        return self.shared is not None and self.shared.wait(namespaces, keys, lengths, go, patience_s)

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """See `TierBelow`."""
        return None if self.shared is None else self.shared.claim(namespaces, keys)

    def promote(self, lease: ReadLease) -> None:
        """See `TierBelow`."""
        self.promotion.start(lease)
        self._soon()  # a long run takes more than one go

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        """See `TierBelow`."""
        self.promotion.note_published()
        self.local.published(namespace, keys, before)
        if self.shared is not None:
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
        if self.shared is None:
            return self.local.begin_flush(namespaces, key, done, named)
        together = _FlushOfBoth(self.shared, done)
        try:
            if self.local.tiers and tier != self.shared.name:
                together.add(self.local.begin_flush(namespaces, key, together.local_done, named))
            if tier in ("all", self.shared.name):
                # Now, while DRAM has the chain: it tells which bucket is concerned.
                together.waiting += 1
                together.shared_end = self.shared.begin_flush(namespaces, key, together.shared_done, named)
        except BaseException:
            together.give_up()
            raise
        return together

    @property
    def settled(self) -> bool:
        """See `TierBelow`. What waits for the store never counts: it may be away for hours."""
        return self.promotion.idle and self.local.settled

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        """See `TierBelow`."""
        if not self.tiers:
            return ()
        shared = () if self.shared is None else (self.shared.work,)
        return self._look, self._begin, *self.local.kinds, *shared, self._land

    def _look(self) -> bool:
        return self.promotion.look()

    def _begin(self) -> bool:
        return self.promotion.begin()

    def _land(self) -> bool:
        return self.promotion.land()

    def stats_by_tier(self) -> dict[str, dict[str, Any]]:
        """See `TierBelow`."""
        shared = {} if self.shared is None else {self.shared.name: self.shared.stats()}
        return {**self.local.stats_by_tier(), **shared}

    def check(self) -> Steps[list[str]]:
        """See `TierBelow`."""
        findings = yield from self.local.check()
        return findings + ([] if self.shared is None else self.shared.check_integrity())


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

    def give_up(self) -> None:
        """See `FlushBelow`. Of the store this host uses nothing that the flush was about: DRAM may still have some."""
        self._done = None
        if self._local is not None:
            self._local.give_up()

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
