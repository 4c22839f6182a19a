"""Look-ups for namespaces with a window: what this host has on disk counts, and what cannot be fetched does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of, key_of
from host_rig import HostRig, host, names_of
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.shared.local_windows import MAX_LOOKED_FOR, LocalWindows, split

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

CHAIN = chain_of("x", 30)


def spaces(one: HostRig) -> list[Namespace]:
    return [one.namespace(), one.namespace(window_blocks=4)]


async def stored(store: MemoryStore, tmp_path: Path) -> HostRig:
    """A host that has stored CHAIN in both namespaces."""
    a = host(store, tmp_path, "a")
    for space in spaces(a):
        a.store(space, CHAIN)
    await a.sent()
    return a


@played
async def test_blocks_of_a_window_on_this_hosts_disks_count(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = await stored(store, tmp_path), host(store, tmp_path, "b")
    for name in names_of(a, CHAIN, spaces(a)[1])[-3:]:
        del store.values[name]
    on_disk = {key_of(CHAIN, number) for number in (27, 28, 29)}
    chain, window = spaces(b)
    b.shared._windows._lookup_below = lambda namespace: on_disk.__contains__ if namespace is window else None
    await b.look_up([chain, window], CHAIN)
    claim = b.shared.claim([chain, window], CHAIN)
    assert claim is not None
    assert (claim.end, claim.stored) == (30, {1: {26}})
    for one in (a, b):
        one.check()
        await one.close()


def test_blocks_in_any_tier_of_this_host_are_here() -> None:
    keys = split(CHAIN[: 4 * 16])
    in_dram, on_disk = {keys[0], keys[2]}, {keys[1], keys[2]}
    index: Any = SimpleNamespace(lookup=lambda table: in_dram.__contains__ if in_dram else None)
    windows = LocalWindows(index, lambda namespace: on_disk.__contains__ if on_disk else None)
    namespace: Any = SimpleNamespace(table=SimpleNamespace(windowed=True))
    assert windows.here(namespace, keys) == bytes([1, 1, 1, 0])
    assert windows.are_short_work([namespace], MAX_LOOKED_FOR // 2)
    assert not windows.are_short_work([namespace], MAX_LOOKED_FOR // 2 + 1), "two tiers have to be asked"
    in_dram.clear()
    assert windows.here(namespace, keys) == bytes([0, 1, 1, 0])
    on_disk.clear()
    assert windows.here(namespace, keys) == bytes(4)
    assert windows.are_short_work([namespace] * 64, MAX_LOOKED_FOR)
