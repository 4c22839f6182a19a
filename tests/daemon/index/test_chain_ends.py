"""The end of what a writer stored stays until the writer has gone on, for a moment, and never at another's cost."""

from __future__ import annotations

import pytest
from cache_rig import SmallCache, branch, key

from tiercache.daemon.index import chain_ends as tails
from tiercache.daemon.index.chain_ends import MAX_TAILS, TAIL_S
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.messages import BlockState

FRAME, NONE = BlockState.FRAME, BlockState.NONE


def held(h: SmallCache) -> list[bytes]:
    """The keys of the chain ends that are kept."""
    return [h.cache.space.index.key[entry] for entry in h.cache.space.tails]


def evict(h: SmallCache, count: int) -> None:
    """Evict the `count` newest candidates, as a policy would that values new blocks least."""
    index = h.cache.space.index
    for entry in sorted((e for e in range(len(index.key)) if index.columns.next[e]), reverse=True)[:count]:
        index.evict(entry)


def test_a_store_goes_on_although_its_end_would_be_the_next_victim() -> None:
    h = SmallCache(frames=8)
    ns = h.space()
    h.store(ns, branch(9, 1))
    h.now_s += 2 * TAIL_S
    h.store(ns, branch(1, 2))
    h.cache.space.tails.lapse()
    evict(h, 9)
    assert (h.length(ns, branch(1, 2)), h.length(ns, branch(9, 1))) == (2, 1), "the other chain gave way"
    assert h.store(ns, key(1, 2, 3), parent=key(1, 2)) == [FRAME]
    assert held(h) == [key(1, 2, 3)], "of the chain only its new end is kept"
    h.check()


def test_no_store_is_refused_to_keep_the_end_of_a_chain() -> None:
    h = SmallCache(frames=4)
    ns = h.space()
    other = Owner(b"b" * 16)
    h.store(ns, branch(1, 2, 3, 4))
    got = h.cache.reserve(other, ns, b"", branch(5, 6, 7), 10)
    assert got.states == [FRAME] * 3
    assert held(h) == []
    h.cache.writes.abort(other, got.lease_id, finished=True)
    h.check()


def test_a_writer_that_stored_its_prompt_to_the_end_is_not_expected_to_go_on() -> None:
    h = SmallCache()
    ns = h.space()
    h.length(ns, branch(1, 2, 3))
    h.store(ns, branch(1, 2))
    assert held(h) == [key(1, 2)]
    h.store(ns, key(1, 2, 3), parent=key(1, 2))
    assert held(h) == []
    h.store(ns, key(1, 2, 3, 4), parent=key(1, 2, 3))
    assert held(h) == [key(1, 2, 3, 4)], "the end of what was computed after the prompt"


def test_a_writer_has_so_many_ends_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_TAILS", 4)
    h = SmallCache(frames=MAX_TAILS)
    ns = h.space()
    for number in range(8):
        h.store(ns, branch(number, number))
    assert held(h) == [key(number, number) for number in (4, 5, 6, 7)]
    monkeypatch.setattr(tails, "MAX_PROMPTS", 4)
    for number in range(50):
        h.length(ns, branch(number))
    assert len(h.cache.space.prompts._ends) == 4


def test_ends_of_chains_take_no_room_from_what_is_in_use() -> None:
    """Whole chains hang on them: with all of these kept, what was used a moment ago would be all there is to evict."""
    h = SmallCache(frames=40)
    ns = h.space()
    hot = branch(*range(1, 5))
    h.store(ns, hot)
    for number in range(5, 60):
        h.store(ns, branch(*range(4 * number, 4 * number + 4)))
        assert h.length(ns, hot) == 4
    h.check()
