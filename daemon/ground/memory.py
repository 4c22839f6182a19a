"""Tunes the allocator and the garbage collector so that neither holds up the event loop.

The index is in columns that grow at their end. From here on a large one has pages of its own, which the kernel moves
without a copy; by default the C library raises the size threshold for that as it goes, and columns of tens of megabytes
are copied whenever they grow.
"""

from __future__ import annotations

import ctypes
import gc
import logging

log = logging.getLogger("tiercache.daemon")

OWN_PAGES_BYTES = 768 << 10
"""Threshold: more than what numpy repeatedly allocates for the longest list of keys."""
KEPT_BYTES = 8 << 20
"""Free memory at the end of the heap that is not returned to the kernel: room for the keys of some long requests, which
would else need new pages each time."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GC_THRESHOLDS = (1_000, 3, 30_000)
"""Scanning 12000 new objects takes 3 ms: so some thousands at a time, and all of them as seldom as possible."""


def grow_without_copies() -> None:
    """Give large allocations pages of their own from here on, and keep those of freed smaller ones.

    Does nothing unless the C library is glibc.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    if not set_option(_M_MMAP_THRESHOLD, OWN_PAGES_BYTES) or not set_option(_M_TRIM_THRESHOLD, KEPT_BYTES):
        log.debug("large columns are copied as they grow, and long requests find new pages: mallopt has refused")


def collect_in_small_parts() -> None:
    """Exclude present objects from all collections, and collect new ones some thousands at a time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
