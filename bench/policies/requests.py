"""What counts as a use of blocks: requests of clients, not the daemon's own moves."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.index.policy import USED, Touch
from tiercache.daemon.policies.predictor import Again
from tiercache.daemon.policies.turnover import Turnover

COUNTED = Touch(by_client=True, counts=True)
"""Touches by a request, unless it repeats an earlier one."""


class Requests:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    def __init__(self, turnover: Turnover) -> None:
        self._again = Again(turnover)

    def asked(self, keys: bytes, found_dram: int, found: int) -> Touch:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM."""
        return USED if self._again.asked(keys) else COUNTED

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored this run of blocks below `parent`."""
