"""The clock that policies go by: seconds, in turnovers at the pace of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercache.daemon.policies.turnover import PACE_CHANGES, PACE_OVER, Turnover

ROOM = 100


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Cache:
    """Blocks of a byte that come one by one."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turnover = Turnover(self.clock)
        self.turnover.room_bytes = lambda: ROOM

    def turn_over(self, times: int, seconds_each: float) -> Iterator[float]:
        """The reading of the policies' clock after each block."""
        for _ in range(times * ROOM):
            self.clock.now_s += seconds_each / ROOM
            self.turnover.comes(1, stored=True)
            yield self.turnover.now


def test_it_goes_by_seconds_once_the_cache_has_turned_over() -> None:
    cache = Cache()
    list(cache.turn_over(1, 200.0))
    before = cache.turnover.now
    assert before == pytest.approx(1.0, abs=0.02)
    cache.clock.now_s += 100.0  # nothing comes
    assert cache.turnover.now == pytest.approx(before + 0.5)
    list(cache.turn_over(3, 50.0))  # four times as fast, for a while
    assert cache.turnover.now == pytest.approx(before + 0.5 + 0.75)
    assert cache.turnover.per_s() == pytest.approx(1 / 200)


@pytest.mark.parametrize("times", [1000.0, 1 / 1000])
def test_it_finds_another_pace_and_never_goes_back(times: float) -> None:
    assert times > PACE_CHANGES or 1 / times > PACE_CHANGES
    cache = Cache()
    shown = [*cache.turn_over(3, 10.0), *cache.turn_over(PACE_OVER + 1, 10.0 / times)]
    assert shown == sorted(shown)
    before = cache.turnover.now
    list(cache.turn_over(2, 10.0 / times))
    assert 1.9 < cache.turnover.now - before <= 2 * PACE_OVER


def test_it_goes_with_what_comes_where_no_time_passes() -> None:
    cache = Cache()
    shown = list(cache.turn_over(3, 0.0))
    assert shown[-1] == pytest.approx(3.0)
    list(cache.turn_over(PACE_OVER, 10.0))
    before = cache.turnover.now
    shown = [before, *cache.turn_over(2 * PACE_OVER, 0.0)]
    assert shown == sorted(shown)
    assert cache.turnover.now - before > PACE_OVER - 1
