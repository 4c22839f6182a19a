"""What is known of the end of a chain because a client has said it, and where that puts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tiercache.protocol.messages import Priority

LATE_SHARE = 0.5
LATE_S = 1.0
"""Somebody who said to be back in a while is waited for, for this share of the while, and this time, longer."""
ABOUT_SHARE = 0.2
"""Of that: how sure anybody is to come at the very time."""


class Group(Enum):
    """What becomes of a marked block while it is a candidate."""

    NONE = "no candidate"
    PLAIN = "the policy's"
    EXPIRED = "expired"
    DONE = "done"
    LOW = "low"
    BACK = "back"
    HIGH = "high"


@dataclass(slots=True)
class Mark:
    """What was said of a block, and of the `own` - 1 before it that no other chain shared then.

    Attributes:
        own: blocks that the mark is about.
        stamp: the columns' clock when it was said: a later use takes `done` and `back_s` back.
        done: nobody asks for it again.
        back_s, late_s: when it is asked for, and until when that is waited for; 0 for nothing known.
        until_s: it is of no use from then on.
        priority: as it was said, NORMAL if nothing was.
        group: where it stands now.
    """

    own: int = 1
    stamp: int = 0
    done: bool = False
    back_s: float = 0.0
    late_s: float = 0.0
    until_s: float = math.inf
    priority: Priority = Priority.NORMAL
    group: Group = Group.NONE

    def used(self) -> None:
        """Somebody has asked for it."""
        self.done, self.back_s, self.late_s = False, 0.0, 0.0

    def wait_s(self, now_s: float) -> float:
        """How long somebody who is awaited probably takes still; who is about to come may be a little late."""
        return max(self.back_s - now_s, ABOUT_SHARE * (self.late_s - self.back_s))

    @property
    def empty(self) -> bool:
        """Whether it says nothing any more."""
        return not (self.done or self.late_s) and self.until_s == math.inf and self.priority is Priority.NORMAL

    def hand_on(self, earlier: Mark | None) -> None:
        """It is the block before's now, of which perhaps something was said `earlier`; what is said later counts."""
        self.own, self.group = self.own - 1, Group.NONE
        if earlier is not None:
            self.own = max(self.own, earlier.own)
            self.until_s = earlier.until_s if self.until_s == math.inf else self.until_s
            self.priority = earlier.priority if self.priority is Priority.NORMAL else self.priority

    def group_at(self, now_s: float) -> Group:
        """Where a candidate of this mark belongs."""
        if self.until_s <= now_s:
            return Group.EXPIRED
        if self.done:
            return Group.DONE
        if self.priority is Priority.LOW:
            return Group.LOW
        if self.late_s > now_s:
            return Group.BACK
        return Group.HIGH if self.priority is Priority.HIGH else Group.PLAIN
