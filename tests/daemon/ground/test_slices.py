"""A slice ends after so much CPU time of its thread, however long that takes, and asks the thread's clock rarely."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tiercache.daemon.ground import slices
from tiercache.daemon.ground.slices import CpuLimit


class Clocks:
    """Of the wall, and of a thread that gets every fourth nanosecond."""

    def __init__(self) -> None:
        self.wall_ns = 1000
        self.asked = 0

    def perf_counter_ns(self) -> int:
        return self.wall_ns

    def thread_time_ns(self) -> int:
        self.asked += 1
        return 50 + self.wall_ns // 4


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    its = Clocks()
    clock = SimpleNamespace(perf_counter_ns=its.perf_counter_ns, thread_time_ns=its.thread_time_ns)
    monkeypatch.setattr(slices, "time", clock)
    return its


def test_it_runs_out_by_the_clock_of_the_thread_which_it_asks_rarely(clocks: Clocks) -> None:
    limit = CpuLimit(1000)
    while not limit.over:
        clocks.wall_ns += 4
    assert clocks.wall_ns == 5000
    assert clocks.asked < 40
    assert limit.over
