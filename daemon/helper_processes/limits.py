"""How long a helper process may take for what, and how many of what there may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessLimits:
    """What differs between kinds of helper processes. Times are in seconds."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_s: float = 5.0
    """After a life of so long the next process follows at once, and after the first shorter one if that had begun to
    serve; else after a pause, twice as long each time."""
    max_late_lines: int = 16
    """Lines that were given up and are not over: with so many, no line is opened."""
    hung_s: float = 10.0
    """The process hangs if a late call is so old, and it has answered nothing since or has `max_late_lines`."""
    max_undead: int = 4
    """Killed processes that are still in the kernel: with so many, no other is started. 1: one at a time, ever."""
    silent_s: float = 5.0
    """A process that is ready and answers no ping for so long hangs; infinite: it is not pinged."""
    reap_s: float = 1.0
    """For so long at most the thread waits for a killed process before it counts as undead."""


DEFAULT_LIMITS = ProcessLimits()
