"""A limit on bytes in a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class ByteRate:
    """A token bucket of one second's bytes; 0 means no limit. `clock_s`: monotonic."""

    def __init__(self, bytes_per_s: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_s
        self._level = float(bytes_per_s)
        self._clock_s = clock_s
        self._seen_s = clock_s()

    def has_room(self) -> bool:
        """True if more may be sent; what is sent is charged afterwards, so a large value leaves it in debt."""
        if not self._rate:
            return True
        now_s = self._clock_s()
        self._level = min(float(self._rate), self._level + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        return self._level > 0

    def charge(self, size_bytes: int) -> None:
        """Charge bytes that are sent."""
        self._level -= size_bytes
