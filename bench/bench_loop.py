"""What a block costs the daemon's loop and its catalog on the way between DRAM and NVMe.

    python bench/bench_loop.py [--dir DIR] [--blocks N] [--rounds N] [--runs N [N ...]] [--profile PATH]

The cache and its NVMe tier in this process, without sockets: a chain is stored and published, written behind, forgotten
in DRAM and promoted again; then chains go into a full directory. Blocks have 4 KiB: the loop does the same for larger
ones, except that it has slept before each. So blocks of 2 MiB come next, one or eight at a time, with a pause between.
Counted are CPU microseconds a block of the loop's thread and of the catalog's, so others on the machine matter little.
Prints a table and one JSON object as the last line. `--runs`: blocks of one reserve and commit, 512 if not given.
`--profile`: cProfile's table of the loop, by path.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, SEED, Report

sys.path.insert(0, str(ROOT))

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import NvmeDirectory
from tiercache.copies.arena import Region, create_region
from tiercache.daemon.cache import Cache, CacheLimits
from tiercache.daemon.ground.memory import collect_in_small_parts
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.daemon.tiers.nvme.tier import NvmeTier
from tiercache.protocol.messages import BlockState
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK_BYTES = 4096
MIB = 1 << 20
RESERVED = 512
"""Blocks of one reserve and commit, as clients have them, unless `--runs` says otherwise."""
LARGE_BYTES = 2 << 20
LARGE_AT_ONCE = (1, 8)
LARGE_SEGMENT_BYTES = 256 * MIB
"""As many blocks in a segment as a daemon has, about: making one costs more than a block."""
LARGE_ROUNDS = 12
PAUSE_S = 0.003
TICK_S = 0.01
DEADLINE_S = 120.0


def thread_cpu_s(native_id: int) -> float:
    """CPU seconds of a thread of this process so far (Linux numbers these clocks after the thread)."""
    return time.clock_gettime((~native_id << 3) | 6)


class Bench:
    """A cache over one directory, and the loop that works for both."""

    def __init__(
        self,
        where: Path,
        blocks: int,
        nvme_bytes: int,
        block_bytes: int = BLOCK_BYTES,
        reserved: int = RESERVED,
        segment_bytes: int = 8 * MIB,
    ) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.reserved = reserved
        config = DaemonConfig(
            run_dir=where / "run",
            nvme_dirs=(NvmeDirectory(where / "nvme"),),
            nvme_bytes=nvme_bytes,
            nvme_segment_bytes=segment_bytes,
        )
        self.regions: dict[int, Region] = {}
        self.tier = NvmeTier(config, self.regions, soon=self._soon)
        below = LowerTiers(self.tier, None, self.regions, soon=self._soon)
        self.cache = Cache(time.monotonic, CacheLimits(quarantine_bytes=1 << 30), below)
        below.attach(self.cache.space, self.cache.reads.growing, self.cache.writes)
        size_bytes = blocks * block_bytes + 4 * MIB
        fd = create_region(size_bytes, "bench")
        self.regions[0] = Region(0, fd, size_bytes)
        os.close(fd)
        self.cache.space.allocator.add_region(0, size_bytes)
        self.owner = Owner(b"b" * 16)
        self._asked = False
        self._random = random.Random(SEED)

    async def open(self) -> Namespace:
        self.cache.work_ns, self.cache.writes.pending.publish_ns = 2_000_000, 4_000_000
        self.tier.limit_work(2_000_000)
        await self.tier.open()
        await self.until(lambda: not any(shelf.loading for shelf in self.tier._shelves))
        self.catalog_thread = next(one for one in threading.enumerate() if one.name == "catalog")
        return self.cache.space.open_namespace(
            NamespaceSpec(engine="bench", layout="l", dtype="uint8", block_size=16, block_bytes=self.block_bytes)
        )

    def _soon(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self._asked = False
        if self.cache.work():
            self._soon()

    async def until(self, condition: Callable[[], bool]) -> None:
        """As the daemon's loop: work when asked to, and at each tick."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"not in time: {self.tier.stats()}"
            if not self._asked:
                self._work()
            await asyncio.sleep(TICK_S)
            self.cache.expire()

    def keys(self) -> bytes:
        return self._random.randbytes(16 * self.blocks)

    def store(self, namespace: Namespace, keys: bytes) -> None:
        """Reserve and commit, as a client with many blocks does."""
        parent = b""
        for at in range(0, len(keys), 16 * self.reserved):
            part = keys[at : at + 16 * self.reserved]
            got = self.cache.writes.reserve(self.owner, namespace, parent, part, 60.0)
            assert got.states.count(BlockState.FRAME) * 16 == len(part)
            self.cache.writes.commit(self.owner, got.lease_id, range(len(part) // 16))
            parent = part[-16:]

    async def written(self) -> None:
        await self.until(lambda: self.tier._writes.idle and self.cache.below.settled)
        await self.until(lambda: all(shelf.catalog.pending == 0 for shelf in self.tier._shelves))

    async def write(self, namespace: Namespace, keys: bytes) -> None:
        before = self.tier._writes.written_blocks
        self.store(namespace, keys)
        await self.written()
        assert self.tier._writes.written_blocks - before == self.blocks, self.tier.stats()

    async def read(self, namespace: Namespace, keys: bytes) -> None:
        lease = finish(self.cache.reads.match(self.owner, [namespace], keys, 60.0, promote=True)).lease
        assert lease is not None
        await self.until(lambda: lease.over or lease.lease_id not in self.cache.reads.growing.leases)
        assert lease.blocks == self.blocks
        self.cache.reads.release(self.owner, lease.lease_id)

    async def forget(self, namespace: Namespace) -> None:
        finish(self.cache.flush([namespace], b"", None))
        await self.until(lambda: not namespace.table.unlinking and not self.cache.work())

    async def measure(self, what: Callable[[], object], profile: cProfile.Profile | None) -> tuple[float, float]:
        """CPU microseconds a block, of this thread and of the catalog's."""
        assert self.catalog_thread.native_id is not None
        catalog_s, loop_s = thread_cpu_s(self.catalog_thread.native_id), time.thread_time()
        if profile is not None:
            profile.enable()
        await what()  # type: ignore[misc]
        if profile is not None:
            profile.disable()
        loop_s = time.thread_time() - loop_s
        catalog_s = thread_cpu_s(self.catalog_thread.native_id) - catalog_s
        return loop_s / self.blocks * 1e6, catalog_s / self.blocks * 1e6

    def close(self) -> None:
        for region in self.regions.values():
            region.unmap()


Costs = dict[str, list[tuple[float, float]]]


async def chains(where: Path, blocks: int, rounds: int, reserved: int, profiles: dict[str, cProfile.Profile]) -> Costs:
    """One long chain in each round, stored in runs of `reserved` blocks, written and promoted again."""
    costs: Costs = {"write": [], "read": []}
    bench = Bench(where, blocks, (rounds + 3) * blocks * BLOCK_BYTES, reserved=reserved)
    namespace = await bench.open()
    for number in range(rounds + 2):
        keys, warm = bench.keys(), number < 2
        for name, path in (("write", bench.write), ("read", bench.read)):
            profile = None if warm else profiles.get(name)
            cost = await bench.measure(lambda: path(namespace, keys), profile)  # noqa: B023 (called at once)
            costs[name] += [] if warm else [cost]
            await bench.forget(namespace)
    await bench.tier.close(0.0)
    bench.close()
    return costs


async def full(where: Path, blocks: int, rounds: int, profile: cProfile.Profile | None) -> list[tuple[float, float]]:
    """Chains that go into a directory that has no room: for each block another one leaves."""
    costs = []
    bench = Bench(where, blocks, 3 * blocks * BLOCK_BYTES // 2)
    namespace = await bench.open()
    for number in range(rounds + 2):
        keys, warm = bench.keys(), number < 2
        cost = await bench.measure(lambda: bench.write(namespace, keys), None if warm else profile)  # noqa: B023 (called at once)
        costs += [] if warm else [cost]
        await bench.forget(namespace)
    await bench.tier.close(0.0)
    bench.close()
    return costs


async def large(where: Path, at_once: int, rounds: int) -> Costs:
    """A few blocks of 2 MiB at a time, and a pause after which the loop finds cold caches."""
    costs: Costs = {"write": [], "read": []}
    turns = LARGE_ROUNDS * rounds // at_once + 1
    nvme_bytes = (turns + 40) * at_once * LARGE_BYTES
    bench = Bench(where, at_once, nvme_bytes, LARGE_BYTES, segment_bytes=LARGE_SEGMENT_BYTES)
    namespace, cold = await bench.open(), bytearray(4 * MIB)
    for _ in range(turns):
        keys = bench.keys()
        for name, path in (("write", bench.write), ("read", bench.read)):
            time.sleep(PAUSE_S)
            cold[:] = bytes(len(cold))
            costs[name].append(await bench.measure(lambda: path(namespace, keys), None))  # noqa: B023 (called at once)
            await bench.forget(namespace)
    await bench.tier.close(0.0)
    bench.close()
    return {name: its[1:] for name, its in costs.items()}


async def measured(where: Path, options: argparse.Namespace, profiles: dict[str, cProfile.Profile]) -> Costs:
    """All cases, by the names under which they are reported."""
    costs: Costs = {}
    for reserved in options.runs:
        name = "" if reserved == RESERVED else f"_runs_of_{reserved}"
        found = await chains(where / f"runs{reserved}", options.blocks, options.rounds, reserved, profiles)
        costs |= {path + name: its for path, its in found.items()}
    costs["full"] = await full(where / "full", options.blocks, options.rounds, profiles.get("full"))
    for at_once in LARGE_AT_ONCE:
        found = await large(where / f"large{at_once}", at_once, options.rounds)
        costs |= {f"{path}_2m_{at_once}": its for path, its in found.items()}
    return costs


LABELS = {"write": "write-behind", "read": "promotion", "full": "write-behind, full directory"}


def label(name: str) -> str:
    """What people are told of a case."""
    path, _, rest = name.partition("_")
    return " ".join([LABELS[path], rest.replace("_", " ").replace("2m ", "of 2 MiB, at once: ")]).strip()


def main() -> None:
    """Runs everything, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to use")
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, nargs="+", default=[RESERVED], help="blocks of one reserve and commit")
    parser.add_argument("--profile", type=Path, help="write what the loop's functions take to this file")
    options = parser.parse_args()
    where = Path(tempfile.mkdtemp(prefix="tiercache-bench-loop-", dir=options.dir or os.environ.get("TMPDIR")))
    profiles = {name: cProfile.Profile(time.thread_time) for name in LABELS} if options.profile else {}
    collect_in_small_parts()
    try:
        costs = asyncio.run(measured(where, options, profiles))
    finally:
        shutil.rmtree(where, ignore_errors=True)
    report = Report("bench_loop")
    for name, its in costs.items():
        for thread, each in zip(("loop", "catalog"), zip(*its, strict=True), strict=True):
            report.add(f"{thread}_us_{name}", f"{label(name)}: {thread}", statistics.median(each), "us", samples=each)
    if options.profile:
        with options.profile.open("w") as file:
            for name, profile in profiles.items():
                print(f"=== {name}", file=file)
                pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)
    report.finish()


if __name__ == "__main__":
    main()
