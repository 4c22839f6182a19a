"""How much work the sample may make: when its rate is to be lower, and when there is room for a higher one."""

from __future__ import annotations

from math import ceil, log2

MAX_SAMPLES_PER_S = 500
"""Blocks of the sample that are looked up or stored, over SAMPLES_S: long, so that what comes in bursts is not thinned
out for them."""
SAMPLES_S = 40.0
MAX_REQUESTS_PER_S = 30
"""Requests with any block of the sample, over REQUESTS_S; they cost the most, and those without next to nothing."""
REQUESTS_S = 4.0
SUSTAINED_S = 2.0
"""What is over sooner is let be: to have less of such requests takes a much lower rate, for half an hour or more."""


class Pace:
    """Counts the work. With both bounds it is below 1 ms of a core in every second."""

    def __init__(self, now_s: float) -> None:
        self._samples = _Bound(MAX_SAMPLES_PER_S, SAMPLES_S, 0.0, now_s)
        self._requests = _Bound(MAX_REQUESTS_PER_S, REQUESTS_S, SUSTAINED_S, now_s)
        self._each = 0.0  # samples of a request

    def spend(self, samples: int, now_s: float) -> int:
        """A request with so many blocks of the sample. How often the rate is to be halved now: 0, nearly always."""
        too_many, too_often = self._samples.add(samples, now_s), self._requests.add(1, now_s)
        self._each += (samples - self._each) / 16
        if not too_many and not too_often:
            return 0
        self._samples.begin(now_s)
        self._requests.begin(now_s)
        if too_often:  # so low a rate that half of what may be, at most, has any
            return 1 + ceil(log2(max(self._each, 1.0) * max(too_often, 1.0)))
        return 1

    def turn(self) -> float:
        """What part of a bound was reached since the last turn, the greatest of all times."""
        return max(self._samples.turn(), self._requests.turn())


class _Bound:
    """So many a second, over a span of time; more are too many once they have come for `patience_s`."""

    def __init__(self, per_s: float, span_s: float, patience_s: float, now_s: float) -> None:
        self._count = self._worst = 0
        self._most = per_s * span_s
        self._span_s = span_s
        self._patience_s = patience_s
        self._since_s = now_s

    def add(self, count: int, now_s: float) -> float:
        """How many times too fast these came; 0 when they did not."""
        past_s = now_s - self._since_s
        if past_s >= self._span_s:
            self.begin(now_s)
            past_s = 0.0
        self._count += count
        if self._count <= self._most or past_s < self._patience_s:
            return 0.0
        return self._span_s / max(past_s, 1.0)

    def begin(self, now_s: float) -> None:
        """Another span."""
        self._worst = max(self._worst, self._count)
        self._count, self._since_s = 0, now_s

    def turn(self) -> float:
        """What part of all that may be there was since the last turn, in one span."""
        worst, self._worst = max(self._worst, self._count), 0
        return worst / self._most
