"""Whether to ask the store at all: a circuit breaker (Nygard, "Release It!").

    CLOSED ─ failures in a row ─► OPEN ─ pause ─► HALF_OPEN: one probe ─ it worked ─► CLOSED, with few jobs at first
                                   ▲                              │
                                   └──────── it failed: longer ───┘

The pauses are random, so that a fleet of hosts does not come back at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from enum import Enum

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

FAILURES = 3
"""Failed jobs in a row, after which the store counts as away; one is enough where it rejects us."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
JITTER = 0.5
"""The random part of each pause."""
RAMP_S = 5.0
"""How long after its return the store gets only some of the jobs, more and more of them."""
FIRST_WRITE_PAUSE_S, LAST_WRITE_PAUSE_S = 1.0, 30.0
"""Time without writes after the store said that it is full or takes none; doubled each time."""
_NO_WRITES = StoreProblem.FULL, StoreProblem.READ_ONLY


class BreakerState(Enum):
    """The states of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Event loop only. `clock_s`: monotonic."""

    def __init__(self, clock_s: Callable[[], float], uniform: Callable[[float, float], float] = random.uniform) -> None:
        self.state = BreakerState.CLOSED
        self.problem = ""
        """What the store said when it last failed; empty after it worked again."""
        self.opened = 0
        """How often the breaker has opened."""
        self._clock_s = clock_s
        self._uniform = uniform
        self._failures: dict[object, int] = {}  # in a row, by kind of job
        self._pause_s = FIRST_PAUSE_S
        self._probe_s = 0.0
        self._closed_s = -math.inf
        self._no_writes_until_s = 0.0
        self._write_pause_s = FIRST_WRITE_PAUSE_S
        self._refused: dict[object, str] = {}  # why, by kind of job that has not worked since the store took no writes

    @property
    def closed(self) -> bool:
        """True if jobs may be given to the store."""
        return self.state is BreakerState.CLOSED

    @property
    def share(self) -> float:
        """Which part of the usual number of jobs the store should get at a time: more than 0, at most 1."""
        return min(1.0, max(0.1, (self._clock_s() - self._closed_s) / RAMP_S))

    @property
    def may_write(self) -> bool:
        """True if it takes writes, as far as we know."""
        return self.closed and self._clock_s() >= self._no_writes_until_s

    @property
    def refusal(self) -> str:
        """What it said when it was full or took no writes; empty if it has taken some of that kind since."""
        return next(reversed(self._refused.values()), "")

    def admits(self) -> bool:
        """True if a look-up should be made now: soon after its return, the store gets only some of them."""
        return self.share >= 1.0 or self._uniform(0.0, 1.0) < self.share

    def wants_probe(self) -> bool:
        """True if it is time to try the store again; the probe's outcome must then be told."""
        if self.state is BreakerState.OPEN and self._clock_s() >= self._probe_s:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def worked(self, kind: object = None) -> None:
        """A job of some kind, or the probe, has worked."""
        if kind in self._refused:
            del self._refused[kind]
            self._write_pause_s = FIRST_WRITE_PAUSE_S
        self._answered(kind)

    def _answered(self, kind: object) -> None:
        self._failures.pop(kind, None)
        if self.state is BreakerState.HALF_OPEN:
            self.state, self._closed_s = BreakerState.CLOSED, self._clock_s()
            self._failures.clear()
            self.problem = self.refusal
        elif self.closed and not self._failures:
            self.problem = self.refusal
            # Not sooner: a store that comes and goes would be tried after a short pause each time.
            if self._clock_s() - self._closed_s >= LAST_PAUSE_S:
                self._pause_s = FIRST_PAUSE_S

    def failed(self, error: StoreError, kind: object = None) -> bool:
        """A job of some kind, or the probe, has failed; returns whether the breaker opened with that.

        Kinds are counted apart: look-ups may work where nothing large comes through.
        """
        now_s = self._clock_s()
        if error.problem in _NO_WRITES:
            self._refused[kind] = error.text
            if now_s >= self._no_writes_until_s:  # else it was asked before it said so
                self._no_writes_until_s = now_s + self._uniform(1 - JITTER, 1 + JITTER) * self._write_pause_s
                self._write_pause_s = min(LAST_WRITE_PAUSE_S, 2 * self._write_pause_s)
            self._answered(kind)
            self.problem = error.text
            return False
        self._failures[kind] = self._failures.get(kind, 0) + 1
        self.problem = error.text
        if self.state is BreakerState.OPEN:
            return False
        enough = self._failures[kind] >= FAILURES or error.problem is StoreProblem.DENIED
        if self.state is BreakerState.CLOSED and not enough:
            return False
        opened = self.state is BreakerState.CLOSED
        self.opened += opened
        self.state = BreakerState.OPEN
        self._probe_s = now_s + self._uniform(1 - JITTER, 1 + JITTER) * self._pause_s
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        return opened

    def stats(self) -> dict[str, object]:
        """For `stats`."""
        return {"state": self.state.value, "opened": self.opened, "problem": self.problem}
