"""Lease time stands still while the daemon does."""

from __future__ import annotations

import time

import pytest

from tiercache.daemon.ground.clock import STALL_S, LeaseClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[0])
    return times


def test_time_in_which_the_loop_runs_counts(now: list[float]) -> None:
    clock = LeaseClock()
    start_s = clock()
    for _ in range(100):
        now[0] += STALL_S / 2
        assert clock.observe() == now[0]
    assert clock() - start_s == pytest.approx(50 * STALL_S)
    assert clock.stalls == 0


def test_a_gap_does_not_count(now: list[float]) -> None:
    clock = LeaseClock()
    start_s = clock()
    now[0] += 5
    assert clock() == start_s, "lease time is that of the last `observe`"
    clock.observe()
    assert clock() == start_s
    now[0] += 0.01
    clock.observe()
    assert clock() - start_s == pytest.approx(0.01)
    assert clock.stalls == 1
