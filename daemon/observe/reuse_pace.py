"""Limits the work of the sample: when its rate must fall, and when it may rise."""

from __future__ import annotations

from math import ceil, log2

MAX_SAMPLES_PER_S = 500
"""Sampled blocks looked up or stored, over SAMPLES_S: long, so that bursts do not lower the rate."""
SAMPLES_S = 40.0
MAX_REQUESTS_PER_S = 30
"""Requests with any sampled block, over REQUESTS_S; they cost the most, and those without next to nothing."""
REQUESTS_S = 4.0
SUSTAINED_S = 2.0
"""Shorter excess is ignored: to have fewer such requests takes a much lower rate, for half an hour or more."""


class Pace:
    """Measures the work. Within both bounds it is below 1 ms of a core per second."""

    def __init__(self, now_s: float) -> None:
        self._samples = _Bound(MAX_SAMPLES_PER_S, SAMPLES_S, 0.0, now_s)
        self._requests = _Bound(MAX_REQUESTS_PER_S, REQUESTS_S, SUSTAINED_S, now_s)
        self._each = 0.0  # samples per request

    def spend(self, samples: int, now_s: float) -> int:
        """Count a request with so many sampled blocks. Returns how often to halve the rate now: nearly always 0."""
        too_many, too_often = self._samples.add(samples, now_s), self._requests.add(1, now_s)
        self._each += (samples - self._each) / 16
        if not too_many and not too_often:
            return 0
        self._samples.begin(now_s)
        self._requests.begin(now_s)
        if too_often:  # so low a rate that at most half of the allowed requests have any
            return 1 + ceil(log2(max(self._each, 1.0) * max(too_often, 1.0)))
        return 1

    def turn(self) -> float:
        """The largest part of a bound that was reached since the last turn."""
        return max(self._samples.turn(), self._requests.turn())


class _Bound:
    """A limit per second, over a span of time; it is exceeded once excess has lasted for `patience_s`."""

    def __init__(self, per_s: float, span_s: float, patience_s: float, now_s: float) -> None:
        self._count = self._worst = 0
        self._most = per_s * span_s
        self._span_s = span_s
        self._patience_s = patience_s
        self._since_s = now_s

    def add(self, count: int, now_s: float) -> float:
        """By what factor the limit was exceeded; 0 when it was not."""
        past_s = now_s - self._since_s
        if past_s >= self._span_s:
            self.begin(now_s)
            past_s = 0.0
        self._count += count
        if self._count <= self._most or past_s < self._patience_s:
            return 0.0
        return self._span_s / max(past_s, 1.0)

    def begin(self, now_s: float) -> None:
        """Begin another span."""
        self._worst = max(self._worst, self._count)
        self._count, self._since_s = 0, now_s

    def turn(self) -> float:
        """The largest part of the limit reached in one span since the last turn."""
        worst, self._worst = max(self._worst, self._count), 0
        return worst / self._most
