"""Look-ups for namespaces with a window: what this host has in any tier counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import local_windows
from tiercache.daemon.tiers.shared.local_windows import MAX_LOOKED_FOR, LocalWindows, split
from tiercache.daemon.tiers.shared.lookups import MAX_BEGUN


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


@played
async def test_a_look_up_that_has_become_long_work_while_it_waited_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace without blocks costs nothing, and may have some by the time that a look-up begins."""
    monkeypatch.setattr(local_windows, "MAX_LOOKED_FOR", 5)
    one, looked_for = host(MemoryStore(), tmp_path, "a"), list[int]()
    windowed, went = one.namespace(window_blocks=4), list[int]()
    real = local_windows.LocalWindows.here

    def here(self: LocalWindows, namespace: Any, keys: list[bytes]) -> bytes:
        looked_for.append(len(keys))
        return real(self, namespace, keys)

    monkeypatch.setattr(local_windows.LocalWindows, "here", here)
    for number in range(MAX_BEGUN + 2):
        chain, go = chain_of(f"{number}", 6), lambda number=number: went.append(number)
        assert one.below.wait([windowed], chain, [0], go)  # type: ignore[arg-type]
    assert looked_for == [6] * MAX_BEGUN
    one.store(windowed, chain_of("other", 1))
    await one.until(lambda: len(went) == MAX_BEGUN + 2)
    assert looked_for == [6] * MAX_BEGUN
    one.check()
    await one.close()
