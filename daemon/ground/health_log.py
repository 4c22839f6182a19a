"""Logs each change of the daemon's health in one line, and nothing while it stays the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tiercache.ground.units import without_quantities

from .logs import fields

log = logging.getLogger("tiercache.daemon")

LOOK_S = 1.0
START_S = 3.0
"""What is missing just after the start is no news: memory, directories."""


class HealthLog:
    """Compares the reasons for bad health with those of the last look. Event loop only."""

    def __init__(self) -> None:
        self.next_s = time.monotonic() + START_S
        self._known: set[str] = set()
        self._since_s = 0.0

    def look(self, reasons: Sequence[str], now_s: float | None = None) -> None:
        """Log what has changed. Reasons that differ only in their quantities (how long, how much) count as the same."""
        now_s = time.monotonic() if now_s is None else now_s
        self.next_s = now_s + LOOK_S
        kinds = {without_quantities(reason): reason for reason in reasons}
        for kind, reason in kinds.items():
            if kind not in self._known:
                log.warning("health: degraded: %s", reason, **fields(event="health", state="degraded", reason=reason))
        if kinds and not self._known:
            self._since_s = now_s
        elif self._known and not kinds:
            degraded_s = now_s - self._since_s
            more = fields(event="health", state="ok", degraded_s=round(degraded_s, 1))
            log.info("health: ok again, after %.0f s", degraded_s, **more)
        self._known = set(kinds)
