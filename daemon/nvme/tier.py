"""The NVMe tier: what DRAM's decisions ask of it, and how it starts and stops.

    Shelf        one directory: index, slots, catalog, I/O queue
    WriteBehind  DRAM → NVMe
    Promotion    NVMe → DRAM

All on the event loop; disks, SQLite and the opening of directories are on threads of their own. A
chain lives on one shelf, chosen by its first block, so that a lost disk costs its share of the
chains and not a block of each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiercache.arena import Region
from tiercache.config import DaemonConfig
from tiercache.daemon.cache import Cache
from tiercache.daemon.leases import ReadLease
from tiercache.daemon.nvme.budget import WriteBudget
from tiercache.daemon.nvme.catalog import Catalog, CatalogState
from tiercache.daemon.nvme.codecs import codec_number
from tiercache.daemon.nvme.directory import Directory
from tiercache.daemon.nvme.extents import Extents, Held
from tiercache.daemon.nvme.io import DiskQueue
from tiercache.daemon.nvme.promotion import Promotion
from tiercache.daemon.nvme.scanning import Scan
from tiercache.daemon.nvme.shelf import Shelf
from tiercache.daemon.nvme.writebehind import WriteBehind
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.space import Namespace
from tiercache.messages import KEY_BYTES

log = logging.getLogger("tiercache.daemon")

CLOSE_S = 5.0
DB_RESERVE_SHARE = 64
"""One part in so many of the cap is left to the database: 2% is ample for blocks of 8 KiB and more."""
_POLL_S = 0.01


class NvmeTier:
    """The tier below DRAM, on directories of local disks. Made, attached to a cache, then opened."""

    name = "nvme"

    def __init__(self, config: DaemonConfig, regions: dict[int, Region], landed: Callable[[], None]) -> None:
        self._config = config
        self._regions = regions
        self._landed = landed
        self._shelves: list[Shelf] = []
        self._budget = WriteBudget(config.nvme_write_budget_bytes)
        codec_number(config.nvme_codec)  # a missing library is told now, and not at the first write
        self._opened = False
        self._closing = False
        self._scan: Scan | None = None

    def attach(self, cache: Cache) -> None:
        """Say whose tier below this is."""
        self._cache = cache
        self._writes = WriteBehind(
            self._shelves, cache.space, self._regions, self._budget, self._config.nvme_codec
        )
        self._promotion = Promotion(cache, self._regions, self._shelf_of)
        self._extents = Extents(self._shelf_of)

    async def open(self) -> None:
        """Open all directories, on threads; the daemon answers meanwhile. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        directories = self._config.nvme_dirs
        cap_bytes = self._config.nvme_bytes // len(directories)
        opened = []
        for path in directories:
            segment_bytes = min(self._config.nvme_segment_bytes, cap_bytes)
            directory = Directory(path, cap_bytes, segment_bytes, cap_bytes // DB_RESERVE_SHARE)
            opened.append(await loop.run_in_executor(None, self._open_one, directory, loop))
        # In the order of the setting, since a chain finds its shelf by number.
        for directory, catalog, state in opened:
            queue = DiskQueue(directory, loop.call_soon_threadsafe)
            shelf = Shelf(directory, catalog, queue, state, self._cache.space, self._config.policy)
            self._shelves.append(shelf)
            shelf.start_loading()
            how = "direct I/O" if directory.direct else f"buffered I/O: {directory.direct_reason}"
            log.info("nvme directory %s: %d segments, %s", directory.path, len(directory.segments), how)
        self._opened = True

    @staticmethod
    def _open_one(
        directory: Directory, loop: asyncio.AbstractEventLoop
    ) -> tuple[Directory, Catalog, CatalogState]:
        directory.open()
        try:
            catalog = Catalog(directory.path, directory.superblock.directory_id, loop.call_soon_threadsafe)
            return directory, catalog, catalog.open()
        except BaseException:
            directory.close()
            raise

    # --- what DRAM asks and tells ----------------------------------------------------------------

    def _shelf_of(self, first_key: bytes) -> Shelf:
        return self._shelves[int.from_bytes(first_key[:4], "little") % len(self._shelves)]

    def blocks_after(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> int:
        """See `TierBelow`. Windowed namespaces are not kept here."""
        if not self._opened or any(namespace.table.windowed for namespace in namespaces):
            return 0
        shelf = self._shelf_of(keys[:KEY_BYTES])
        if shelf.offline:
            return 0
        length = len(keys) // KEY_BYTES
        for namespace in namespaces:
            length = shelf.length(namespace, keys, length)
        return max(0, length - first)

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int) -> None:
        """What was asked for and is not here yet is worth a write, budget or not."""
        if not self._opened or dram_blocks == 0:
            return
        shelf = self._shelf_of(keys[:KEY_BYTES])
        for namespace in namespaces:
            here = 0 if namespace.table.windowed else shelf.length(namespace, keys, dram_blocks)
            for number in range(here, dram_blocks if not namespace.table.windowed else 0):
                self._writes.add(namespace, keys[number * KEY_BYTES : (number + 1) * KEY_BYTES], asked_again=True)

    def promote(self, lease: ReadLease) -> None:
        """See `TierBelow`."""
        self._promotion.start(lease)

    def hold(self, namespaces: Sequence[Namespace], keys: bytes) -> Held | None:
        """See `TierBelow`."""
        return self._extents.hold(namespaces, keys)

    def published(self, namespace: Namespace, key: bytes, entry: int) -> None:
        """See `TierBelow`; what was promoted is here already and not written again."""
        if self._opened and not namespace.table.windowed:
            self._writes.add(namespace, key, asked_again=False)

    def flush(self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[int, bool], None]) -> None:
        """See `TierBelow`. In memory at once; answered when every directory has it on disk."""
        waiting = len(namespaces) * len(self._shelves)
        gone, durable = 0, True

        def noted(ok: bool) -> None:
            nonlocal waiting, durable
            waiting -= 1
            durable = durable and ok
            if waiting == 0:
                done(gone, durable)

        if not self._opened or waiting == 0:
            done(0, not self._config.nvme_dirs or self._opened)
            return
        for shelf in self._shelves:
            for namespace in namespaces:
                gone += shelf.flush(namespace, key, noted)

    def work(self) -> bool:
        """Unlinking, loading, writing and reading, a slice of each; True while there is more at once."""
        if not self._opened:
            return False
        more = [shelf.work() for shelf in self._shelves]
        if self._scan is not None and not self._scan.over:
            more.append(self._scan.pump())
        if not self._closing:
            self._promotion.look_again()
            self._promotion.pump()
        more.append(self._writes.pump())
        if self._promotion.take_landed() and not self._closing:
            self._landed()
        return any(more)

    # --- the end ---------------------------------------------------------------------------------

    async def close(self, grace_s: float) -> int:
        """Write what is dirty, roots first, for `grace_s`; returns the blocks that were left."""
        if not self._opened:
            return 0
        self._closing = True
        if self._scan is not None:
            self._scan.stop()
        deadline_s = time.monotonic() + grace_s
        self._writes.add_rest(self._dirty())
        while not self._writes.idle or self._writes.pump():
            if time.monotonic() >= deadline_s:
                break
            self.work()
            await asyncio.sleep(_POLL_S)
        left = sum(1 for _ in self._dirty())
        loop = asyncio.get_running_loop()
        for shelf in self._shelves:
            shelf.queue.stop(time.monotonic() + CLOSE_S)
            await loop.run_in_executor(None, shelf.catalog.close, CLOSE_S)
            shelf.directory.close()
        self._opened = False
        return left

    def _dirty(self) -> Iterator[tuple[Namespace, bytes]]:
        """Blocks of DRAM that are not here, parents before children."""
        index = self._cache.space.index
        for namespace in self._cache.all_namespaces():
            level = [] if namespace.table.windowed else [namespace.table.root]
            while level:
                below = []
                for parent in level:
                    child = index.first_child[parent]
                    while child != NO_ENTRY:
                        below.append(child)
                        child = index.next_sibling[child]
                for entry in below:
                    key = index.key[entry]
                    if not any(shelf.has(namespace, key) for shelf in self._shelves):
                        yield namespace, key
                level = below

    # --- checking --------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """See `TierBelow`."""
        if not self._opened:
            return []
        return [
            finding for shelf in self._shelves for finding in shelf.check_integrity(self._writes.slots_of(shelf))
        ]

    def scan(
        self, sample: int, bytes_per_s: int, wanted: Callable[[], bool], done: Callable[[list[str], int], None]
    ) -> bool:
        """See `TierBelow`."""
        if self._scan is not None and not self._scan.over:
            return False
        namespaces = self._cache.space.namespaces
        shelves = self._shelves if self._opened else []
        self._scan = Scan(shelves, namespaces, sample, bytes_per_s, wanted, done)
        self._scan.pump()
        return True

    # --- stats -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `TierBelow`."""
        shelves = self._shelves
        writes, promotion, extents = self._writes, self._promotion, self._extents
        return {
            "blocks": sum(table.blocks for shelf in shelves for table in shelf.index.tables.values()),
            "bytes": sum(shelf.allocator.used_bytes for shelf in shelves),
            "capacity_bytes": self._config.nvme_bytes,
            "written_blocks": writes.written_blocks,
            "written_bytes": writes.written_bytes,
            "codec": writes.codec,
            "saved_by_codec_bytes": writes.saved_bytes,
            "write_failed_blocks": writes.failed_blocks,
            "skipped_by_budget": writes.skipped_by_budget,
            "skipped_without_parent": writes.skipped_without_parent,
            "skipped_queue_full": writes.skipped_queue_full,
            "write_queue_blocks": writes.queued,
            "write_in_flight_bytes": writes.in_flight_bytes,
            "write_budget_bytes_per_day": self._budget.bytes_per_day,
            "write_budget_left": self._budget.fullness,
            "promoted_blocks": promotion.promoted_blocks,
            "promoted_bytes": promotion.promoted_bytes,
            "promotion_in_flight_bytes": promotion.in_flight_bytes,
            "direct_blocks": extents.direct_blocks,
            "direct_bytes": extents.direct_bytes,
            "direct_leases": extents.held_leases,
            "direct_reported_blocks": extents.reported_blocks,
            "bad_blocks": promotion.bad_blocks + extents.bad_blocks,
            "failed_reads": promotion.failed_reads,
            "directories": [shelf.stats() for shelf in shelves],
        }

    def reasons(self) -> list[str]:
        """What is not well, for `health`."""
        return [reason for shelf in self._shelves for reason in shelf.reasons()]
