"""The NVMe tier: implements the seam to DRAM, and starts and stops its parts.

    Shelf           one directory: index, slots, catalog, I/O queue
    WriteBehind     DRAM → NVMe
    ShelfSources    NVMe → DRAM: what `dram/promotion` reads from

    Keeper          opens a directory and keeps it usable
    ShelfPlacement  which shelf a chain lives on

All on the event loop; disks, SQLite and the opening of directories are on threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.slices import Steps, finish
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch
from tiercache.daemon.tiers.dram.below import FlushBelow, TierBelow
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.forms.cipher import load_cipher
from tiercache.daemon.tiers.forms.codecs import codec_number
from tiercache.daemon.tiers.nvme.check.scan import Scan
from tiercache.daemon.tiers.nvme.direct.extents import Held, HeldExtents
from tiercache.daemon.tiers.nvme.direct.grants import Grants
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.moves.fairness import Fairness
from tiercache.daemon.tiers.nvme.moves.flushes import Flushes
from tiercache.daemon.tiers.nvme.moves.offers import Offers
from tiercache.daemon.tiers.nvme.moves.placement import ShelfPlacement
from tiercache.daemon.tiers.nvme.moves.shelf_source import ShelfSource, ShelfSources
from tiercache.daemon.tiers.nvme.moves.writebehind import WriteBehind
from tiercache.daemon.tiers.nvme.opening.keeper import Keeper, Keepers, close_shelves
from tiercache.daemon.tiers.nvme.opening.runners import Runner, runner_for
from tiercache.daemon.tiers.nvme.opening.worker_choice import worker_processes
from tiercache.daemon.tiers.nvme.shelf.parts import BlockQueue, OpenDirectory
from tiercache.daemon.tiers.nvme.shelf.registry import Registry
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.daemon.tiers.nvme.worker.opening import Plan
from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles
from tiercache.protocol.messages import KEY_BYTES, BlockView

from . import inspection as viewing

log = logging.getLogger("tiercache.daemon")

_POLL_S = 0.01
_LOOK_AGAIN_S = 0.05
"""Shelves are seen to by then in any case: under a flood of requests ticks are rare."""


def dirty(index: Index, namespaces: Sequence[Namespace], shelves: Sequence[Shelf]) -> Iterator[tuple[Namespace, bytes]]:
    """Dirty blocks: chains, parents before children, then windows, which go where those are."""
    for namespace in sorted(namespaces, key=lambda namespace: namespace.table.windowed):
        level = [] if namespace.spec.dram_only else [namespace.table.root]
        while level:
            below = []
            for parent in level:
                child = index.first_child[parent]
                while child != NO_ENTRY:
                    below.append(child)
                    child = index.next_sibling[child]
            for entry in below:
                key = index.key[entry]
                if not any(shelf.has(namespace, key) for shelf in shelves):
                    yield namespace, key
            level = below


class NvmeTier(TierBelow):
    """The tier below DRAM, on directories of local disks. Made, attached to a cache, then opened."""

    name = "nvme"
    tiers: tuple[str, ...] = (name,)

    def __init__(
        self,
        config: DaemonConfig,
        regions: dict[int, Region],
        soon: Callable[[], None] = lambda: None,
        runner_of: Callable[[DaemonConfig, ArenaFiles | None], Runner] = runner_for,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        has_workers = worker_processes(config.nvme_workers, len(config.nvme_dirs)) > 0
        self._arena = ArenaFiles() if has_workers else None
        self._runner = runner_of(config, self._arena)
        self._regions = regions
        self._soon = soon
        self._clock_s = clock_s
        self._shelves: list[Shelf] = []
        self._cipher = None if config.nvme_key is None else load_cipher(config.nvme_key)
        codec_number(config.nvme_codec)  # report a missing library now, not at the first write
        self._placement = ShelfPlacement(self._shelves)
        self._hung: set[Shelf] = set()
        self._keepers = [self._keeper(path, cap_bytes) for path, cap_bytes in config.nvme_shares().items()]
        self._scan: Scan | None = None
        self._shelves_due = True  # a tick has come, or a shelf has asked for work
        self._look_again_s = 0.0
        self.sources = ShelfSources(self._placement)
        self.grants: Grants | None = None

    def attach(self, space: Space, events: Events | None, promotion: Promotion) -> None:
        """Attach it as the tier below DRAM, from whose `sources` blocks are promoted."""
        self._space, self._events, self.promotion = space, events, promotion
        self._keeping = Keepers(self._keepers, self._clock_s)
        self._budget = WriteBudget(self._config.nvme_write_budget_bytes, self._clock_s)
        self.fairness = Fairness(space, self._shelves)
        self._flushes = Flushes(space.all_namespaces, self._clock_s)
        self._writes = WriteBehind(
            self._placement,
            space,
            self._regions,
            self._budget,
            self.fairness,
            self._config.nvme_codec,
            self._soon,
            events,
            sealed=self._cipher is not None,
        )
        self._offers = Offers(self._writes, self._placement, lambda: self._may_write, self._soon)
        self._extents = HeldExtents(self._placement)
        self.grants = Grants(
            self._placement,
            self._budget,
            self.fairness,
            lambda: self._may_write,
            space.counters,
            space.policies.clock_s,
            self._config.quarantine_per_client_bytes,
        )

    def _keeper(self, path: Path, cap_bytes: int) -> Keeper:
        config = self._config
        plan = Plan(
            path,
            cap_bytes,
            config.nvme_segment_bytes,
            self._cipher,
            config.nvme_shrink,
            config.nvme_require_mount,
        )
        return Keeper(plan, self._runner, self._opened, self._gone)

    def add_region(self, region: Region, fd: int) -> None:
        """The arena has one more region, in this file: the descriptor stays the caller's."""
        if self._arena is not None:
            self._arena.add(region, fd)

    async def open(self, patience_s: float | None = None) -> None:
        """Begin to open all directories; returns when each has been tried, or after `patience_s`.

        Open directories are used meanwhile; the others are retried as long as the daemon lives. Raises ConfigError when
        a setting was found to be wrong by then.
        """
        await self._keeping.open(patience_s)

    async def _opened(self, found: OpenDirectory) -> Shelf:
        """Make the shelf of an open directory, and use it; until its namespaces are known it counts as closed."""
        directory, catalog, state, names, make_queue = found
        registry = Registry(str(directory.path), catalog, self._space)
        for _ in registry.adopt(names):
            await asyncio.sleep(0)
        queue = make_queue()
        shelf = Shelf(directory, catalog, queue, state, registry, self._space, self.shelves_soon, self._clock_s)
        if self._events is not None:
            shelf.tell(self._events)
        self.use(shelf)
        order = [keeper.path for keeper in self._keepers]
        self._shelves.sort(key=lambda shelf: order.index(shelf.directory.path))
        self.shelves_soon()
        how = "direct I/O" if directory.direct else f"buffered I/O: {directory.direct_reason}"
        log.info("nvme directory %s: %d segments, %s, by %s", directory.path, directory.segment_count, how, queue.io)
        if self._config.nvme_io == "aio" and queue.io != "aio":
            log.warning("nvme directory %s: threads do its I/O, not aio: %s", directory.path, queue.io_reason)
        return shelf

    def use(self, shelf: Shelf) -> None:
        """Blocks may go there from now on. Its rows are loaded once it was told of earlier flushes."""
        self._shelves.append(shelf)
        self._flushes.opened(shelf.directory.path, shelf)

    def _gone(self, shelf: Shelf) -> None:
        """A directory has gone: it gets no more requests, and no request waits for it."""
        shelf.retired = True
        self._shelves.remove(shelf)
        self._hung.discard(shelf)
        self._flushes.gone(shelf)
        self.promotion.give_up(self.sources.of(shelf))
        self._writes.give_up(shelf)
        self._space.policies.hints.forget(shelf.index)
        self.sources.gone(shelf)

    @property
    def _may_write(self) -> bool:
        return bool(self._shelves) and self._keeping.may_write

    # --- what DRAM asks and tells ----------------------------------------------------------------

    def expire(self) -> None:
        """See `TierBelow`."""
        self._shelves_due = True
        for shelf in self._shelves:
            shelf.slots.tails.lapse()
        if self.grants is not None:
            self.grants.expire()

    def writer_gone(self, instance: bytes) -> None:
        """See `TierBelow`."""
        for shelf in self._shelves:
            shelf.slots.tails.writer_gone(instance)

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """See `TierBelow`."""
        return self._placement.find(namespace, keys, limit)[1]

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        """See `TierBelow`."""
        return self._placement.lookup(namespace)

    def matched(
        self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> None:
        """Blocks used in DRAM count as used here too; blocks asked for and not here yet are worth a write."""
        self._offers.matched(namespaces, keys, dram_blocks, found_blocks, how)

    @property
    def unlinking(self) -> bool:
        """See `TierBelow`."""
        return self._placement.takes_walks

    def holders(self, namespace: Namespace, keys: bytes) -> list[tuple[Index, Table]]:
        """See `TierBelow`."""
        if namespace.table.windowed:
            shelves = [shelf for shelf in self._shelves if namespace.number in shelf.index.tables]
        else:
            shelf, _ = self._placement.find(namespace, keys, len(keys) // KEY_BYTES)
            shelves = [] if shelf is None else [shelf]
        return [(shelf.index, shelf.table(namespace)) for shelf in shelves]

    def hold(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> Held | None:
        """See `TierBelow`."""
        return self._extents.hold(namespaces, keys, first)

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        """See `TierBelow`; promoted blocks are here already and not written again."""
        if namespace.spec.dram_only:
            return
        source = self.promotion.committing
        if isinstance(source, ShelfSource):
            keys = source.missing(namespace, keys)
        self._writes.add_many(namespace, keys, asked_again=False, before=before)

    def limit_work(self, cpu_ns: int) -> None:
        """Stop a batch of writes after that CPU time: for a daemon that serves others meanwhile."""
        self._writes.pump_ns = cpu_ns

    def begin_flush(
        self,
        namespaces: Sequence[Namespace],
        key: bytes,
        done: Callable[[int, bool], None],
        named: bool = False,
        tier: str = "all",
    ) -> FlushBelow:
        """See `TierBelow`. Each part in memory at once; answered when every directory has all of it on disk."""
        return self._flushes.begin(namespaces, key, done, self._shelves, self._keeping.closed, named)

    def flush(self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[int, bool], None]) -> None:
        """`begin_flush`, all of it at once."""
        flush = self.begin_flush(namespaces, key, done)
        flush.forget(namespaces)
        flush.end()

    @property
    def settled(self) -> bool:
        """See `TierBelow`."""
        return (self._offers.idle and self._writes.idle) or not self._may_write

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        """See `TierBelow`."""
        return self._see_to_shelves, self._offer, self._settle, self._write

    def shelves_soon(self) -> None:
        """A shelf has work that should not wait for the next tick."""
        self._shelves_due = True
        self._soon()

    def _see_to_shelves(self) -> bool:
        """At each tick, and when a shelf asks for it: most rounds are for a block that has arrived."""
        now_s = self._clock_s()
        if not self._shelves_due and now_s < self._look_again_s:
            return False
        self._shelves_due, self._look_again_s = False, now_s + _LOOK_AGAIN_S
        more = [shelf.work() for shelf in self._shelves]
        self._see_to_hung_disks()
        more.append(self._flushes.work())
        if self._scan is not None and not self._scan.over:
            more.append(self._scan.pump())
        self._shelves_due = any(more) or self._shelves_due
        return self._shelves_due

    def _settle(self) -> bool:
        return self._writes.settle()

    def _offer(self) -> bool:
        return not self._offers.idle and self._may_write and self._offers.work()

    def _write(self) -> bool:
        return self._writes.has_work and self._may_write and self._writes.pump()

    def _see_to_hung_disks(self) -> None:
        for shelf in self._shelves:
            if not shelf.offline:
                if shelf in self._hung:
                    log.info("nvme directory %s answers again", shelf.directory.path)
                self._hung.discard(shelf)
            elif shelf not in self._hung:
                log.error("nvme directory %s hangs: nothing is asked of it meanwhile", shelf.directory.path)
                self._hung.add(shelf)
                self.promotion.give_up(self.sources.of(shelf))

    # --- the end ---------------------------------------------------------------------------------

    async def close(self, grace_s: float) -> int:
        """Write dirty blocks, roots first, for `grace_s`; returns how many were left."""
        self._keeping.stop()
        if self._scan is not None:
            self._scan.stop()
        deadline_s = self._clock_s() + grace_s
        self._writes.add_rest(self._dirty(), deadline_s)
        while True:
            self._shelves_due = True
            more = any([self.promotion.land(), *(kind() for kind in self.kinds)])
            if self._writes.idle or not self._shelves or self._clock_s() >= deadline_s:
                break
            await asyncio.sleep(0 if more else _POLL_S)
        left = sum(1 for _ in self._dirty())
        self._flushes.close()
        await close_shelves(self._runner, self._shelves, self._keeping.leaving, self._writes.settle)
        self._shelves.clear()
        if self._arena is not None:
            self._arena.close()
        return left

    def _dirty(self) -> Iterator[tuple[Namespace, bytes]]:
        return dirty(self._space.index, self._space.all_namespaces(), self._shelves)

    # --- checking --------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """`check`, all of it at once."""
        return finish(self.check())

    def check(self) -> Steps[list[str]]:
        """See `TierBelow`."""
        findings: list[str] = []
        for shelf in list(self._shelves):
            findings += yield from shelf.check(partial(self._written, shelf))
        pending = self._writes.pending() + (Counter() if self.grants is None else self.grants.pending())
        findings += [] if self.grants is None else (yield from self.grants.check())
        return findings + self.fairness.check_integrity(pending)

    def _written(self, shelf: Shelf) -> list[int]:
        given = [] if self.grants is None else self.grants.slots_of(shelf)
        return self._writes.slots_of(shelf) + given

    def scan(
        self, sample: int, bytes_per_s: int, wanted: Callable[[], bool], done: Callable[[list[str], int], None]
    ) -> bool:
        """See `TierBelow`."""
        if self._scan is not None and not self._scan.over:
            return False
        namespaces = self._space.namespaces
        self._scan = Scan(list(self._shelves), namespaces, sample, bytes_per_s, wanted, done, self._clock_s)
        self._scan.pump()
        return True

    # --- what operators ask ----------------------------------------------------------------------

    def places(self, namespace: Namespace, key: bytes) -> list[BlockView]:
        """See `TierBelow`."""
        return viewing.places(self._shelves, namespace, key)

    def chain(self, namespace: Namespace, key: bytes) -> Steps[list[bytes]]:
        """See `TierBelow`."""
        return viewing.chain(self._shelves, namespace, key)

    def blocks_of(self, number: int) -> int:
        """See `TierBelow`."""
        return viewing.blocks_of(self._shelves, number)

    # --- stats -----------------------------------------------------------------------------------

    def stats_by_tier(self) -> dict[str, dict[str, Any]]:
        """See `TierBelow`."""
        return {self.name: self.stats()}

    def stats(self) -> dict[str, Any]:
        """What `stats` shows of this tier."""
        shelves = self._shelves
        return {
            "blocks": sum(table.blocks for shelf in shelves for table in shelf.index.tables.values()),
            "bytes": sum(shelf.allocator.used_bytes for shelf in shelves),
            "capacity_bytes": self._config.nvme_capacity_bytes,
            "evicted_blocks": sum(shelf.slots.evicted_blocks for shelf in shelves),
            **viewing.write_figures(self._writes, self._placement.copies, self._budget, self._keepers),
            **viewing.read_figures(self.sources.promoted, self.promotion, self._extents),
            **({} if self.grants is None else self.grants.stats()),
            "directories": [keeper.stats() for keeper in self._keepers],
        }

    def queues(self) -> dict[str, BlockQueue]:
        """By directory: the source of histograms."""
        return {str(shelf.directory.path): shelf.queue for shelf in self._shelves}

    def reasons(self) -> list[str]:
        """What is not well, for `health`."""
        return [reason for keeper in self._keepers for reason in keeper.reasons()]
