"""What counts as a use of blocks: requests that are answered, and not what the daemon does with them by itself."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES


class Again:
    """Whether a prompt is asked for again: by another worker, or once more until something has come of it."""

    __slots__ = ("_last", "_turnover")

    def __init__(self, turnover: Turnover) -> None:
        self._turnover = turnover
        self._last = b"", 0

    def asked(self, keys: bytes) -> bool:
        """Whether this is the prompt that was asked for last, and nothing has been stored since."""
        before, self._last = self._last, (keys[-KEY_BYTES:], self._turnover.stored_bytes)
        return before == self._last


class Requests:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    def __init__(self, turnover: Turnover) -> None:
        self._again = Again(turnover)
        self.context: bool = False
        """Whether a request is being answered: what is touched then is used by it."""

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        """A prompt of these keys was looked up, `found` of them known, `found_dram` in DRAM."""
        self.context = not self._again.asked(keys)

    def answered(self) -> None:
        """The request at hand is over."""
        self.context = False

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored this run of blocks below `parent`."""
