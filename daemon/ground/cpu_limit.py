"""A limit on the CPU time of a slice of work, which costs little to ask.

The clock of a thread is a system call, the wall clock is none, and no thread uses more CPU time than passes: so the
wall clock is asked first, and the thread's only when the limit would have run out by the former.
"""

from __future__ import annotations

import time


class CpuLimit:
    """Runs out once the calling thread has used `limit_ns` of CPU time since it was made; `math.inf`: never."""

    __slots__ = ("_cpu_end_ns", "_wall_end_ns")

    def __init__(self, limit_ns: float) -> None:
        self._wall_end_ns = time.perf_counter_ns() + limit_ns
        self._cpu_end_ns = time.thread_time_ns() + limit_ns

    @property
    def over(self) -> bool:
        """True if it has run out. For the thread that made it."""
        if time.perf_counter_ns() < self._wall_end_ns:
            return False
        left_ns = self._cpu_end_ns - time.thread_time_ns()
        self._wall_end_ns = time.perf_counter_ns() + left_ns
        return left_ns <= 0
