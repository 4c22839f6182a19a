"""Priority of the event loop's thread: it runs before the threads that copy and hash.

The loop computes for microseconds at a time and all clients wait for its answers. On a machine whose cores are all busy
the scheduler counts even that: once the loop has had its share, threads that copy blocks run a tick or two before it.
So it asks for a lower niceness, which the system grants with CAP_SYS_NICE or RLIMIT_NICE.

The I/O threads are not made nicer instead: one that holds the interpreter's lock and does not run would make the loop
wait even longer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

NICENESS = -5
_RESET_ON_FORK = 1  # SCHED_FLAG_RESET_ON_FORK; os.SCHED_RESET_ON_FORK is the bit of another call
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr`: size, policy, flags, nice, priority, runtime, deadline, period (sched_setattr(2))."""


def go_behind(niceness: int) -> bool:
    """Lower the priority of the calling thread; False, with nothing changed, when the system does not grant it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # on Linux, of this thread alone
    except OSError:
        return False
    return True


def go_first() -> bool:
    """Raise the priority of the calling thread; False, with nothing changed, when the system does not grant it.

    Threads and processes that the thread starts from now on have the usual niceness. A niceness set for the process
    from outside stays.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:  # a sandbox that hides it
        return False
    if number is None or niceness != 0:
        return False
    # In one call, so that no thread can be started with it in between.
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, NICENESS, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
