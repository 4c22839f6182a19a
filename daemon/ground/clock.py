"""The lease clock: monotonic time without the time in which the daemon was stalled."""

from __future__ import annotations

import time

STALL_S = 0.1
"""A longer gap between two calls of `observe` is a stall of the daemon."""


class LeaseClock:
    """Seconds that stand still while the daemon does (a stopped process, a paused VM).

    A client cannot renew a lease with a daemon that does not run, so such time must not count against the lease. The
    loop calls `observe` at least every tick; the part of a gap that exceeds a stall is subtracted.
    """

    def __init__(self) -> None:
        self.stalls = 0
        self._stalled_s = 0.0
        self._seen_s = time.monotonic()

    def observe(self, meant_s: float = 0.0) -> float:
        """Read the clock, `meant_s` after the last time unless something stalls; returns monotonic seconds."""
        now_s = time.monotonic()
        gap_s = now_s - self._seen_s
        if gap_s > STALL_S + meant_s:
            self.stalls += 1
            self._stalled_s += gap_s
        self._seen_s = now_s
        return now_s

    def __call__(self) -> float:
        """Lease time now, as of the last `observe`."""
        return self._seen_s - self._stalled_s
