"""Histograms against a sorted list of the same observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.ground.histograms import (
    NANOSECONDS,
    LatencyHistogram,
    cumulative,
    percentiles_of,
    since,
)

DURATIONS = st.lists(st.integers(0, 10**13) | st.integers(0, 300) | st.integers(0, 10**7), min_size=1)


def seen(values: list[int]) -> LatencyHistogram:
    latency = LatencyHistogram()
    for ns in values:
        latency.observe(ns)
    return latency


@given(durations=DURATIONS, quantile=st.floats(0, 1))
def test_percentiles_are_at_most_an_eighth_too_high(durations: list[int], quantile: float) -> None:
    latency = seen(durations)
    rank = next(n for n in range(1, len(durations) + 1) if n >= quantile * len(durations))
    exact = sorted(durations)[rank - 1]
    assert exact <= latency.percentile(quantile) <= exact + max(exact / 8, 10)
    assert (latency.count, latency.sum, latency.max) == (len(durations), sum(durations), max(durations))


@given(durations=DURATIONS, power=st.integers(1, 12), digit=st.sampled_from([1, 2, 5]))
def test_what_prometheus_reads_is_exact_at_every_1_2_and_5(durations: list[int], power: int, digit: int) -> None:
    ends = [10**power, digit * 10**power]
    assert set(ends) <= set(NANOSECONDS)
    durations += ends  # an end belongs to its bucket
    assert cumulative(seen(durations).buckets(), ends) == [sum(ns <= end for ns in durations) for end in ends]


@given(first=DURATIONS, second=DURATIONS)
def test_a_window_is_the_difference_of_two_looks(first: list[int], second: list[int]) -> None:
    window = since(seen(first + second).buckets(), seen(first).buckets())
    assert window == seen(second).buckets()
    assert percentiles_of(window, [0.5, 1]) >= [0, max(second)]


def test_nothing_seen_and_clocks_that_step() -> None:
    latency = LatencyHistogram()
    assert latency.snapshot() == {"count": 0, "p50_us": 0, "p90_us": 0, "p99_us": 0, "max_us": 0, "sum_s": 0}
    latency.observe(-5)
    latency.observe(1 << 60)
    assert (latency.count, latency.sum, latency.percentile(0.5)) == (2, 1 << 60, 10)
    assert latency.percentile(1) == 1 << 60
    with pytest.raises(ValueError, match="0 to 1"):
        latency.percentile(99)
