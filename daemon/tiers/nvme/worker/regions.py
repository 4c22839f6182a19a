"""The arena's regions: their files, kept by the daemon for worker processes, and their memory in such a process."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable

from tiercache.copies.arena import Region
from tiercache.protocol.frames import OFFSET_MASK, REGION_SHIFT


class ArenaFiles:
    """Every region of this daemon and a descriptor of its file. Event loop only; regions are added, never removed."""

    def __init__(self) -> None:
        self.regions: list[tuple[Region, int]] = []
        self._starts: list[int] = []
        self._told: list[Callable[[Region, int], None]] = []

    def add(self, region: Region, fd: int) -> None:
        """A region that is mapped here. The descriptor stays the caller's, who may close it."""
        kept = os.dup(fd)
        self.regions.append((region, kept))
        self.regions.sort(key=lambda region: region[0].address)
        self._starts = [region.address for region, _ in self.regions]
        for tell in self._told:
            tell(region, kept)

    def tell(self, told: Callable[[Region, int], None]) -> None:
        """Call `told` for regions that are added from now on."""
        self._told.append(told)

    def forget(self, told: Callable[[Region, int], None]) -> None:
        """Do not call `told` any more."""
        self._told = [other for other in self._told if other != told]

    def frame_at(self, address: int) -> int:
        """The frame at an address of this process."""
        region = self.regions[bisect_right(self._starts, address) - 1][0]
        offset = address - region.address
        assert 0 <= offset < region.size_bytes, "blocks are moved from and to frames of the arena"
        return region.region_id << REGION_SHIFT | offset

    def close(self) -> None:
        """Close the descriptors."""
        while self.regions:
            os.close(self.regions.pop()[1])
        self._starts.clear()


class MappedRegions:
    """The regions of the daemon's arena in a worker process."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, region_id: int, fd: int, size_bytes: int) -> None:
        """Map a region and close its descriptor. Raises ArenaError."""
        try:
            self._regions[region_id] = Region(region_id, fd, size_bytes)
        finally:
            os.close(fd)

    def address_of(self, frame: int) -> int:
        """Where a frame is in this process."""
        return self._regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK)
