"""Hints of clients: what is evicted first, what is kept and how much of it, and when a hint is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from cache_rig import SmallCache, branch, key

from tiercache.daemon.hints import hinted_policy as hinted
from tiercache.daemon.hints import hints
from tiercache.daemon.hints.chain_hints import LATE_S, HintGroup
from tiercache.daemon.hints.hinted_policy import HintedPolicy
from tiercache.daemon.hints.hints import CARRY_S, hint_given_at
from tiercache.daemon.hints.switched_policy import SwitchedPolicy
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import Priority

LOW, HIGH = Priority.LOW, Priority.HIGH


class Hinting(SmallCache):
    """A cache that gets hints about its blocks."""

    def hint(self, ns: Namespace, keys: bytes, first: int = 0, **said: Any) -> int:
        values = {"done": False, "return_in_s": 0.0, "ttl_s": 0.0, "priority": None, **said}
        blocks = self.cache.hint_now([ns], keys, first, hint_given_at(self.now_s, **values))
        self.check()
        return blocks

    def later(self, seconds: float) -> None:
        """Time passes, and only the daemon's own tick runs."""
        self.now_s += seconds
        self.cache.expire()
        self.check()

    def fill(self, ns: Namespace, first: int, count: int) -> None:
        """Store `count` chains of one block that no client has asked for."""
        for number in range(first, first + count):
            self.now_s += 2.0  # no client is about to continue the chain before
            self.store(ns, branch(number))

    def here(self, ns: Namespace, *chains: bytes) -> list[int]:
        """How many blocks of each chain are here; looking does not count as a use."""
        return [self.cache.peek([ns], keys)[0] for keys in chains]

    def policy(self, ns: Namespace) -> HintedPolicy:
        policy = ns.table.policy
        assert isinstance(policy, SwitchedPolicy)
        return policy.hinted


@pytest.fixture(params=["lru", "hazard"])
def h(request: pytest.FixtureRequest) -> Hinting:
    return Hinting(frames=8, policy=request.param)


def test_a_session_that_is_done_goes_next_but_not_what_others_share(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1, 1))
    h.store(ns, branch(2))
    h.store(ns, branch(3))
    h.store(ns, key(1, 1, 5) + key(1, 1, 5, 5), parent=key(1, 1))
    h.store(ns, key(1, 1, 6), parent=key(1, 1))
    assert h.length(ns, branch(1, 1, 5, 5)) == 4, "used last of all"
    assert h.hint(ns, branch(1, 1, 5, 5), done=True) == 4
    assert h.here(ns, branch(1, 1, 5, 5)) == [4], "it is here until room is needed"
    h.fill(ns, 100, 3)  # the eighth frame, and two more
    assert h.here(ns, branch(1, 1, 5, 5), branch(1, 1, 6), branch(2), branch(3)) == [2, 3, 1, 1]
    h.fill(ns, 200, 1)
    assert h.here(ns, branch(1, 1)) == [2], "shared with another chain: the policy's from here on"
    others = h.here(ns, branch(2), branch(3), branch(100), branch(101), branch(102), branch(1, 1, 6))
    assert sum(others) == 5 + 3 - 1, "one of these is gone, as the policy chose"


def test_a_chain_is_kept_until_its_client_returns_and_not_much_longer() -> None:
    h = Hinting(frames=8)
    ns = h.space()
    h.store(ns, branch(1, 1))
    h.hint(ns, branch(1, 1), return_in_s=100.0)
    h.fill(ns, 100, 20)  # 40 s of it
    assert h.here(ns, branch(1, 1)) == [2]
    assert h.policy(ns).kept_blocks[HintGroup.BACK] == 2
    h.later(70.0 + LATE_S)
    h.fill(ns, 200, 16)
    assert h.policy(ns).kept_blocks[HintGroup.BACK] == 2, "half as long again is still in time"
    h.later(100.0)
    assert h.policy(ns).kept_blocks[HintGroup.BACK] == 0
    h.fill(ns, 240, 7)
    assert h.here(ns, branch(1, 1))[0] < 2, "it is like any other chain now"


