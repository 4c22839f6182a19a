"""The mark of a chain's end: what clients have hinted about it, and the group that puts it in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tiercache.protocol.messages import Priority

LATE_SHARE = 0.5
LATE_S = 1.0
"""How long a client is awaited beyond the time it gave: this share of the wait, and at least this time."""
ABOUT_SHARE = 0.2
"""The uncertainty of a return time, as a share of that."""


class HintGroup(Enum):
    """How a marked block is treated while it is a candidate."""

    NONE = "no candidate"
    PLAIN = "the policy's"
    EXPIRED = "expired"
    DONE = "done"
    LOW = "low"
    BACK = "back"
    HIGH = "high"


@dataclass(slots=True)
class Mark:
    """What was hinted about a block, and about the `own` - 1 blocks before it that no other chain shared then.

    Attributes:
        own: blocks that the mark is about.
        stamp: the columns' clock when it was said: a later use cancels `done` and `back_s`.
        done: it will not be asked for again.
        back_s, late_s: when it will be asked for, and until when it is awaited; 0 if unknown.
        until_s: it is of no use from then on.
        priority: as it was said, NORMAL if it was not.
        group: its present group.
    """

    own: int = 1
    stamp: int = 0
    done: bool = False
    back_s: float = 0.0
    late_s: float = 0.0
    until_s: float = math.inf
    priority: Priority = Priority.NORMAL
    group: HintGroup = HintGroup.NONE

    def used(self) -> None:
        """The block was asked for."""
        self.done, self.back_s, self.late_s = False, 0.0, 0.0

    def wait_s(self, now_s: float) -> float:
        """Expected time until an awaited client returns; one due about now may be a little late."""
        return max(self.back_s - now_s, ABOUT_SHARE * (self.late_s - self.back_s))

    @property
    def empty(self) -> bool:
        """True if it says nothing any more."""
        return not (self.done or self.late_s) and self.until_s == math.inf and self.priority is Priority.NORMAL

    def hand_on(self, earlier: Mark | None) -> None:
        """Pass it to the block before, which may have an `earlier` mark; the later hint takes precedence."""
        self.own, self.group = self.own - 1, HintGroup.NONE
        if earlier is not None:
            self.own = max(self.own, earlier.own)
            self.until_s = earlier.until_s if self.until_s == math.inf else self.until_s
            self.priority = earlier.priority if self.priority is Priority.NORMAL else self.priority

    def group_at(self, now_s: float) -> HintGroup:
        """The group of a candidate with this mark."""
        if self.until_s <= now_s:
            return HintGroup.EXPIRED
        if self.done:
            return HintGroup.DONE
        if self.priority is Priority.LOW:
            return HintGroup.LOW
        if self.late_s > now_s:
            return HintGroup.BACK
        return HintGroup.HIGH if self.priority is Priority.HIGH else HintGroup.PLAIN
