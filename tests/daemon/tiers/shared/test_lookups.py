"""One tenant's look-ups in the shared store do not keep those of others from being made, nor from being waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from chains import chain_of

from tiercache.daemon.tiers.shared.lookups import LATE_IN_A_ROW, MAX_BEGUN, MAX_LOOKUPS, SharedLookups


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
