"""How the daemon's own memory is managed, so that no single allocation or collection holds up the loop.

The index is in columns that grow at their end. A large one has pages of its own here, which the kernel moves without a
copy; by default the C library raises the size from which that is so as it goes, and columns of tens of megabytes are
copied whenever they grow.
"""

from __future__ import annotations

import ctypes
import gc
import logging

log = logging.getLogger("tiercache.daemon")

OWN_PAGES_BYTES = 768 << 10
"""From this size on: more than what numpy takes for the longest list of keys, again and again."""
_M_MMAP_THRESHOLD = -3
_GC_THRESHOLDS = (1_000, 3, 30_000)
"""A look at 12000 new objects takes 3 ms: so some thousands at a time, and at all of them as seldom as can be."""


def grow_without_copies() -> None:
    """Give large blocks pages of their own from here on. Does nothing where the C library is not glibc."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    if not set_option(_M_MMAP_THRESHOLD, OWN_PAGES_BYTES):
        log.debug("large columns of the index are copied when they grow: mallopt has refused")


def collect_in_small_parts() -> None:
    """Leave what is here now out of all collections, and look at what comes some thousands at a time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
