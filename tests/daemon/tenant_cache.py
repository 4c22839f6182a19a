"""A cache that tenants share: helpers to store chains in it and look them up."""

from __future__ import annotations

from cache_at_once import CacheAtOnce

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import BlockState
from tiercache.protocol.namespaces import NamespaceSpec

FRAME = 4096


def make_cache(frames: int, **quota: int) -> CacheAtOnce:
    """An arena of so many frames; quotas in frames."""
    cache = CacheAtOnce(lambda: 0.0, CacheLimits(quota={name: count * FRAME for name, count in quota.items()}))
    cache.space.allocator.add_region(0, frames * FRAME)
    return cache


def open_for(cache: CacheAtOnce, tenant: str, block_bytes: int = FRAME, engine: str = "e") -> Namespace:
    spec = NamespaceSpec(engine=engine, layout="x", dtype="uint8", block_size=1, block_bytes=block_bytes)
    return cache.space.open_namespace(spec.of_tenant(tenant) if tenant else spec)


def store(cache: CacheAtOnce, namespace: Namespace, keys: bytes, *, commit: bool = True) -> int:
    """Store a chain; how many of its blocks got a frame or were there."""
    owner = Owner(bytes(16))
    got = cache.reserve(owner, namespace, b"", keys, 60.0)
    places = [place for place, state in enumerate(got.states) if state is BlockState.FRAME]
    if places and commit:
        cache.writes.commit(owner, got.lease_id, places)
        cache.space.tails.writer_gone(owner.instance)  # nothing comes below it
    assert cache.check_integrity() == []
    return sum(state is not BlockState.NONE for state in got.states)


def found(cache: CacheAtOnce, namespace: Namespace, keys: bytes) -> int:
    return cache.match(Owner(bytes(16)), [namespace], keys, 0.0).dram
