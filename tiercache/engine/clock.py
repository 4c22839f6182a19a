"""Time as an engine sees it: for deadlines, and for what computing and loading cost."""

from __future__ import annotations

import time


class Clock:
    """The real time. An engine takes all of its time from one clock, so another one makes its decisions repeatable."""

    def now_s(self) -> float:
        """Seconds since some fixed point; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
