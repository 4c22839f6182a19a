"""Look-ups for namespaces with a window: what this host has in any tier counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from chains import chain_of

from tiercache.daemon.tiers.shared.local_windows import MAX_LOOKED_FOR, LocalWindows, split


def test_blocks_in_any_tier_of_this_host_are_here() -> None:
    keys = split(chain_of("x", 4))
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
