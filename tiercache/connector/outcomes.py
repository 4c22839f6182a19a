"""Counts what a connector does, and logs a failure once: when it begins."""

from __future__ import annotations

import logging
import threading

from tiercache.errors import CallInterrupted, DaemonUnavailable, RequestRefused, TierCacheError
from tiercache.ground import forks

COUNTERS = (
    "matches",  # match() calls with keys
    "matched_blocks",
    "adoptions",
    "loads",
    "loads_short",  # loads that brought fewer good blocks than they asked for
    "loaded_blocks",
    "loaded_bytes",
    "stores",
    "stored_blocks",
    "stored_bytes",
    "dropped_blocks",  # blocks of stores that were not kept
    "hints",  # accepted by the daemon
    "unavailable",  # calls that were misses because the daemon was down
    "failures",  # calls that were misses for another reason
)

logger = logging.getLogger("tiercache.connector")


class Outcomes:
    """What became of one connector's calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may use the connector while this thread has it
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._logged: set[str] = set()  # failures, until their operation succeeds
        forks.watch(self, "_lock")

    def counts(self) -> dict[str, int]:
        """By the names of `COUNTERS`."""
        with self._lock:
            return dict(self._counts)

    def count(self, **counts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def unavailable(self, counter: str, forked: bool) -> None:
        """Count a call that was a miss because the daemon is down, or out of reach of a `forked` child."""
        self.count(**{counter: 1, "unavailable": 1})
        if forked and "fork" not in self._logged:
            self._logged = self._logged | {"fork"}
            logger.warning("the cache is not used: %s", forks.FORKED)

    def succeeded(self, operation: str, **counts: int) -> None:
        """Count a success; the next failure of this operation is logged again."""
        self.count(**counts)
        if self._logged:
            self._logged = {failure for failure in self._logged if not failure.startswith(operation)}

    def failed(self, operation: str, error: TierCacheError) -> None:
        """Count a failure, and log it unless it was also the last one logged for this operation."""
        self.count(failures=1)
        if isinstance(error, (DaemonUnavailable, CallInterrupted)):
            return  # the client logs when the daemon goes and comes, and the caller knows of a signal
        code = error.code if isinstance(error, RequestRefused) else type(error).__name__
        if f"{operation}:{code}" not in self._logged:
            self._logged = self._logged | {f"{operation}:{code}"}
            logger.warning("%s failed, and counts as a miss: %s", operation, error)
