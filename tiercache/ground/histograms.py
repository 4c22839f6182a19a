"""Histograms that are cheap enough for the daemon's hot path.

Only bucket counts are kept: percentiles for people and Prometheus buckets are both computed from them. The upper end of
a bucket is inclusive, as `le` has it.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from tiercache.ground import forks

Buckets = Sequence[tuple[int, int]]
"""Inclusive upper end of a bucket and its number of observations, in ascending order, empty ones left out."""

NO_END = (1 << 63) - 1
"""Upper end of the last bucket, which takes all larger values."""


def _decade(start: int) -> Iterable[int]:
    """Ends of 20 buckets from `start` to ten times that: 1, 2, 5 and between them equal ratios, at most 1.1225."""
    for first, last, steps in ((1, 2, 6), (2, 5, 8), (5, 10, 6)):
        for step in range(1, steps + 1):
            yield round(start * first * (last / first) ** (step / steps))


NANOSECONDS = (
    *range(10, 101, 10),
    *(end for power in range(2, 13) for end in _decade(10**power)),
    NO_END,
)
"""Durations: steps of 10 ns up to 100, then an eighth at most, up to 10^13 ns (2.8 hours)."""
POWERS_OF_TWO = (*(1 << power for power in range(41)), NO_END)
"""Sizes in bytes, lengths in tokens."""
MAX_FRESH = 256
"""Observations that may wait to be sorted into buckets."""


class Histogram:
    """Distribution of sizes: exact count, sum and maximum, all in the unit of `ends`.

    An observation is only noted; notes are sorted into buckets together, when the histogram is read or many wait.
    Between copies of megabytes, which evict our data from the CPU's caches, that takes a third of the time.

    One thread may observe and another read.

    Args:
        ends: the buckets' upper ends, ascending, with `NO_END` last.

    >>> sizes = Histogram(POWERS_OF_TWO)
    >>> for size in (3, 4, 4, 4096):
    ...     sizes.observe(size)
    >>> sizes.buckets(), sizes.percentile(0.5)
    ([(4, 3), (4096, 1)], 4)
    """

    __slots__ = (
        "__weakref__",
        "_buckets",
        "_count",
        "_counts",
        "_ends",
        "_fresh",
        "_lock",
        "_max",
        "_sorted_count",
        "_sum",
    )

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._fresh: list[int] = []
        self._lock = threading.Lock()  # for sorting; to observe takes none
        self._counts: dict[int, int] = {}  # by upper end; few of them are ever used
        self._buckets: Buckets = []
        self._sorted_count = 0
        self._count = self._sum = self._max = 0
        forks.watch(self, "_lock")

    def observe(self, value: int) -> None:
        """Count one observation. A negative one (a clock that stepped) counts as 0."""
        fresh = self._fresh
        fresh.append(value)
        if len(fresh) >= MAX_FRESH:
            self._sort()

    def observe_all(self, values: Iterable[int]) -> None:
        """The same for several."""
        fresh = self._fresh
        fresh.extend(values)
        if len(fresh) >= MAX_FRESH:
            self._sort()

    def _sort(self) -> None:
        """Sort noted observations into buckets; some 50 us for `MAX_FRESH`."""
        with self._lock:
            fresh = self._fresh[:]
            del self._fresh[: len(fresh)]  # what another thread appended since then stays
            ends, counts = self._ends, self._counts
            for value, times in Counter(fresh).items():  # what ends together is often equal
                end = ends[bisect_left(ends, value)]
                counts[end] = counts.get(end, 0) + times
            self._count += len(fresh)
            self._sum += sum(value for value in fresh if value > 0)
            self._max = max(self._max, *fresh) if fresh else self._max

    @property
    def count(self) -> int:
        """How many observations there were."""
        if self._fresh:
            self._sort()
        return self._count

    @property
    def sum(self) -> int:
        """The sum of all observations."""
        if self._fresh:
            self._sort()
        return self._sum

    @property
    def max(self) -> int:
        """The largest one."""
        if self._fresh:
            self._sort()
        return self._max

    def buckets(self) -> Buckets:
        """See `Buckets`. A few microseconds, or nothing when nothing was observed since the last time."""
        if self._sorted_count != self.count:
            with self._lock:
                self._sorted_count = self._count
                self._buckets = sorted(self._counts.items())
        return self._buckets

    def percentile(self, quantile: float) -> int:
        """The value that a share `quantile` (0 to 1) of the observations did not exceed; see `percentiles_of`."""
        return percentiles_of(self.buckets(), [quantile], self.max)[0]


class LatencyHistogram(Histogram):
    """How long something took, in nanoseconds; percentiles are at most an eighth too high (below 100 ns, 10 ns).

    >>> latency = LatencyHistogram()
    >>> for us in range(1, 101):
    ...     latency.observe(us * 1000)
    >>> latency.count, latency.percentile(0.5), latency.percentile(1)
    (100, 50000, 100000)
    """

    __slots__ = ("_shown", "_shown_count")

    def __init__(self) -> None:
        super().__init__(NANOSECONDS)
        self._shown: dict[str, float] = {}
        self._shown_count = -1

    def snapshot(self) -> dict[str, float]:
        """`count`, `p50_us`, `p90_us`, `p99_us`, `max_us` and `sum_s` as plain numbers."""
        if self._shown_count != self.count:
            self._shown_count = self.count
            p50, p90, p99 = percentiles_of(self.buckets(), (0.50, 0.90, 0.99), self.max)
            self._shown = {
                "count": self.count,
                "p50_us": p50 / 1e3,
                "p90_us": p90 / 1e3,
                "p99_us": p99 / 1e3,
                "max_us": self.max / 1e3,
                "sum_s": self.sum / 1e9,
            }
        return dict(self._shown)


def percentiles_of(buckets: Buckets, quantiles: Sequence[float], largest: int = NO_END) -> list[int]:
    """For each of `quantiles` (0 to 1, ascending) the value that this share of the observations did not exceed.

    It is the upper end of the quantile's bucket, never above `largest`; 0 when nothing was observed.
    """
    if any(not 0 <= quantile <= 1 for quantile in quantiles):
        raise ValueError(f"a quantile is 0 to 1, not {quantiles}")
    total = sum(count for _, count in buckets)
    ranks = [max(1, math.ceil(quantile * total)) for quantile in quantiles]
    found: list[int] = []
    seen = 0
    for end, count in buckets:
        seen += count
        while len(found) < len(ranks) and ranks[len(found)] <= seen:
            found.append(min(end, largest))
    return found + [0] * (len(ranks) - len(found))


def cumulative(buckets: Buckets, ends: Sequence[int]) -> list[int]:
    """How many observations were at most each of `ends` (ascending), which should be ends of buckets."""
    counts, seen, place = [], 0, 0
    for end in ends:
        while place < len(buckets) and buckets[place][0] <= end:
            seen += buckets[place][1]
            place += 1
        counts.append(seen)
    return counts


def since(buckets: Buckets, earlier: Buckets) -> list[tuple[int, int]]:
    """The observations between two readings of one histogram."""
    before = dict(earlier)
    grown = ((end, count - before.get(end, 0)) for end, count in buckets)
    return [(end, count) for end, count in grown if count > 0]
