"""Which of two ways to choose a victim has the say."""

from __future__ import annotations

from tiercache.daemon.policies.duel import MOST, Duel

ALWAYS = 1 << 40


def rounds(duel: Duel, count: int, used: int, evictions: int = 0, until: int = ALWAYS, name: str = "") -> None:
    """In each, the first one would evict block 0 and the second one block 1; the one of that number is used."""
    for number in range(count):
        keys = [f"{name}{number} {which}".encode() for which in range(2)]
        duel.pair(keys[:1], keys[1:], 0, until)
        duel.used(keys[used], evictions)
    duel.pair([], [], 0, until)


def test_the_one_that_would_have_kept_what_is_used_gets_the_say_and_gives_it_back() -> None:
    duel = Duel()
    rounds(duel, 100, used=0)
    assert duel.second, "what the first one would have evicted was used every time"
    rounds(duel, 400, used=1)
    assert not duel.second


def test_nothing_changes_while_the_first_one_is_better() -> None:
    duel = Duel()
    for number in range(200):
        rounds(duel, 2, used=1, name=f"{number} ")
        rounds(duel, 1, used=0, name=f"{number} ")
        assert not duel.second


def test_a_use_after_a_cache_full_of_evictions_says_nothing() -> None:
    duel = Duel()
    rounds(duel, 200, used=0, evictions=101, until=100)
    assert not duel.second


def test_a_block_is_waited_for_once_until_its_time_is_over() -> None:
    """What one would have evicted long ago, and the other keeps, is not what it would evict now."""
    duel = Duel()
    duel.pair([b"a"], [b"x", b"y"], 0, 10)
    duel.pair([b"b"], [b"x", b"y"], 5, 15)
    assert set(duel.waiting) == {b"a", b"b", b"x", b"y"}
    duel.pair([b"c"], [b"x", b"y"], 9, 19)
    assert b"c" not in duel.waiting
    duel.pair([b"c"], [b"x", b"y"], 11, 21)
    assert duel.waiting[b"x"] == (False, 21)


def test_of_one_mind_there_is_nothing_to_wait_for() -> None:
    duel = Duel()
    duel.pair([b"a"], [b"a"], 0, ALWAYS)
    assert not duel.waiting


def test_a_bounded_number_is_waited_for() -> None:
    duel = Duel()
    for number in range(2 * MOST):
        duel.pair([b"%d a" % number], [b"%d b" % number], 0, ALWAYS)
    assert len(duel.waiting) == MOST
    assert b"%d a" % (2 * MOST - 1) in duel.waiting
