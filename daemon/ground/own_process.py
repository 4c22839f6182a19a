"""Resource usage of the daemon's process, read by itself: the reader of `stats` may be in another PID namespace."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_FIELD = 19
"""Index of the start time among the fields of /proc/self/stat after the process's name (proc(5))."""


def process_figures() -> dict[str, Any]:
    """CPU time, start, address space and descriptors. Some 50 us, and 0.2 us per open descriptor."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "started_unix_s": _STARTED_S,
        "cpu_s": time.process_time(),
        "vm_bytes": pages * _PAGE_BYTES,
        "open_fds": len(os.listdir("/proc/self/fd")) - 1,  # one is that of the listing
        **({} if soft == resource.RLIM_INFINITY else {"max_fds": soft}),
    }


def rss_bytes() -> tuple[int, int]:
    """Resident bytes of this process: all, and those that are shared memory."""
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        text = os.read(fd, 8192)
    finally:
        os.close(fd)
    fields = (text.partition(name)[2].split(None, 1)[0] for name in (b"VmRSS:", b"RssShmem:"))
    resident, shared = (int(field) * 1024 for field in fields)
    return resident, shared


def _started_s() -> float:
    """Start time of this process, in Unix time: read once, so that setting the clock does not look like a restart."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[_START_FIELD])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS_PER_S


_STARTED_S = round(_started_s(), 3)
