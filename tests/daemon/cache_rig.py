"""Caches of DRAM alone in this process, for tests that look into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cache_at_once import CacheAtOnce
from chains import chain_of

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.events.publisher import Publisher
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import BlockState, CommitState
from tiercache.protocol.namespaces import NamespaceSpec

FRAME_BYTES = 4096


class CacheRig:
    """A cache of `regions` regions of 8 small frames, with `CacheLimits`; a clock that is a field, an owner."""

    def __init__(
        self,
        regions: int = 1,
        region_bytes: int = 8 * FRAME_BYTES,
        below: TierBelow | None = None,
        **limits: Any,
    ) -> None:
        self.now_s = 0.0
        self.cache = CacheAtOnce(lambda: self.now_s, CacheLimits(**limits), below)
        for region_id in range(regions):
            self.cache.space.allocator.add_region(region_id, region_bytes)
        self.owner = Owner(b"a" * 16)

    def space(self, rank: int = 0, tenant: str = "", **changed: int) -> Namespace:
        spec = NamespaceSpec(
            engine="t",
            layout="l",
            dtype="u8",
            block_size=1,
            tp_rank=rank,
            tp_size=8,
            extra={"tenant": tenant} if tenant else {},
            **{"block_bytes": FRAME_BYTES, **changed},  # type: ignore[arg-type]
        )
        return self.cache.space.open_namespace(spec)

    def store(self, namespace: Namespace, keys: bytes, parent: bytes = b"") -> list[BlockState]:
        """Store all of these blocks."""
        states = self.store_what_fits(namespace, keys, parent)
        assert set(states) <= {BlockState.FRAME, BlockState.HAVE}
        return states

    def store_what_fits(self, namespace: Namespace, keys: bytes, parent: bytes = b"") -> list[BlockState]:
        got = self.cache.reserve(self.owner, namespace, parent, keys, 10)
        numbers = [number for number, state in enumerate(got.states) if state is BlockState.FRAME]
        assert set(self.cache.writes.commit(self.owner, got.lease_id, numbers)) <= {CommitState.VISIBLE}
        return got.states

    def length(self, namespace: Namespace, keys: bytes) -> int:
        """How many blocks a match finds."""
        return self.cache.match(self.owner, [namespace], keys, 0).dram

    def check(self) -> None:
        assert self.cache.check_integrity() == []


class SmallCache(CacheRig):
    """A cache of `frames` frames, checked after each store. A store may find room for only some of its blocks."""

    def __init__(self, frames: int = 8, regions: int = 1, policy: str = "lru") -> None:
        super().__init__(regions, frames * FRAME_BYTES, policy=policy)
        self.now_s = 1000.0

    def store(self, namespace: Namespace, keys: bytes, parent: bytes = b"") -> list[BlockState]:
        states = self.store_what_fits(namespace, keys, parent)
        self.check()
        return states


def key(*path: int) -> bytes:
    """A key that names its whole path, so the tests can see chains in it."""
    return bytes([17 * (len(path) + sum(path)) % 256, *path]).ljust(16, b"\0")


def branch(*path: int) -> bytes:
    """The keys of a chain in a tree: chains share keys as far as their paths are the same."""
    return b"".join(key(*path[: i + 1]) for i in range(len(path)))


def fill(h: CacheRig, namespace: Namespace, tag: int, blocks: int) -> bytes:
    """Store a chain of `blocks` blocks; returns its keys."""
    keys = chain_of(tag, blocks)
    for first in range(0, blocks, 500):
        parent = keys[16 * (first - 1) : 16 * first] if first else b""
        h.store(namespace, keys[16 * first : 16 * min(first + 500, blocks)], parent)
    return keys


def finish(h: CacheRig) -> None:
    """Do all deferred work."""
    while h.cache.work():
        pass
    h.check()


def in_slices(steps: Steps[Any], after_each: Callable[[], object]) -> tuple[Any, int]:
    """The result, and how many slices it took."""
    slices = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            after_each()
            return end.value, slices
        slices += 1
        after_each()


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Callable[[], int]:
    """How often these methods of a class were called since the last look."""
    calls = 0
    for name in names:
        method = getattr(owner, name)

        def call(*arguments: Any, _method: Callable[..., Any] = method, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return _method(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    def since() -> int:
        nonlocal calls
        asked, calls = calls, 0
        return asked

    return since


class Kept(Publisher):
    """Batches as they are published."""

    def __init__(self) -> None:
        self.published: list[list[dict[str, Any]]] = []
        self.has_stored = False

    def publish(self, batch: bytes) -> None:
        self.published.append(msgspec.msgpack.decode(batch)[1])
