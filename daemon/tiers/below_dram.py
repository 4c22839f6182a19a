"""The tiers below DRAM that the settings of a daemon ask for: made, attached, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.growing_leases import GrowingLeases
from tiercache.daemon.tiers.dram.space import Space
from tiercache.daemon.tiers.dram.writes import Writes

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.tier import NvmeTier
    from tiercache.daemon.tiers.shared.tier import SharedTier

    from .lower_tiers import LowerTiers

log = logging.getLogger("tiercache.daemon")

OPENING_S = 2.0
"""How long the daemon waits at the start for directories, before it serves without the slower ones."""


class BelowDram:
    """NVMe and the shared tier, where there are any; None each where there is none. Event loop only.

    `landed()` is called after promoted blocks have arrived; `soon()` asks for deferred work before the next tick.
    Raises ConfigError for a setting that can never work.
    """

    def __init__(
        self,
        config: DaemonConfig,
        regions: dict[int, Region],
        landed: Callable[[], None],
        soon: Callable[[], None],
    ) -> None:
        self._config = config
        self._regions = regions
        self._landed = landed
        self._soon = soon
        self.nvme = self._make_nvme() if config.nvme_dirs else None
        self.shared = self._make_shared() if config.shared else None
        self._together = None if self.shared is None else self._put_together(self.shared)

    # Imported below: a daemon without disks needs no SQLite, and most daemons serve one host.

    def _make_nvme(self) -> NvmeTier:
        from tiercache.daemon.tiers.nvme.tier import NvmeTier

        return NvmeTier(self._config, self._regions, self._landed, soon=self._soon)

    def _make_shared(self) -> SharedTier:
        from tiercache.daemon.tiers.shared.settings import shared_settings
        from tiercache.daemon.tiers.shared.tier import SharedTier

        return SharedTier(shared_settings(self._config), self._regions, soon=self._soon)

    def _put_together(self, shared: SharedTier) -> LowerTiers:
        from .lower_tiers import LowerTiers

        return LowerTiers(self.nvme, shared)

    @property
    def tier(self) -> TierBelow | None:
        """What DRAM knows of them."""
        return self._together or self.nvme

    def attach(self, space: Space, growing: GrowingLeases, writes: Writes, events: Events | None, work_ns: int) -> None:
        """Attach them to the DRAM tier that was made with `tier`. `work_ns`: CPU time of a slice of writes to NVMe."""
        parts = space, growing, writes, events
        if self.nvme is not None:
            self.nvme.attach(*parts, [] if self.shared is None else [self.shared])
            self.nvme.limit_work(work_ns)
        if self._together is not None:
            self._together.attach(*parts, self._regions, self._landed, self._soon)

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
            await self._open_nvme(self.nvme, stopping)
        if self.shared is not None:
            self.shared.open()

    async def _open_nvme(self, nvme: NvmeTier, stopping: asyncio.Event) -> None:
        opening = asyncio.ensure_future(nvme.open(OPENING_S))
        stopped = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
        finally:
            opening.cancel()
            stopped.cancel()

    async def close(self) -> None:
        """Write what waits: to the disks, and meanwhile to the store. No client is served any more."""
        if self._together is not None:
            self._together.end()
        await asyncio.gather(self._close_shared(), self._close_nvme())

    async def _close_shared(self) -> None:
        if self.shared is not None:
            left = await self.shared.close(self._config.grace_s)
            if left:
                log.info("%d blocks were not sent to the shared store when the daemon stopped", left)

    async def _close_nvme(self) -> None:
        if self.nvme is not None:
            # What DRAM holds now is all there is to write.
            left = await self.nvme.close(self._config.grace_s)
            if left:
                log.info("%d blocks of DRAM were not on nvme when the daemon stopped", left)
