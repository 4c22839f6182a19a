"""Which requests policies learn from: not a prompt that is looked up again."""

from __future__ import annotations

from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES


class Again:
    """Tells whether a prompt is looked up again: by another worker, or repeatedly until it has been stored."""

    __slots__ = ("_last", "_turnover")

    def __init__(self, turnover: Turnover) -> None:
        self._turnover = turnover
        self._last = b"", 0

    def asked(self, keys: bytes) -> bool:
        """Whether this prompt was also the last one looked up, with nothing stored since."""
        before, self._last = self._last, (keys[-KEY_BYTES:], self._turnover.stored_bytes)
        return before == self._last
