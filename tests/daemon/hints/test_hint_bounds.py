"""The bounds of hints: how many blocks one is about, how much is done at once, whose blocks, what revokes them."""

from __future__ import annotations

import pytest
from cache_rig import branch, key
from hinting import HIGH, LOW, Hinting

from tiercache.daemon.hints import hinted_policy as hinted
from tiercache.daemon.hints import hints
from tiercache.daemon.hints.chain_hints import HintGroup, Mark
from tiercache.daemon.hints.hinted_policy import KEPT_SHARE
from tiercache.daemon.hints.hints import CARRY_S, hint_given_at
from tiercache.daemon.index.chain_ends import TAIL_S, ChainEnds
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import Policies
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


def test_what_waits_for_another_tier_does_not_change_with_the_mark_of_this_one(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    h.hint(ns, branch(1, 2, 3), priority=LOW)
    index = h.cache.space.index
    h.cache.space.tails.give_up()
    index.evict(ns.table.get(key(1, 2, 3)))
    mark = mark_of(h, ns, key(1, 2))
    carried = h.cache.space.policies.hints.find(ns.number, key(1, 2, 3))
    assert mark is not None
    assert carried is not None
    assert (mark.own, carried.own) == (2, 3)


def test_a_return_far_ahead_stays_known_to_other_tiers(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1))
    h.hint(ns, branch(1), return_in_s=10 * CARRY_S)
    h.now_s += 5 * CARRY_S
    assert h.cache.space.policies.hints.find(ns.number, key(1)) is not None


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


def test_what_is_of_no_use_goes_although_its_writer_was_waited_for(h: Hinting) -> None:
    """The tier below has no other timer that gives up such ends of chains."""
    ns = h.space()
    h.store(ns, branch(1))
    h.hint(ns, branch(1), ttl_s=TAIL_S / 2)
    index, tails = h.cache.space.index, h.cache.space.tails
    h.now_s += TAIL_S / 2
    assert h.cache.space.policies.hints.expire(index, tails) == 0
    h.now_s += TAIL_S
    assert h.cache.space.policies.hints.expire(index, tails) == 1


def test_each_tier_evicts_its_own_blocks_and_a_tier_that_has_gone_none() -> None:
    now_s = 0.0
    policies = Policies("lru", lambda: now_s)
    tiers = [Index(lambda frame: None) for _ in range(2)]
    tables = [one.add_table(1, policies.hinted(one), windowed=False) for one in tiers]
    entries = [one.insert(table, key(1), table.root, 0) for one, table in zip(tiers, tables, strict=True)]
    no_tails = ChainEnds(tiers[0], None, lambda: now_s)  # type: ignore[arg-type]
    policies.hints.say([(tiers[1], tables[1])], key(1), 0, hint_given_at(0.0, False, 0.0, 1.0, None))
    now_s = 2.0
    assert policies.hints.expire(tiers[0], no_tails) == 0
    assert [table.get(key(1)) for table in tables] == entries
    assert policies.hints.expire(tiers[1], no_tails) == 1
    assert [table.get(key(1)) for table in tables] == [entries[0], NO_ENTRY]
    policies.hints.forget(tiers[1])
    assert [policy.index for policy in policies.hints.policies] == [tiers[0]]


def test_what_the_daemon_moves_by_itself_takes_nothing_back(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1))
    h.hint(ns, branch(1), done=True)
    h.cache.space.index.touch(ns.table.get(key(1)))
    mark = mark_of(h, ns, key(1))
    assert mark is not None
    assert mark.done
    h.length(ns, branch(1))
    assert not mark.done


def test_a_block_that_others_have_gone_on_from_takes_no_mark_over(h: Hinting) -> None:
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    h.hint(ns, branch(1, 2, 3), done=True)
    h.store(ns, key(1, 2, 4), parent=key(1, 2))
    h.cache.space.tails.give_up()
    h.cache.space.index.evict(ns.table.get(key(1, 2, 3)))
    assert mark_of(h, ns, key(1, 2)) is None
    h.check()


def test_the_room_for_a_return_excludes_earlier_returns_and_is_counted_anew(h: Hinting) -> None:
    ns = h.space()
    for number in range(8):
        h.store(ns, branch(number, number))
    h.later(2 * TAIL_S)
    h.hint(ns, branch(1, 1), return_in_s=100.0)
    limit, policy = int(KEPT_SHARE * 16), h.policy(ns)
    assert policy.room_for(h.now_s + 50.0) == limit
    assert policy.room_for(h.now_s + 500.0) == limit - 2
    for number in range(8, 16):
        h.store(ns, branch(number, number))
    h.now_s += 2.0
    assert policy.room_for(h.now_s + 50.0) == 2 * limit


def test_a_client_that_is_a_little_late_is_still_expected() -> None:
    mark = Mark(back_s=10.0, late_s=16.0)
    assert [round(mark.wait_s(now_s), 3) for now_s in (0.0, 9.0, 12.0)] == [10.0, 1.2, 1.2]


def test_a_block_that_was_dropped_takes_no_mark_over(h: Hinting) -> None:
    """Else nothing would ever remove the mark."""
    ns, index = h.space(), h.cache.space.index
    h.store(ns, branch(1, 2, 3))
    h.cache.space.tails.give_up()
    h.hint(ns, branch(1, 2, 3), done=True)
    parent, end = ns.table.get(key(1, 2)), ns.table.get(key(1, 2, 3))
    index.drop(parent)
    index.evict(end)
    assert h.policy(ns).mark_of(parent) is None
