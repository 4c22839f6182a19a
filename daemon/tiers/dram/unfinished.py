"""Unfinished stores: how many bytes of frames or slots each client may still be writing to, and the limit of that.

A client that hangs keeps its places: they wait in quarantine until its process exits. So what a client may have is
limited before it writes, and a part of the arena stays readable, however many clients hang. A complete block counts too
until the one before it is complete: it cannot be read, nor evicted. The count is per party, a process of this host or a
tenant on others: clients choose their instances.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.ground.units import format_bytes
from tiercache.protocol.messages import MAX_RESERVE

from .leases import Owner, StoreLease

FLOOR_SHARE = 0.25
"""Share of the arena, in a daemon, that all clients together leave free. One client alone leaves twice as much."""
_TOLD_SHARE = 2
"""`health` reports a quarantine from half of the limit on."""
_MAX_TOLD = 4
_LEASES_AT_ONCE = 2048
_TRIES = 3


class Unfinished:
    """Bytes by party; `limit_bytes` is the most that one may have. Event loop only.

    Of `room_bytes()`, the size of the arena, all parties together leave `floor_share` free, and one alone twice that.
    """

    def __init__(
        self, limit_bytes: int, floor_share: float = 0.0, room_bytes: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._limit_bytes = limit_bytes
        self._floor_share = floor_share
        self._room_bytes = room_bytes
        self._held: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._changes = 0  # of any of these

    @property
    def _limit_of_one_bytes(self) -> float:
        return min(self._limit_bytes, self._room_bytes() * (1 - 2 * self._floor_share))

    @property
    def _limit_of_all_bytes(self) -> float:
        return self._room_bytes() * (1 - self._floor_share)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in quarantine until clients exit."""
        return self._quarantined.total()

    def most_places(self, owner: Owner, frame_bytes: int) -> int:
        """How many places a new lease may have. At least one if its party has none, so that it can make progress."""
        if owner.internal:
            return MAX_RESERVE
        held_bytes = self._held[owner.party]
        room_bytes = min(self._limit_of_one_bytes - held_bytes, self._limit_of_all_bytes - self._held.total())
        return max(0 if held_bytes else 1, int(room_bytes // frame_bytes))

    def count(self, lease: StoreLease, frames: int) -> None:
        """Count the frames that a writer got, or gave back."""
        self._changes += 1
        lease.writing += frames
        lease.frames += frames
        if not lease.owner.internal:
            _add(self._held, lease.owner.party, frames * lease.frame_bytes)
            if lease.over:
                _add(self._quarantined, lease.owner.party, frames * lease.frame_bytes)

    def complete(self, lease: StoreLease, frames: int) -> None:
        """Count frames whose writer is done: they wait to be published."""
        self._changes += 1
        lease.writing -= frames

    def settle(self, lease: StoreLease, frames: int) -> None:
        """Count complete blocks that were published, or dropped."""
        self._changes += 1
        lease.frames -= frames
        if not lease.owner.internal:
            _add(self._held, lease.owner.party, -frames * lease.frame_bytes)

    def give_up(self, lease: StoreLease) -> None:
        """The lease is over: the frames of its writer are in quarantine."""
        self._changes += 1
        lease.over = True
        if not lease.owner.internal:
            _add(self._quarantined, lease.owner.party, lease.writing * lease.frame_bytes)

    def reasons(self) -> list[str]:
        """Whose unfinished stores take so large a part of the arena that operators should know."""
        each_bytes, all_bytes = self._limit_of_one_bytes // _TOLD_SHARE, self._limit_of_all_bytes // _TOLD_SHARE
        text = "of the arena wait in quarantine for"
        reasons = [
            f"{format_bytes(party_bytes)} {text} {party}, which does not finish its stores: restart it"
            for party, party_bytes in self._quarantined.most_common(_MAX_TOLD)
            if party_bytes >= each_bytes
        ]
        if not reasons and self.quarantined_bytes >= all_bytes > 0:
            clients = len(self._quarantined)
            reasons.append(
                f"{format_bytes(self.quarantined_bytes)} {text} {clients} clients, which do not finish their stores: "
                "restart engines that hang"
            )
        return reasons

    def check(self, leases: Callable[[], Sequence[StoreLease]]) -> Steps[list[str]]:
        """Findings where the frames of all write leases differ from the counts here.

        Finds nothing while there are many leases whose frames change all the time.
        """
        for _ in range(_TRIES):
            changes, held, quarantined = self._changes, Counter[str](), Counter[str]()
            for number, lease in enumerate(leases(), 1):
                if not lease.owner.internal:
                    held[lease.owner.party] += lease.frames * lease.frame_bytes
                    quarantined[lease.owner.party] += lease.writing * lease.frame_bytes * lease.over
                if not number % _LEASES_AT_ONCE:
                    yield
                    if self._changes != changes:
                        break
            else:
                counted = {"being written": (self._held, held), "in quarantine": (self._quarantined, quarantined)}
                pairs = counted.items()
                return [
                    f"frames {what} are not counted as they are" for what, (ours, counted) in pairs if ours != +counted
                ]
        return []


def _add(counts: Counter[str], party: str, more_bytes: int) -> None:
    counts[party] += more_bytes
    if not counts[party]:
        del counts[party]