def test_what_is_of_no_use_any_more_is_not_found(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1, 1))
    h.store(ns, key(1, 1, 5) + key(1, 1, 5, 5), parent=key(1, 1))
    h.hint(ns, branch(1, 1, 5, 5), first=2, ttl_s=60.0)
    h.later(59.0)
    assert h.length(ns, branch(1, 1, 5, 5)) == 4, "use does not extend the time to live"
    h.later(2.0)
    assert h.here(ns, branch(1, 1, 5, 5)) == [2], "the first two were stored before"
    assert h.cache.space.policies.hints.stats()["expired_blocks"] == 2
    h.store(ns, key(1, 1, 5), parent=key(1, 1))
    h.later(100.0)
    assert h.here(ns, branch(1, 1, 5)) == [3], "stored again without a hint"


def test_low_goes_before_normal_and_high_after() -> None:
    h = Hinting(frames=20)
    ns = h.space()
    h.fill(ns, 0, 20)
    for number in (15, 16):
        h.hint(ns, branch(number), priority=LOW)
    for number in (0, 1, 2):
        h.hint(ns, branch(number), priority=HIGH)
    h.length(ns, branch(16))
    h.fill(ns, 100, 2)
    assert h.here(ns, *map(branch, range(20))) == [1] * 15 + [0, 0] + [1] * 3, "whether it was used or not"
    h.fill(ns, 200, 15)
    assert h.here(ns, *map(branch, range(3))) == [1, 1, 1]
    assert sum(h.here(ns, *map(branch, range(3, 20)))) == 0


def test_a_block_that_comes_back_brings_what_was_said_with_it() -> None:
    h = Hinting(frames=4)
    ns = h.space()
    h.store(ns, branch(1))
    h.hint(ns, branch(1), priority=LOW)
    h.fill(ns, 100, 4)
    assert h.here(ns, branch(1)) == [0]
    h.store(ns, branch(1))
    mark = h.policy(ns).mark_of(ns.table.get(key(1)))
    assert mark is not None
    assert mark.priority is LOW
    h.store(ns, branch(2))
    h.hint(ns, branch(2), done=True)
    h.cache.flush_dram([ns.number], key(2))
    h.now_s += CARRY_S + 1.0
    h.store(ns, branch(2))
    assert h.policy(ns).mark_of(ns.table.get(key(2))) is None, "the hint is too old"


def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hinted, "MAX_MARKS", 5)
    h = Hinting(frames=20)
    ns = h.space()
    h.fill(ns, 0, 20)
    policy = h.policy(ns)
    for number in range(20):
        kind = [{"done": True}, {"return_in_s": 50.0}, {"priority": HIGH}, {"ttl_s": 1000.0}][number % 4]
        h.hint(ns, branch(number), **kind)
        assert policy.marks <= 5
    for round_number in range(200):
        h.hint(ns, branch(0), return_in_s=50.0 + round_number, ttl_s=1000.0 + round_number)
    assert len(policy._due) <= 4 * 5 + 2
    assert len(policy._latest) <= 2 * 20 + 5 + 1


def test_a_hint_is_about_so_many_blocks_of_all_its_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Hinting(frames=40)
    monkeypatch.setattr(hints, "MAX_WALK", 4)
    spaces = [h.space(rank=rank) for rank in range(2)]
    for ns in spaces:
        h.store(ns, branch(1, 2, 3, 4, 5, 6))
    for asked, own in ((spaces[:1], 4), (spaces, 2)):
        h.cache.hint_now(asked, branch(1, 2, 3, 4, 5, 6), 0, hint_given_at(h.now_s, True, 0.0, 0.0, None))
        mark = h.policy(spaces[0]).mark_of(spaces[0].table.get(key(1, 2, 3, 4, 5, 6)))
        assert mark is not None
        assert mark.own == own
