"""The clock of the policies, the window of fresh stores, and the bounds of what policies keep to learn."""

from __future__ import annotations

import numpy as np
import pytest

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import hazard, predictor
from tiercache.daemon.policies.fresh_stores import FreshStores, are_below
from tiercache.daemon.policies.hazard import LeastWorth
from tiercache.daemon.policies.lru import LeafLRU
from tiercache.daemon.policies.predictor import Context, Predictor
from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES

CONTEXT = Context(0, 0, 1)
STILL = Turnover(lambda: 0.0)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def turns(turnover: Turnover, times: float) -> None:
    """The cache turns over so many times."""
    turnover.comes(int(times * turnover.room_bytes()), stored=False)


# --- the clock -----------------------------------------------------------------------------------


def test_the_turnover_goes_on_where_the_room_becomes_another() -> None:
    turnover, room = Turnover(lambda: 0.0), 1000
    turnover.room_bytes = lambda: room
    turnover.comes(100, stored=False)
    room = 2000
    turnover.comes(200, stored=False)
    assert turnover.now == pytest.approx(0.2)


def test_only_what_clients_store_counts_as_stored() -> None:
    turnover = Turnover(lambda: 0.0)
    turnover.comes(100, stored=True)
    turnover.comes(50, stored=False)
    assert turnover.stored_bytes == 100


# --- the window ----------------------------------------------------------------------------------


def windowed() -> tuple[Index, FreshStores, list[int]]:
    """A chain of two blocks that has just been stored."""
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    index = Index(lambda frame: None)
    window = FreshStores(index, LeafLRU(index.columns), turnover)
    table = index.add_table(1, window, windowed=False)
    turnover.comes(20, stored=True)
    entries = index.insert_run(table, [key(1), key(2)], table.root, [1, 2], stored=True)
    return index, window, entries


def test_what_is_evicted_before_its_time_leaves_the_window_whole() -> None:
    index, window, (parent, child) = windowed()
    assert window._inside[child]
    index.evict(child)
    assert not window._inside[child]
    assert window.victim() == parent
    index.evict(parent)
    assert window.victim() == NO_ENTRY
    assert not window._rings.heads


def test_what_is_in_the_tier_below_leaves_the_window_at_once() -> None:
    index, window, (_, child) = windowed()
    are_below(index, [child])
    assert not window._inside[child]
    assert window.inner.victim() == child


def test_in_the_tier_below_a_block_is_as_new_as_its_own_write() -> None:
    for below in (False, True):
        turnover = Turnover(lambda: 0.0)
        turnover.room_bytes = lambda: 1000
        index = Index(lambda frame: None)
        window = FreshStores(index, LeafLRU(index.columns), turnover, below=below)
        table = index.add_table(1, window, windowed=False)
        turnover.comes(100, stored=True)
        parent = index.insert(table, key(1), table.root, 1, stored=True)
        turnover.stored_bytes += 700  # others
        child = index.insert(table, key(2), parent, 2)  # brought up, or written behind
        assert window._stored_at[child] == (800 if below else 100)


def test_the_window_gives_what_it_has_where_nothing_else_may_go() -> None:
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    index = Index(lambda frame: None)
    window = FreshStores(index, LeafLRU(index.columns), turnover)
    table = index.add_table(1, window, windowed=False)
    entries = []
    for number in range(3):
        turnover.comes(10, stored=True)
        entries.append(index.insert(table, key(number), table.root, number, stored=True))
    for entry in entries:
        assert window._inside[entry]
        assert window.victim() == entry
        index.evict(entry)
    assert window.victim() == NO_ENTRY


# --- hazard --------------------------------------------------------------------------------------


def least_worth(turnover: Turnover = STILL) -> tuple[Index, LeastWorth]:
    index = Index(lambda frame: None)
    return index, LeastWorth(index, Predictor(turnover))


def test_a_block_below_which_requests_part_is_shared() -> None:
    index, policy = least_worth()
    table = index.add_table(1, policy, windowed=False)
    parent = index.insert(table, key(1), table.root, 1)
    index.insert(table, key(2), parent, 2)
    assert not policy._shared[parent]
    index.insert(table, key(3), parent, 3)
    assert policy._shared[parent]


def test_ranks_are_taken_anew_after_some_evictions_once_the_clock_has_moved() -> None:
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    index, policy = least_worth(turnover)
    table = index.add_table(1, policy, windowed=False)
    index.insert(table, key(1), table.root, 1)
    policy.victim()
    due = policy._evictions = policy._ranked_for + 1
    policy.victim()
    assert policy._evictions == due, "the clock stands: all are worth what they were"
    turnover.comes(10, stored=True)
    policy.victim()
    assert policy._evictions == 0


@pytest.mark.parametrize("few", [0, 1000])
def test_of_those_worth_the_same_the_one_used_last_goes_last(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that loads shortly after its store would find nothing, as nothing else is known of the blocks."""
    monkeypatch.setattr(hazard, "FEW_CELLS", few)
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    index, policy = least_worth(turnover)
    policy._predictor.worth[:] = 1.0
    table = index.add_table(1, policy, windowed=False)
    for number in range(1, 40):
        index.insert(table, key(number), table.root, number)
        turnover.comes(10, stored=True)
    gone = []
    while (victim := policy.victim()) != NO_ENTRY:
        gone.append(index.frame[victim])
        index.evict(victim)
    assert gone == list(range(1, 40))


def test_there_are_so_many_cells_and_those_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard, "RANK_LEAST", 4)
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    index, policy = least_worth(turnover)
    table = index.add_table(1, policy, windowed=False)
    first = index.insert(table, key(0), table.root, 0)
    policy.victim()
    policy._most_cells = 4
    for number in range(1, 10):
        turns(turnover, 1.0)
        index.insert(table, key(number), table.root, number)
    assert policy._width > 1
    policy.victim()
    for _ in range(100):
        turns(turnover, 1.0)
        index.touch(first)
        assert len(policy._fresh) <= 2 * len(policy._rings.heads) + hazard.RANK_LEAST + 1


def test_what_the_predictor_remembers_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MAX_SAMPLES", 8)
    known: dict[bytes, Context] = {}
    for number in range(20):
        predictor._put(known, key(number), CONTEXT)
    assert list(known) == [key(number) for number in range(12, 20)]


def test_what_happened_long_ago_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "EVENTS_KEPT", 100)
    learner = Predictor(STILL)
    learner._used[3, 3] = 160
    for _ in learner._refresh():
        pass
    assert np.sum(learner._used) == 80


def test_places_of_the_sample_are_used_again() -> None:
    learner = Predictor(STILL)
    for number in range(50):
        learner._begin([(number, 0)], CONTEXT)
        learner._let_go(number)
    assert (len(learner._samples), len(learner._classes)) == (0, 1)
