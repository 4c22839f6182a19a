"""Latency histograms that are cheap enough for the daemon's hot path."""

from __future__ import annotations

import math
from array import array

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
        rank = max(1, math.ceil(quantile * self.count))
        seen = 0
        for index, in_bucket in enumerate(self._buckets):
            seen += in_bucket
            if seen >= rank:
                return self.max_ns if index == _BUCKETS - 1 else min(_bucket_end(index), self.max_ns)
        return 0

    def snapshot(self) -> dict[str, float]:
        """`count`, `p50_us`, `p90_us`, `p99_us`, `max_us` and `sum_s` as plain numbers."""
        return {
            "count": self.count,
            "p50_us": self.percentile(0.50) / 1e3,
            "p90_us": self.percentile(0.90) / 1e3,
            "p99_us": self.percentile(0.99) / 1e3,
            "max_us": self.max_ns / 1e3,
            "sum_s": self.sum_ns / 1e9,
        }
