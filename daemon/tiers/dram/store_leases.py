"""Leases to store, and the quarantine: places that a client may still write to get no other owner.

    begin ─► live ─┬ committed ─► ended
                   ├ aborted, its copies finished ─► ended
                   └ expired, session lost, aborted with copies under way ─► in quarantine
                                    │
                                    └ told that the copies are finished, or the process has exited ─► ended

The frames that `dram/writes` gives out are leased like this, and the slots of `nvme/direct/grants`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.slices import Steps

from .leases import Deadlines, Owner, StoreLease
from .unfinished import Unfinished

PLACES_AT_ONCE = 1024
"""Places of leases that are given up or ended in one go: a millisecond or two of the event loop."""
LEASE_STEPS = 8
"""What giving up a lease costs beside its places: it has up to `MAX_RESERVE` of those."""
NOTES_AT_ONCE = 512
"""Deadlines checked in one go; most belong to leases that have ended before."""

AStoreLease = TypeVar("AStoreLease", bound=StoreLease)


class StoreLeases(ABC, Generic[AStoreLease]):
    """All leases to store of one kind, those in quarantine included. Event loop only."""

    def __init__(self, unfinished: Unfinished, counters: Counters, clock_s: Callable[[], float]) -> None:
        self.leases: dict[int, AStoreLease] = {}
        self.quarantined: dict[int, AStoreLease] = {}
        self.unfinished = unfinished
        self._counters = counters
        self._clock_s = clock_s
        self._deadlines = Deadlines(self.leases)

    def _begin(self, lease: AStoreLease, places: int) -> None:
        """Count places that a writer gets."""
        self.unfinished.count(lease, places)
        lease.steps = LEASE_STEPS + places
        self.leases[lease.lease_id] = lease.owner.writes[lease.lease_id] = lease
        self._deadlines.add(lease.deadline_s, lease.lease_id)

    def _find(self, owner: Owner, lease_id: int) -> AStoreLease | None:
        """A live or quarantined lease of the same instance; the daemon's own leases are found by no client."""
        lease = self.leases.get(lease_id) or self.quarantined.get(lease_id)
        return lease if lease is not None and lease.owner.same_engine(owner) else None

    def renew(self, lease: AStoreLease, ttl_s: float) -> None:
        """Move the deadline of a live lease."""
        lease.deadline_s = self._clock_s() + ttl_s
        self._deadlines.add(lease.deadline_s, lease.lease_id)

    def abort(self, owner: Owner, lease_id: int, finished: bool) -> None:
        """Drop what was not committed. Unless `finished`, its places go into quarantine."""
        lease = self._find(owner, lease_id)
        if lease is not None:
            self.give_up(lease, finished)

    def give_up(self, lease: AStoreLease, finished: bool = False) -> None:
        """Publish nothing more of this lease; its places wait in quarantine, unless its copies have `finished`."""
        if not lease.over:
            self.unfinished.give_up(lease)
            self._close(lease)
            del self.leases[lease.lease_id], lease.owner.writes[lease.lease_id]
            self.quarantined[lease.lease_id] = lease.owner.quarantined[lease.lease_id] = lease
            finished = finished or not lease.writes_directly
            self._counters.quarantines += lease.writing > 0 and not finished
        if finished:
            self.finish(lease)
        else:
            self._end_if_done(lease)

    def finish(self, lease: AStoreLease) -> None:
        """All copies of a lease that is over have ended."""
        self._free(lease)
        self._end_if_done(lease)

    def _end_if_done(self, lease: AStoreLease) -> bool:
        """End a lease whose writer has no place any more. Whether it ends now."""
        if lease.writing:
            return False
        owner = lease.owner
        leases, owned = (self.quarantined, owner.quarantined) if lease.over else (self.leases, owner.writes)
        owned.pop(lease.lease_id, None)
        return leases.pop(lease.lease_id, None) is not None

    def expire(self) -> None:
        """Give up expired leases, a slice of them."""
        now_s, steps = self._clock_s(), 0
        for lease_id in islice(self._deadlines.due(now_s), NOTES_AT_ONCE):
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline_s <= now_s:
                self._counters.leases_expired += 1
                steps += lease.steps
                self.give_up(lease)
                if steps >= PLACES_AT_ONCE:
                    break

    def check(self) -> Steps[list[str]]:
        """Where the counts of what writers have differ from the leases."""
        findings = yield from self.unfinished.check(lambda: list(self._all()))
        leases = list(self.quarantined.values())
        mine = all(lease.owner.quarantined.get(lease.lease_id) is lease for lease in leases)
        return findings if mine else [*findings, "a lease in quarantine is not its owner's"]

    def _all(self) -> Iterator[AStoreLease]:
        yield from self.leases.values()
        yield from self.quarantined.values()

    @abstractmethod
    def _close(self, lease: AStoreLease) -> None:
        """The lease is over: publish nothing more of it."""

    @abstractmethod
    def _free(self, lease: AStoreLease) -> None:
        """Give back the places of blocks that were dropped: nothing writes to them any more."""


def session_lost(owner: Owner) -> Steps[None]:
    """The session is closed; its process may still be copying."""
    # Between two slices other sessions of its instance may end some of them.
    while owner.writes:
        for lease in _some(owner.writes.values()):
            lease.kept_by.give_up(lease)
        if owner.writes:
            yield


def process_gone(owner: Owner) -> Steps[None]:
    """The process has exited, so it writes to no place any more."""
    yield from session_lost(owner)
    while owner.quarantined:
        for lease in _some(owner.quarantined.values()):
            lease.kept_by.finish(lease)
        if owner.quarantined:
            yield


def _some(leases: Iterable[StoreLease]) -> list[StoreLease]:
    """As many leases as can be given up in one go."""
    some, steps = list[StoreLease](), 0
    for lease in leases:
        some.append(lease)
        steps += lease.steps
        if steps >= PLACES_AT_ONCE:
            break
    return some
