"""One tenant's look-ups in the shared store do not keep those of others from being made, nor from being waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import lookups
from tiercache.daemon.tiers.shared.lookups import (
    LATE_IN_A_ROW,
    MAX_BEGUN,
    MAX_LOOKED_FOR,
    MAX_LOOKUPS,
    LocalWindows,
    SharedLookups,
    split,
)


class Played:
    """Look-ups whose ends and timers the test decides."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.begun: list[tuple[str, str]] = []
        self.now_s = 0.0
        self.looked = SharedLookups(0.02, lambda seconds, call: self.timers.append(call), lambda: self.now_s)

    def ask(self, tenant: str, prompt: str) -> bool:
        names = self._names(tenant), chain_of(prompt, 2)
        return self.looked.wait(*names, lambda: None, lambda: self.begun.append((tenant, prompt)))

    def end(self, tenant: str, prompt: str) -> None:
        self.looked.ended(self._names(tenant), chain_of(prompt, 2))

    def time_is_up(self) -> None:
        self.now_s += 1.0
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    def _names(self, tenant: str) -> Any:
        number = sum(tenant.encode())
        return [SimpleNamespace(number=number, spec=SimpleNamespace(tenant=tenant))]


def test_a_flood_leaves_room_and_turns_for_others() -> None:
    play = Played()
    flood = [play.ask("a", f"{number}") for number in range(2 * MAX_LOOKUPS)]
    assert 0 < sum(flood) < MAX_LOOKUPS
    assert len(play.begun) == MAX_BEGUN
    assert [play.ask(tenant, "x") for tenant in "bcd"] == [True, True, True]
    assert (play.looked.asked, play.looked.shared, play.looked.late) == (len(play.looked), 0, 0)
    ended = play.begun[:3]
    for one in ended:
        play.end(*one)
    assert play.begun[MAX_BEGUN:] == [("a", f"{MAX_BEGUN}"), ("b", "x"), ("c", "x")], "tenants take turns"
    while len(play.looked):
        ended.append(next(one for one in play.begun if one not in ended))
        play.end(*ended[-1])
    assert not play.looked._queues
    assert not play.looked._of_tenant
    assert play.looked._begun == 0


def test_the_late_look_ups_of_one_tenant_are_its_own() -> None:
    play = Played()
    for number in range(LATE_IN_A_ROW):
        assert play.ask("a", f"{number}")
    play.time_is_up()
    assert not play.ask("a", "more"), "it does not wait in vain"
    assert play.ask("b", "x"), "others do, as long as theirs come in time"
    for number in range(LATE_IN_A_ROW):
        play.end("a", f"{number}")
    play.end("a", "more")  # it came in time
    assert play.ask("a", "again")


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
    monkeypatch.setattr(lookups, "MAX_LOOKED_FOR", 5)
    one, looked_for = host(MemoryStore(), tmp_path, "a"), list[int]()
    windowed, went = one.namespace(window_blocks=4), list[int]()
    real = lookups.LocalWindows.here

    def here(self: LocalWindows, namespace: Any, keys: list[bytes]) -> bytes:
        looked_for.append(len(keys))
        return real(self, namespace, keys)

    monkeypatch.setattr(lookups.LocalWindows, "here", here)
    for number in range(MAX_BEGUN + 2):
        chain, go = chain_of(f"{number}", 6), lambda number=number: went.append(number)
        assert one.below.wait([windowed], chain, [0], go)  # type: ignore[arg-type]
    assert looked_for == [6] * MAX_BEGUN
    one.store(windowed, chain_of("other", 1))
    await one.until(lambda: len(went) == MAX_BEGUN + 2)
    assert looked_for == [6] * MAX_BEGUN
    one.check()
    await one.close()
