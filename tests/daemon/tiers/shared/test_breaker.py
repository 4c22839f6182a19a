"""The breaker of a store: when it opens, when it asks again, how it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_store import MemoryStore

from tiercache.daemon.tiers.shared import breaker as module
from tiercache.daemon.tiers.shared.breaker import FAILURES, FIRST_PAUSE_S, LAST_PAUSE_S, RAMP_S, Breaker, BreakerState
from tiercache.daemon.tiers.shared.naming import Naming
from tiercache.daemon.tiers.shared.settings import SharedSettings
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.daemon.tiers.shared.tier import SharedTier
from tiercache.daemon.tiers.shared.value import ValueForm

AWAY = StoreError(StoreProblem.UNREACHABLE, "refused")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, lambda low, high: (low + high) / 2)


def opened(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        breaker.failed(AWAY)


def test_it_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    for _ in range(5):
        assert not breaker.failed(AWAY)
        assert not breaker.failed(AWAY)
        breaker.worked()
    assert breaker.closed
    assert [breaker.failed(AWAY) for _ in range(FAILURES + 1)] == [False, False, True, False]
    assert not breaker.closed
    assert breaker.problem == "refused"


def test_kinds_of_jobs_are_counted_apart(breaker: Breaker) -> None:
    """Look-ups that work do not hide that no fetch does."""
    for _ in range(FAILURES - 1):
        breaker.failed(AWAY, "fetch")
        breaker.worked("look-up")
        assert breaker.problem == "refused"
    assert breaker.failed(AWAY, "fetch")


def test_one_probe_after_each_pause_and_longer_ones(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    pause_s, pauses = FIRST_PAUSE_S, list[float]()
    for _ in range(8):
        assert not breaker.wants_probe()
        clock.now_s += pause_s - 0.01
        assert not breaker.wants_probe()
        clock.now_s += 0.01
        assert breaker.wants_probe()
        assert not breaker.wants_probe(), "one at a time"
        breaker.failed(AWAY)
        pauses.append(pause_s)
        pause_s = min(LAST_PAUSE_S, 2 * pause_s)
    assert pauses[-1] == LAST_PAUSE_S
    assert breaker.opened == 1


def test_it_comes_back_by_and_by(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now_s += FIRST_PAUSE_S
    assert breaker.wants_probe()
    breaker.worked()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.share == 0.1
    assert not breaker.admits(), "with the middle of the random numbers"
    clock.now_s += RAMP_S * 0.6
    assert breaker.admits()
    clock.now_s += RAMP_S
    assert breaker.share == 1.0


def test_a_full_store_gets_no_writes_for_a_while(breaker: Breaker, clock: Clock) -> None:
    assert breaker.may_write
    for problem in (StoreProblem.FULL, StoreProblem.READ_ONLY):
        for _ in range(FAILURES + 1):
            assert not breaker.failed(StoreError(problem, "no room"), "write")
        assert breaker.closed
        assert not breaker.may_write
        assert breaker.problem == "no room"
        assert breaker.refuses_writes
        clock.now_s += module.FIRST_WRITE_PAUSE_S
        assert breaker.may_write
        breaker.worked("write")
        assert (breaker.problem, breaker.refuses_writes) == ("", False)


def test_a_store_that_stays_full_is_tried_less_and_less(breaker: Breaker, clock: Clock) -> None:
    full, waited = StoreError(StoreProblem.FULL, "no room"), list[float]()
    for _ in range(7):
        for _ in range(3):
            breaker.failed(full, "write")  # several were under way
        began_s = clock.now_s
        while not breaker.may_write:
            clock.now_s += 0.25
        waited.append(clock.now_s - began_s)
        breaker.worked("fetch")
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    breaker.worked("write")
    breaker.failed(full, "write")
    clock.now_s += module.FIRST_WRITE_PAUSE_S
    assert breaker.may_write, "it has taken writes since"


def test_health_has_the_store_s_own_trouble_while_its_calls_work(tmp_path: Path) -> None:
    store = MemoryStore()
    tier = SharedTier(SharedSettings(store, Naming("default", b""), ValueForm(None), tmp_path), {}, lambda: None)
    assert tier.reasons() == []
    store.trouble = "files cannot be removed"
    assert tier.reasons() == ["the shared store memory://test: files cannot be removed"]
    tier.access.breaker.failed(StoreError(StoreProblem.DENIED, "it rejects us"))
    assert tier.reasons() == ["the shared store memory://test is away: it rejects us"]
