"""Hints: what an engine knows of the further use of its stored blocks, as advice to the daemon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tiercache.protocol.messages import MAX_HINT_MS, Priority


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint about a chain of blocks: advice, not an order.

    It is about the blocks at the end of the chain that no other chain shares. What it leaves unsaid keeps its earlier
    value. Leases, pins and quotas take precedence over hints, and every block may be lost at any time, as always.

        Hint(done=True)               # this session is over: its blocks go next
        Hint(return_in_s=40)          # a tool runs for about this time: keep them until then, and have them in DRAM
        Hint(ttl_s=3600)              # of no use after an hour
        Hint(priority=Priority.LOW)   # a batch job: its blocks go before those of others

    Attributes:
        done: these blocks will not be asked for again.
        return_in_s: seconds until they are asked for, about.
        ttl_s: seconds after which they are dropped from all tiers, as soon as no lease or pin holds them.
        priority: LOW ones are evicted before all others, HIGH ones after all others, up to a share of each tier.

    Raises ValueError for times that are not positive numbers, for `done` together with `return_in_s`, and for a hint
    that says nothing.
    """

    done: bool = False
    return_in_s: float | None = None
    ttl_s: float | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        for name in ("return_in_s", "ttl_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{name} is {seconds}: must be a number of seconds above 0")
        if self.priority is not None:
            Priority(self.priority)
        if self.done and self.return_in_s is not None:
            raise ValueError(
                "done says that no client comes back, and return_in_s when one does: give only one of them"
            )
        if not (self.done or self.return_in_s or self.ttl_s or self.priority):
            raise ValueError("the hint says nothing: give done, return_in_s, ttl_s or priority")

    def fields(self) -> dict[str, Any]:
        """The fields of the request `Hint`."""
        return {
            "done": self.done,
            "return_in_ms": _ms(self.return_in_s),
            "ttl_ms": _ms(self.ttl_s),
            "priority": int(self.priority or 0),
        }


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, min(MAX_HINT_MS, round(min(seconds, MAX_HINT_MS) * 1000)))
