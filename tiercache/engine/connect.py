"""Connects an engine to its cache: one connector, and a sibling for each further group of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import tiercache
from tiercache.engine.cache import CacheLike, GroupLike
from tiercache.engine.grouped_cache import GroupedCache
from tiercache.engine.kv_pool import KVLayout, KVPool
from tiercache.engine.tier_format import StagedCache
from tiercache.protocol.namespaces import NamespaceSpec

Connect = Callable[[NamespaceSpec, torch.Tensor], CacheLike]
"""Makes a connector for the blocks of a namespace in a pool `[block, ...]`, each contiguous (see `KVLayout.empty`)."""


def connect_to(
    address: str | Path | None = None,
    *,
    name: str = "engine",
    required: bool = False,
    gds: str = "off",
    gds_store: bool = False,
) -> Connect:
    """Connects an engine to the daemon at `address` (by default the daemon's default address).

    With `required`, the engine raises DaemonUnavailable when no daemon answers; else it starts without
    its cache and connects when the daemon comes. `gds` and `gds_store` as for `tiercache.connect`.
    """

    def connect(namespace: NamespaceSpec, pool: torch.Tensor) -> CacheLike:
        blocks = tiercache.Pool.from_blocks(pool)
        return tiercache.connect(
            address, namespace=namespace, pool=blocks, name=name, required=required, gds=gds, gds_store=gds_store
        )

    return connect


def connect_groups(
    connect: Connect, pool: KVPool, namespaces: Sequence[NamespaceSpec], layouts: Sequence[KVLayout], *, staged: bool
) -> GroupedCache:
    """The cache of each group of layers; with `staged` its blocks have another layout than in the pool.

    `layouts` are the layouts in the cache. Raises what `connect` does.
    """
    first: CacheLike | None = None

    def reach(namespace: NamespaceSpec, blocks: torch.Tensor) -> GroupLike:
        nonlocal first
        if first is not None:
            return first.sibling(namespace, tiercache.Pool.from_blocks(blocks))
        first = connect(namespace, blocks)
        return first

    caches: list[GroupLike] = []
    for namespace, layout in zip(namespaces, layouts, strict=True):
        if staged:
            caches.append(StagedCache.over(partial(reach, namespace), pool, layout, len(layouts)))
        else:
            caches.append(reach(namespace, pool.blocks[:, : layout.layers]))
    return GroupedCache(caches, namespaces)
