"""A host of a deployment, as far as its cache goes: DRAM over a shared tier, without NVMe, in this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_at_once import CacheAtOnce
from chains import key_of

from tiercache.copies.arena import Region, create_region
from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.daemon.tiers.shared.lines import Lines
from tiercache.daemon.tiers.shared.naming import Naming
from tiercache.daemon.tiers.shared.settings import SharedSettings
from tiercache.daemon.tiers.shared.stores.store import SharedStore
from tiercache.daemon.tiers.shared.tier import SharedTier
from tiercache.daemon.tiers.shared.value import ValueForm
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT, BlockState
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK_BYTES = 4096
REGION_BYTES = 2 << 20
PATIENCE_S = 60.0
KEY = bytes(range(32))


def content(namespace: Namespace, key: bytes, version: int = 0) -> bytes:
    """What is stored under a key in a namespace; no two have the same. Versions as if models changed under a name."""
    seed = version.to_bytes(8, "little") + key + namespace.fingerprint.encode()
    return (seed * (namespace.spec.block_bytes // len(seed) + 1))[: namespace.spec.block_bytes]


class HostRig:
    """`host.open()`; then store, load, flush. `secret` None: plain values; `version`: of what is stored.

    With `lines` and `clock_s` the test drives the time and the jobs (fleet.py).
    """

    def __init__(
        self,
        store: SharedStore,
        state: Path,
        *,
        secret: bytes | None = KEY,
        deployment: str = "default",
        regions: int = 4,
        region_bytes: int = REGION_BYTES,
        clock_s: Callable[[], float] = time.monotonic,
        lines: Any = Lines,
        **settings: Any,
    ) -> None:
        cipher = None if secret is None else Cipher(secret, "shared_key")
        names = b"" if cipher is None else cipher.derived_key(b"names")
        self.settings = SharedSettings(store, Naming(deployment, names), ValueForm(cipher), state, **settings)
        self.regions: dict[int, Region] = {}
        self.shared = SharedTier(self.settings, self.regions, lambda: None, clock_s, lines)
        self.below = LowerTiers(None, self.shared, self.regions)
        self.cache = CacheAtOnce(clock_s, CacheLimits("lru", quarantine_bytes=1 << 30), self.below)
        self.below.attach(self.cache.space, self.cache.reads.growing, self.cache.writes)
        for region_id in range(regions):
            fd = create_region(region_bytes, "test")
            self.regions[region_id] = Region(region_id, fd, region_bytes)
            os.close(fd)
            self.cache.space.allocator.add_region(region_id, region_bytes)
        self.owner = Owner(os.urandom(16))
        self.version = 0

    def open(self) -> HostRig:
        self.shared.open()
        return self

    async def close(self, grace_s: float = PATIENCE_S) -> int:
        self.below.end()
        left = await self.shared.close(grace_s)
        for region in self.regions.values():
            region.unmap()
        return left

    async def until(self, condition: Callable[[], bool]) -> None:
        """Do the daemon's work until the condition holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, f"it hangs: {self.shared.stats()}"  # rule: only bounds a hang
            self.cache.work()
            self.cache.expire()
            await asyncio.sleep(0.001)

    async def sent(self) -> None:
        """Nothing waits to be sent."""
        await self.until(lambda: self.shared._writes.idle)

    def namespace(self, window_blocks: int = 0, tp_rank: int = 0, **changed: Any) -> Namespace:
        spec = NamespaceSpec(
            engine="t",
            layout="l",
            dtype="uint8",
            block_size=1,
            block_bytes=BLOCK_BYTES,
            window_blocks=window_blocks,
            tp_rank=tp_rank,
            tp_size=8,
        )
        fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
        return self.cache.space.open_namespace(NamespaceSpec(**{**fields, **changed}))

    def view(self, frame: int, length: int) -> memoryview:
        return self.regions[frame >> REGION_SHIFT].view(frame & OFFSET_MASK, length)

    def store(self, namespace: Namespace, chain: bytes, first: int = 0) -> list[BlockState]:
        """Reserve, copy, commit, as a client does."""
        parent = key_of(chain, first - 1) if first else b""
        got = self.cache.reserve(self.owner, namespace, parent, chain[KEY_BYTES * first :], 10)
        assert not got.parent_missing
        numbers = [number for number, state in enumerate(got.states) if state is BlockState.FRAME]
        for number, frame in zip(numbers, got.frames, strict=True):
            self.view(frame, BLOCK_BYTES)[:] = content(namespace, key_of(chain, first + number), self.version)
        self.cache.writes.commit(self.owner, got.lease_id, numbers)
        return got.states

    async def look_up(self, namespaces: list[Namespace], chain: bytes) -> int:
        """Ask the store as a match does; returns what is then found, in all tiers."""
        lengths = self.cache.reads.runs.lengths(namespaces, chain)
        went: list[None] = []
        if self.below.wait(namespaces, chain, lengths, lambda: went.append(None)):
            await self.until(lambda: bool(went))
        return sum(finish(self.cache.reads.runs.peek(namespaces, chain)))

    async def load(self, namespaces: list[Namespace], chain: bytes) -> int:
        """Look up, match, wait for what comes up, compare, release. Returns the good blocks."""
        await self.look_up(namespaces, chain)
        found = self.cache.match(self.owner, namespaces, chain, 60.0, promote=True)
        if found.lease is None:
            return 0
        lease = found.lease
        await self.until(lambda: lease.over or lease.lease_id not in self.cache.reads.growing.leases)
        return self.read(lease, namespaces)

    def read(self, lease: ReadLease, namespaces: list[Namespace]) -> int:
        """Compare every block under a lease, then release it."""
        blocks = lease.blocks
        for namespace in namespaces:
            first = first_of_window(namespace, blocks)
            frames = self.cache.reads.frames(lease, namespace, first, blocks - first)
            for number, frame in enumerate(frames, first):
                assert bytes(self.view(frame, BLOCK_BYTES)) == content(namespace, key_of(lease.keys, number))
        return blocks if self.cache.reads.release(self.owner, lease.lease_id) else 0

    def forget_dram(self, key: bytes = b"") -> None:
        """Flush DRAM only."""
        numbers = [namespace.number for namespace in self.cache.space.all_namespaces()]
        more = self.cache.flush_dram(numbers, key)[1]
        while more:
            more = any(table.unlinking for table in self.cache.space.index.tables.values())
            self.cache.space.work()

    async def flush(self, key: bytes = b"", tier: str = "all") -> bool:
        """Flush as the service does; returns whether that is durable."""
        namespaces, answers = self.cache.space.all_namespaces(), list[bool]()
        below = self.below.begin_flush(namespaces, key, lambda blocks, durable: answers.append(durable), tier=tier)
        finish(self.cache.flush(namespaces, key, below, dram=tier == "all"))
        below.end()
        await self.until(lambda: bool(answers))
        return answers[0]

    def check(self) -> None:
        """All parts agree."""
        assert self.cache.check_integrity() + finish(self.below.check()) == []

    def check_end(self) -> None:
        """Nothing is held once nothing is under way: all frames are free when DRAM has forgotten its blocks."""
        self.check()
        self.forget_dram()
        while self.cache.work():
            pass
        assert self.cache.space.allocator.used_bytes == 0, "a frame is held for ever"


def host(store: SharedStore, tmp_path: Path, name: str, **settings: Any) -> HostRig:
    """An open host whose requests wait as long as it takes."""
    return HostRig(store, tmp_path / name, **{"lookup_timeout_s": 60.0, **settings}).open()


def names_of(one: HostRig, chain: bytes, namespace: Namespace | None = None) -> list[bytes]:
    """The names of a chain's blocks in the store, as a host knows them."""
    shared, space = one.shared, namespace or one.namespace()
    scope = shared.access.scope_of(space, chain[:KEY_BYTES])
    epoch = shared.access.epochs.of(scope)
    assert epoch is not None
    naming = shared.access.epochs.naming
    return [naming.block(scope, epoch, key_of(chain, place)) for place in range(len(chain) // KEY_BYTES)]
