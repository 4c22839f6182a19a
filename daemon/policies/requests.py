"""What counts as a use of blocks: requests of clients, not the daemon's own moves."""

from __future__ import annotations

from collections.abc import Sequence

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


class Requests:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    def __init__(self, turnover: Turnover) -> None:
        self._again = Again(turnover)
        self.context: bool = False
        """Whether a request is being answered: blocks touched meanwhile count as used."""

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM."""
        self.context = not self._again.asked(keys)

    def answered(self) -> None:
        """The current request is over."""
        self.context = False

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored this run of blocks below `parent`."""
