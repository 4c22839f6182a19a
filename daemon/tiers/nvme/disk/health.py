"""Write health of a directory: writes are off after a failure, with back-off, while reads go on."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tiercache.daemon")

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0


class WriteHealth:
    """The write side of one directory. Any failure pauses it; a successful write ends the pause."""

    def __init__(self, name: str, clock_s: Callable[[], float]) -> None:
        self.reason = ""
        self.failures = 0
        self.off_until_s = 0.0  # on `clock_s`
        self._name = name
        self._clock_s = clock_s
        self._pause_s = FIRST_PAUSE_S

    @property
    def may_write(self) -> bool:
        """True if a write should be tried now."""
        return not self.reason or self._clock_s() >= self.off_until_s

    def failed(self, reason: str, writes: int = 1) -> None:
        """So many writes have failed, or the creation of a segment."""
        self.failures += writes
        if self._clock_s() < self.off_until_s:
            return  # it was in progress when the first one failed
        if not self.reason:
            log.warning("%s: writing is off: %s; reads go on, and it is tried again", self._name, reason)
        self.reason = reason
        self.off_until_s = self._clock_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def worked(self) -> bool:
        """A write started after the last failure has worked; True if that ends a pause."""
        if not self.reason or self._clock_s() < self.off_until_s:
            return False
        log.info("%s: writing works again", self._name)
        self.reason = ""
        self._pause_s = FIRST_PAUSE_S
        return True
