"""Latency histograms that are cheap enough for the daemon's hot path."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from itertools import accumulate

# A bucket is the position of the leading one bit and the three bits after it: eight steps per
# power of two, so a percentile is at most an eighth too high. Below 128 ns a step is 16 ns.
_BUCKETS = 336
_LAST_SHIFT = 44
"""Bit lengths up to 48: what took 2^48 ns (3 days) or longer is counted in the last bucket."""


def _bucket(ns: int) -> int:
    shift = ns.bit_length() - 4
    if shift < 4:
        return ns >> 4
    return (shift << 3) + (ns >> shift) - 32 if shift <= _LAST_SHIFT else _BUCKETS - 1


def _bucket_end(index: int) -> int:
    """Largest duration in nanoseconds that falls into a bucket."""
    if index < 8:
        return (index << 4) + 15
    return ((index & 7) + 9 << (index >> 3) + 3) - 1


class LatencyHistogram:
    """How long something took: exact count, sum and maximum, percentiles within an eighth.

    Not synchronised: one thread observes; another that reads sees a slightly older state.

    >>> latency = LatencyHistogram()
    >>> for us in range(1, 101):
    ...     latency.observe_ns(us * 1000)
    >>> latency.count, latency.percentile(0.5), latency.percentile(1)
    (100, 53247, 100000)
    """

    __slots__ = ("_buckets", "count", "max_ns", "sum_ns")

    def __init__(self) -> None:
        self._buckets = array("Q", bytes(8 * _BUCKETS))
        self.count = 0
        self.sum_ns = 0
        self.max_ns = 0

    def observe_ns(self, ns: int) -> None:
        """Count one duration. A negative one (a clock that stepped) counts as 0."""
        if ns > self.max_ns:
            self.max_ns = ns
        elif ns < 0:
            ns = 0
        self.count += 1
        self.sum_ns += ns
        self._buckets[_bucket(ns)] += 1

    def percentile(self, quantile: float) -> int:
        """Nanoseconds that a share `quantile` (0 to 1) of the observations did not exceed.

        The upper end of the bucket it falls in, never above the maximum; 0 when nothing was seen.
        """
        if not 0 <= quantile <= 1:
            raise ValueError(f"a quantile is 0 to 1, not {quantile}")
        return self._percentiles(quantile)[0]

    def _percentiles(self, *quantiles: float) -> list[int]:
        seen = list(accumulate(self._buckets))
        found = []
        for quantile in quantiles:
            index = bisect_left(seen, max(1, math.ceil(quantile * self.count)))
            if index < _BUCKETS - 1:
                found.append(min(_bucket_end(index), self.max_ns))
            else:
                found.append(self.max_ns if index < _BUCKETS else 0)
        return found

    def snapshot(self) -> dict[str, float]:
        """`count`, `p50_us`, `p90_us`, `p99_us`, `max_us` and `sum_s` as plain numbers."""
        p50, p90, p99 = self._percentiles(0.50, 0.90, 0.99)
        return {
            "count": self.count,
            "p50_us": p50 / 1e3,
            "p90_us": p90 / 1e3,
            "p99_us": p99 / 1e3,
            "max_us": self.max_ns / 1e3,
            "sum_s": self.sum_ns / 1e9,
        }
