"""Chains with a known time of their next request: when their prefetch starts, and how many such plans are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chains import chain_of

from tiercache.daemon import prefetch as ahead
from tiercache.daemon.ground.slices import Slices, Steps
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.prefetch import AT_ONCE, Ahead
from tiercache.daemon.tiers.dram.space import Namespace

SPACES = [cast(Namespace, SimpleNamespace(number=1, table=SimpleNamespace(policy=None)))]


class Rig:
    """Plans, a clock that is a field, and the keys whose prefetch has started."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.out: list[bytes] = []
        self.growing = SimpleNamespace(leases={})
        self.slices = Slices()
        self.ahead = Ahead(cast(Any, self), lambda: self.now_s, self.slices)

    def bring_ahead(self, namespaces: Sequence[Namespace], keys: bytes, most: Callable[[], int]) -> Steps[int]:
        self.out.append(keys)
        yield
        return len(keys) // 16

    def say(self, keys: bytes, return_in_s: float = 0.0, done: bool = False) -> None:
        self.ahead.say(SPACES, keys, hint_given_at(self.now_s, done, return_in_s, 0.0, None))

    def at(self, now_s: float) -> list[bytes]:
        """The chains whose prefetch has started by then."""
        self.now_s = now_s
        self.ahead.work()
        while self.slices.work():
            pass
        return self.out


def test_a_chain_sets_out_a_tenth_of_the_time_before_and_once() -> None:
    rig = Rig()
    rig.say(chain_of(1, 3), return_in_s=100.0)
    assert rig.at(1089.0) == []
    assert rig.ahead.plans == 1
    assert rig.at(1090.0) == [chain_of(1, 3)]
    assert rig.at(1100.0) == [chain_of(1, 3)]
    assert (rig.ahead.plans, rig.ahead.blocks) == (0, 3)


def test_blocks_of_chains_that_set_out_together_are_all_counted() -> None:
    rig = Rig()
    rig.say(chain_of(1, 3), return_in_s=100.0)
    rig.say(chain_of(2, 4), return_in_s=100.0)
    assert len(rig.at(1090.0)) == 2
    assert rig.ahead.blocks == 7


def test_a_few_are_on_their_way_at_a_time() -> None:
    rig = Rig()
    for number in range(AT_ONCE + 3):
        rig.say(chain_of(number), return_in_s=10.0)
    rig.growing.leases = dict.fromkeys(range(AT_ONCE))
    assert rig.at(1009.0) == [], "other prefetches are under way already"
    rig.growing.leases = {}
    assert len(rig.at(1009.0)) == AT_ONCE
    assert len(rig.at(1009.0)) == AT_ONCE + 3


def test_plans_are_bounded_in_number_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_PLANS", 4)
    rig = Rig()
    for number in range(20):
        rig.say(chain_of(number), return_in_s=100.0)
        assert rig.ahead.plans <= 4
    for _ in range(100):
        rig.say(chain_of(19), return_in_s=100.0)
    assert len(rig.ahead._due) <= 2 * 4 + 4 + 1
    monkeypatch.setattr(ahead, "MAX_PLAN_BYTES", 16 * 10)
    for number in range(20, 40):
        rig.say(chain_of(number, 4), return_in_s=100.0)
    assert rig.ahead.plans == 2, "the youngest plans stay; keys of dropped plans do not count any more"
    assert rig.at(1095.0) == [chain_of(38, 4), chain_of(39, 4)]
