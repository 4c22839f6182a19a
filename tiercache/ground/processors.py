"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the scheduler gives this process; all of the host where a sandbox does not say. At least 1."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1
