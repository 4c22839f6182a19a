"""The bounds of hints: how many blocks one is about, how much is done at once, whose blocks, what revokes them."""

from __future__ import annotations

import pytest
from cache_rig import branch, key
from hinting import HIGH, LOW, Hinting

from tiercache.daemon.hints import hinted_policy as hinted
from tiercache.daemon.hints import hints
from tiercache.daemon.hints.chain_hints import HintGroup, Mark
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.tiers.dram.space import Namespace


@pytest.fixture
def h() -> Hinting:
    return Hinting(frames=40)


def mark_of(h: Hinting, ns: Namespace, block: bytes) -> Mark | None:
    return h.policy(ns).mark_of(ns.table.get(block))


def test_a_hint_is_about_so_many_blocks_of_all_its_namespaces(h: Hinting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "MAX_WALK", 4)
    spaces = [h.space(rank=rank) for rank in range(2)]
    for ns in spaces:
        h.store(ns, branch(1, 2, 3, 4, 5, 6))
    for asked, own in ((spaces[:1], 4), (spaces, 2)):
        h.cache.hint_now(asked, branch(1, 2, 3, 4, 5, 6), 0, hint_given_at(h.now_s, True, 0.0, 0.0, None))
        mark = mark_of(h, spaces[0], key(1, 2, 3, 4, 5, 6))
        assert mark is not None
        assert mark.own == own


def test_of_a_window_what_the_next_request_needs_is_kept_and_all_of_it_may_go(
    h: Hinting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MAX_WINDOW", 3)
    ns, keys = h.space(window_blocks=2), branch(1, 2, 3, 4, 5, 6)
    h.store(ns, keys)
    h.hint(ns, keys, priority=HIGH)
    assert h.policy(ns).marks == 2
    h.hint(ns, keys, priority=LOW)
    assert h.policy(ns).marks == 3
    assert mark_of(h, ns, key(1, 2, 3)) is None


def test_what_is_of_no_use_goes_a_few_blocks_at_a_time(h: Hinting, monkeypatch: pytest.MonkeyPatch) -> None:
    ns, said = h.space(), h.cache.space.policies.hints
    for number in range(10):
        h.store(ns, branch(number))
        h.cache.space.tails.give_up()
        h.hint(ns, branch(number), ttl_s=5.0)
    h.now_s += 10.0
    monkeypatch.setattr(hinted, "EXPIRE_AT_ONCE", 4)
    h.policy(ns).expire(h.now_s)
    assert len(h.policy(ns)._first[HintGroup.EXPIRED]) == 4, "sorted anew"
    monkeypatch.undo()
    monkeypatch.setattr(hints, "EXPIRE_AT_ONCE", 3)
    gone = [said.expire(h.cache.space.index, h.cache.space.tails) for _ in range(5)]
    assert gone == [3, 3, 3, 1, 0]
    h.check()
