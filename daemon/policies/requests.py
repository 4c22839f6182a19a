"""What counts as a use of blocks: requests that are answered, and not what the daemon does with them by itself."""

from __future__ import annotations

from collections.abc import Callable

from tiercache.messages import KEY_BYTES

AGAIN_S = 0.25
"""The same prompt so soon after is another worker's question, or a second try."""


class Requests:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self.context: bool = False
        """Whether a request is being answered: what is touched then is used by it."""
        self._asked: tuple[bytes, float] = b"", 0.0

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        """A prompt of these keys was looked up, `found` of them known, `found_dram` in DRAM."""
        before, self._asked = self._asked, (keys[-KEY_BYTES:], self.clock_s())
        self.context = before[0] != self._asked[0] or self._asked[1] - before[1] >= AGAIN_S

    def answered(self) -> None:
        """The request at hand is over."""
        self.context = False
