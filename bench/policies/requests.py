"""What counts as a use of blocks: requests of clients, not the daemon's own moves."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.policies.requests import Again
from tiercache.daemon.policies.turnover import Turnover


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
