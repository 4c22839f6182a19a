"""How long a helper process may take for what, and how many of what there may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessLimits:
    """What differs between kinds of helper processes. Times are in seconds."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_s: float = 5.0
    """After a life this long the next process follows at once, and after the first shorter one if that had begun to
    serve; else after a pause, twice as long each time."""
    max_late_lines: int = 16
    """The most lines that were given up and are not over: beyond it no line is opened."""
    hung_s: float = 10.0
    """The process hangs if a late call is so old, and it has answered nothing since or has `max_late_lines`."""
    max_undead: int = 4
    """The most killed processes that are still in the kernel: beyond it no other is started. 1: one at a time, ever."""
    silent_s: float = 5.0
    """A process that is ready hangs if it answers no ping within this time; infinite: it is not pinged."""
    reap_s: float = 1.0
    """The thread waits for a killed process at most this long before it counts as undead."""


DEFAULT_LIMITS = ProcessLimits()
