"""Latency histograms against a sorted list of the same observations."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache import metrics
from tiercache.metrics import LatencyHistogram

DURATIONS = st.lists(st.integers(0, 1 << 48) | st.integers(0, 300) | st.integers(0, 10**7), min_size=1)


@given(durations=DURATIONS, quantile=st.floats(0, 1))
def test_percentiles_are_at_most_an_eighth_too_high(durations: list[int], quantile: float) -> None:
    latency = LatencyHistogram()
    for ns in durations:
        latency.observe_ns(ns)
    rank = next(n for n in range(1, len(durations) + 1) if n >= quantile * len(durations))
    exact = sorted(durations)[rank - 1]
    assert exact <= latency.percentile(quantile) <= exact + max(exact / 8, 15)
    assert (latency.count, latency.sum_ns, latency.max_ns) == (len(durations), sum(durations), max(durations))


def test_buckets_join_without_gap_or_overlap() -> None:
    start = 0
    for index in range(metrics._BUCKETS):
        end = metrics._bucket_end(index)
        assert metrics._bucket(start) == metrics._bucket(end) == index
        start = end + 1
    assert start == 1 << 48


def test_nothing_seen_and_clocks_that_step() -> None:
    latency = LatencyHistogram()
    assert latency.snapshot() == {"count": 0, "p50_us": 0, "p90_us": 0, "p99_us": 0, "max_us": 0, "sum_s": 0}
    latency.observe_ns(-5)
    latency.observe_ns(1 << 60)
    assert (latency.count, latency.sum_ns, latency.percentile(0.5)) == (2, 1 << 60, 15)
    assert latency.percentile(1) == 1 << 60
    with pytest.raises(ValueError, match="0 to 1"):
        latency.percentile(99)


def test_the_snapshot_is_in_microseconds_and_seconds() -> None:
    latency = LatencyHistogram()
    for _ in range(10):
        latency.observe_ns(2_000_000)
    snapshot = latency.snapshot()
    assert snapshot == {
        "count": 10, "p50_us": 2000, "p90_us": 2000, "p99_us": 2000, "max_us": 2000, "sum_s": 0.02,
    }  # fmt: skip


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(metrics).failed == 0
