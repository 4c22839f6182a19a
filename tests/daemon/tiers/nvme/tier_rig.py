"""A whole NVMe tier below a DRAM cache in this process: real files, disks that the test controls."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache_at_once import CacheAtOnce
from chains import key_of
from disk_rig import ObedientDisk
from memory_disks import MemoryDisk, MemoryRunner

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import NvmeDirectory
from tiercache.copies.arena import Region, create_region
from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.events.events import Events, Named
from tiercache.daemon.index.allocator import Allocator
from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.daemon.tiers.nvme.disk.carriers import why_threads
from tiercache.daemon.tiers.nvme.opening.runners import InDaemon, Runner, runner_for
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.daemon.tiers.nvme.tier import NvmeTier
from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT, BlockState
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK_BYTES = 64 << 10
REGION_BYTES = 2 << 20
DEADLINE_S = 60.0


def content(key: bytes, length: int) -> bytes:
    """What is stored under a key: bytes that no other key has, and no two pages alike."""
    pages = range(length // 4096)
    return b"".join(hashlib.blake2b(key + page.to_bytes(4, "little"), digest_size=64).digest() * 64 for page in pages)


def right(namespace: Namespace, key: bytes) -> bytes:
    """What is stored under a key in a namespace; no two have the same."""
    whose = namespace.fingerprint if namespace.spec.tp_rank or namespace.table.windowed else ""
    return content(key + whose.encode(), namespace.spec.block_bytes)


def held(allocator: Allocator) -> dict[int, int]:
    """Frames or slots that the kernel may be moving."""
    return allocator._holders  # rule: books that nobody else has


class TierRig:
    """`await rig.open()`, then store, load, flush; `rig.check()` after each step. Never two at a time.

    disks: how many directories there are, with real files and disks that the test controls; or disks in memory, which
    are of this clock. Everything else as the daemon's settings.
    """

    def __init__(
        self,
        root: Path,
        disks: int | Sequence[MemoryDisk] = 1,
        arena_regions: int = 8,
        nvme_bytes: int = 64 << 20,
        segment_bytes: int = 2 << 20,
        dirs: list[Path] | None = None,
        events: Events | None = None,
        region_bytes: int = REGION_BYTES,
        limits: CacheLimits | None = None,
        **settings: Any,
    ) -> None:
        self.memory = [] if isinstance(disks, int) else list(disks)
        count = disks if isinstance(disks, int) else len(disks)
        self.dirs = dirs or [root / f"nvme{number}" for number in range(count)]
        self.disks = {path: ObedientDisk() for path in self.dirs}
        self.at = dict(zip(self.dirs, self.memory, strict=False))
        """The disks in memory by their paths: the test may put others there."""
        config = DaemonConfig(
            run_dir=root / "run",
            nvme_dirs=tuple(map(NvmeDirectory, self.dirs)),
            nvme_bytes=nvme_bytes,
            nvme_segment_bytes=segment_bytes,
            nvme_io="threads" if self.memory or not ObedientDisk.offers_aio else "aio",
            **settings,
        )
        self.regions: dict[int, Region] = {}
        self.clock_s = self.memory[0].clock_s if self.memory else time.monotonic
        runner_of, clock_s = self._runner_of, self.clock_s
        self.tier = NvmeTier(config, self.regions, runner_of=runner_of, clock_s=clock_s)
        self.below = LowerTiers(self.tier, None, self.regions, clock_s=clock_s)
        self.cache = CacheAtOnce(self.clock_s, limits or CacheLimits(quarantine_bytes=1 << 30), self.below, events)
        self.below.attach(self.cache.space, self.cache.reads.growing, self.cache.writes, events)
        for region_id in range(arena_regions):
            fd = create_region(region_bytes, "test")
            self.regions[region_id] = Region(region_id, fd, region_bytes)
            self.tier.add_region(self.regions[region_id], fd)
            os.close(fd)
            self.cache.space.allocator.add_region(region_id, region_bytes)
        self.owner = Owner(b"a" * 16)

    def _runner_of(self, config: DaemonConfig, arena: ArenaFiles | None) -> Runner:
        if self.memory:
            return MemoryRunner(self.at)
        if arena is not None:
            return runner_for(config, arena)
        return InDaemon(lambda path: self.disks[path], why_threads(config.nvme_io, config.nvme_codec, True))

    # --- life ------------------------------------------------------------------------------------

    async def open(self) -> TierRig:
        await self.tier.open()
        await self.loaded()
        return self

    async def loaded(self) -> None:
        """All rows of earlier lives are in."""
        await self.until(lambda: not any(shelf.loading for shelf in self.shelves))

    async def close(self, grace_s: float = 0.0) -> int:
        """As at SIGTERM; returns the blocks that were left."""
        going_on = asyncio.ensure_future(self._keep_moving())
        self.below.end()
        left = await self.tier.close(grace_s)
        going_on.cancel()
        self._unmap()
        return left

    async def _keep_moving(self) -> None:
        while True:
            self.step_disks()
            await asyncio.sleep(0.01 if self.memory else 0.001)

    async def crash(self, landed: int = 0) -> None:
        """As much like kill -9 as one process allows: nothing that waits is written any more.

        Bits of `landed`: writes in the kernel that reach a disk in memory.
        """
        self.tier._keeping.stop()
        await asyncio.sleep(0)
        for shelf in self.shelves if not self.memory else ():
            self.disks[shelf.directory.path].gate.set()
            shelf.queue.stop(time.monotonic() + DEADLINE_S)
            shelf.catalog._writer.give_up()  # rule: nothing less ends a catalog as a kill does
            shelf.catalog.close(DEADLINE_S)
            shelf.directory.close()
        for disk in self.memory:
            disk.crash(landed)
        self.tier._shelves.clear()
        self._unmap()

    def _unmap(self) -> None:
        for region in self.regions.values():
            region.unmap()

    @property
    def shelves(self) -> list[Shelf]:
        return self.tier._shelves

    def step_disks(self) -> None:
        """Disks in memory do all that they were asked for."""
        for disk in self.memory:
            disk.step()

    async def work(self, rounds: int = 1) -> None:
        """The daemon's work, by the slice, without the disks'."""
        for _ in range(rounds):
            self.cache.work()
            self.cache.expire()
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Do the daemon's work until the condition holds."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end_s, f"not in time: {self.tier.stats()}"  # rule: the deadline of all waiting
            self.cache.work()
            self.cache.expire()
            self.step_disks()
            await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Nothing is on its way to the disks, or waits to be."""
        await self.until(lambda: self.tier._writes.idle)
        await self.committed()

    async def committed(self) -> None:
        """All that was posted to the catalogs is in the databases."""
        await self.until(lambda: all(shelf.catalog.pending == 0 for shelf in self.shelves))

    def check(self) -> None:
        assert self.cache.check_integrity() == []
        assert self.tier.check_integrity() == []
        writes = self.tier._writes
        if writes.in_flight_bytes == 0:
            assert not held(self.cache.space.allocator), "a frame is held for ever"
        for shelf in self.shelves:
            if shelf.queue.in_flight == 0 and not self.tier.promotion._ended:  # rule: what has come and waits
                assert not held(shelf.allocator), "a slot is held for ever"
                own = {*shelf.index.unlinking_entries(), *(table.root for table in shelf.index.tables.values())}
                pinned = {entry for entry, pins in enumerate(shelf.index.pins) if pins and shelf.index.state[entry]}
                own |= set(shelf.slots.tails)
                flying = writes._flying  # rule: those complete and not visible yet hold their parents
                held_parents = writes._held  # rule: likewise
                own |= {entry for name, entry in held_parents.items() if flying[name].shelf is shelf}
                if self.tier.grants is not None:
                    own |= {grant.pin for grant in self.tier.grants.leases.values() if grant.shelf is shelf}
                assert pinned <= own, "an entry is pinned for ever"

    # --- blocks ----------------------------------------------------------------------------------

    def namespace(
        self, block_bytes: int = BLOCK_BYTES, rank: int = 0, window_blocks: int = 0, tenant: str = ""
    ) -> Namespace:
        spec = NamespaceSpec(
            engine="t",
            layout="l",
            dtype="uint8",
            block_size=1,
            block_bytes=block_bytes,
            tp_rank=rank,
            tp_size=8,
            window_blocks=window_blocks,
        )
        return self.cache.space.open_namespace(spec.of_tenant(tenant) if tenant else spec)

    def view(self, frame: int, length: int) -> memoryview:
        return self.regions[frame >> REGION_SHIFT].view(frame & OFFSET_MASK, length)

    def store(self, namespace: Namespace, chain: bytes, first: int = 0, named: Named | None = None) -> list[BlockState]:
        """Reserve, copy, commit, as a client does."""
        parent = key_of(chain, first - 1) if first else b""
        got = self.cache.reserve(self.owner, namespace, parent, chain[KEY_BYTES * first :], 10, named)
        assert not got.parent_missing
        numbers = [number for number, state in enumerate(got.states) if state is BlockState.FRAME]
        length = namespace.spec.block_bytes
        for number, frame in zip(numbers, got.frames, strict=True):
            self.view(frame, length)[:] = right(namespace, key_of(chain, first + number))
        self.cache.writes.commit(self.owner, got.lease_id, numbers)
        return got.states

    async def store_below(self, namespaces: list[Namespace], chain: bytes) -> None:
        """Store a chain in each namespace, which NVMe alone has then."""
        for namespace in namespaces:
            self.store(namespace, chain)
        await self.settled()
        self.forget_dram()

    def match(self, namespaces: list[Namespace], chain: bytes, ttl_s: float = 60.0) -> ReadLease | None:
        """A lease on what there is, with what is below on its way up."""
        return self.cache.match(self.owner, namespaces, chain, ttl_s, promote=True).lease

    def read(self, lease: ReadLease, *namespaces: Namespace) -> int:
        """Compare every block under a lease, then release it. Returns how many they are, 0 for a revoked lease."""
        blocks, wrong = lease.blocks, list[str]()
        for namespace in namespaces:
            first, length = first_of_window(namespace, blocks), namespace.spec.block_bytes
            frames = self.cache.reads.frames(lease, namespace, first, blocks - first)
            assert len(frames) == blocks - first or lease.over
            for number, frame in enumerate(frames, first):
                if bytes(self.view(frame, length)) != right(namespace, key_of(lease.keys, number)):
                    wrong.append(f"block {number} of namespace {namespace.number}")
        if not self.cache.reads.release(self.owner, lease.lease_id):
            return 0
        assert not wrong, f"wrong bytes: {wrong}"
        return blocks

    async def load(self, namespace: Namespace, chain: bytes) -> int:
        """Match, wait for what comes up, compare, release."""
        return await self.load_all([namespace], chain)

    async def load_all(self, namespaces: list[Namespace], chain: bytes) -> int:
        """As `load`, what all of the namespaces have."""
        lease = self.match(namespaces, chain)
        if lease is None:
            return 0
        await self.until(lambda: lease.over or lease.lease_id not in self.cache.reads.growing.leases)
        return self.read(lease, *namespaces)

    def forget_blocks(self, namespace: Namespace, keys: bytes) -> None:
        """Flush these blocks from DRAM only; in a chain, those behind them go too."""
        for at in range(0, len(keys), KEY_BYTES):
            self.cache.flush_dram([namespace.number], keys[at : at + KEY_BYTES])

    def forget_dram(self) -> None:
        """Flush DRAM only."""
        numbers = [namespace.number for namespace in self.cache.space.all_namespaces()]
        more = self.cache.flush_dram(numbers, b"")[1]
        while more:
            more = any(table.unlinking for table in self.cache.space.index.tables.values())
            self.cache.space.work()

    async def flush(self, key: bytes = b"", tier: str = "all") -> bool:
        """Flush as the service does; returns whether that is durable."""
        namespaces = self.cache.space.all_namespaces()
        if tier != "nvme":
            self.cache.flush_dram([namespace.number for namespace in namespaces], key)
        if tier == "dram":
            return True
        answers: list[bool] = []
        self.tier.flush(namespaces, key, lambda blocks, durable: answers.append(durable))
        await self.until(lambda: bool(answers))
        assert len(answers) == 1
        return answers[0]
