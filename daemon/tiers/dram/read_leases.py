"""Read leases from grant to end: what is held under them, by whom, and whether it is still whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from tiercache.daemon.ground.slices import PINS, Steps
from tiercache.daemon.index.entries import DEAD
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol.messages import KEY_BYTES

from .leases import Deadlines, Owner, ReadLease, new_lease_id
from .runs import Runs
from .space import Namespace, Space, first_of_window

EXPIRED_AT_ONCE = 512
"""Leases that may expire in one tick."""
ENDED_AT_ONCE = 256
"""Leases of a lost session that end in one go, about a millisecond; those with many pins count for more."""
_PINS_EACH = 4
PINS_LISTED = 1 << 16
"""Pins of leases that end in one tick: they are undone later (`work`), but each is listed for that."""
_LISTED_EACH = 4
"""A region released by a client's pin counts for so many of them; and so many regions for an undone pin."""


class ReadLeases:
    """All read leases, those without holders included. Event loop only."""

    def __init__(self, space: Space, runs: Runs, clock_s: Callable[[], float]) -> None:
        self.leases: dict[int, ReadLease] = {}
        self.ages = LatencyHistogram()
        """How long leases of clients were held."""
        self.on_end: list[Callable[[ReadLease], None]] = []
        """Called with each lease that ends."""
        self.runs = runs
        self._space = space
        self._clock_s = clock_s
        self._deadlines = Deadlines(self.leases)
        self._suspected = False  # something was dropped since `_suspects` were listed
        self._suspects: list[ReadLease] = []  # leases that may have lost a block

    def grant(
        self, namespaces: Sequence[Namespace], keys: bytes, blocks: int, ends: list[int], ttl_s: float
    ) -> ReadLease:
        """A lease that takes over the pins of `ends`."""
        self.runs.taken_over(ends)
        run, now_s = keys[: blocks * KEY_BYTES], self._clock_s()
        lease = ReadLease(new_lease_id(), list(namespaces), run, blocks, ends, now_s, ttl_s)
        self.leases[lease.lease_id] = lease
        self._deadlines.add(lease.deadline_s, lease.lease_id)
        return lease

    def frames(self, lease: ReadLease, namespace: Namespace, first: int, count: int) -> list[int]:
        """Frames of blocks `first ..< first + count` of a live lease; fewer where the run ends.

        None at all when `first` lies before the window of a windowed namespace: such blocks may be here, but the lease
        does not hold them.
        """
        count = min(count, self._held_end(lease, namespace, first) - first)
        if count <= 0 or namespace not in lease.namespaces:
            return []
        frames = self._space.index.run_frames(namespace.table, lease.keys, first, count)
        if len(frames) < count and self.is_whole(lease):  # all blocks are here, but not one after the other
            self._space.counters.broken_chains += 1
            for holder in lease.holders:
                holder.broken_chains += 1
        return frames

    def _held_end(self, lease: ReadLease, namespace: Namespace, first: int) -> int:
        """Up to where a lease holds the blocks of a namespace from `first` on; 0 where it does not hold `first`."""
        for run in lease.runs:
            if run.namespace is namespace and run.first <= first < run.end:
                return run.end
        return lease.blocks if first >= first_of_window(namespace, lease.blocks) else 0

    def hold(self, owner: Owner, lease_id: int) -> bool:
        """Let another session of the same instance hold the lease too."""
        lease = self.leases.get(lease_id)
        if lease is None or not lease.holders or not self.is_whole(lease):
            return False
        if not any(holder.same_engine(owner) for holder in lease.holders):
            return False
        lease.holders.add(owner)
        owner.reads[lease_id] = lease
        return True

    def release(self, owner: Owner, lease_id: int) -> bool:
        """End the owner's hold; True when everything copied under it is right."""
        lease = self.find(owner, lease_id)
        owner.reads.pop(lease_id, None)
        good = lease is not None and (lease.held is None or lease.held.intact)
        self._space.counters.loads_good += good
        self._space.counters.loads_revoked += not good
        if lease is not None:
            lease.holders.discard(owner)
            if not lease.holders:
                self.end(lease, good)
        return good

    def renew(self, lease: ReadLease, ttl_s: float) -> None:
        """Move the deadline of a live lease."""
        lease.deadline_s = self._clock_s() + ttl_s
        self._deadlines.add(lease.deadline_s, lease.lease_id)

    def find(self, owner: Owner, lease_id: int) -> ReadLease | None:
        """A lease that the owner holds and that has lost nothing; else it ends here, and the load is a miss."""
        lease = owner.reads.get(lease_id)
        if lease is not None and not self.is_whole(lease):
            self.end(lease)
            return None
        return lease

    def is_whole(self, lease: ReadLease) -> bool:
        """True if all that the lease pins can still be found. Checked at every use, so that leases need not be ended
        before the frames they hold go to new owners."""
        index = self._space.index
        if lease.whole_at != index.drops:
            if not index.all_attached(lease.pinned()):
                return False
            lease.whole_at = index.drops
        return True

    def end(self, lease: ReadLease, good: bool = False) -> None:
        """Unpin, and take the lease from its remaining holders: their release then finds none."""
        del self.leases[lease.lease_id]
        if lease.pin_name is None:
            self.ages.observe(int((self._clock_s() - lease.started_s) * 1e9))
        for tell in self.on_end:
            tell(lease)
        lease.over = True
        for holder in lease.holders:
            del holder.reads[lease.lease_id]
        lease.holders.clear()
        self.runs.unpin(lease.pinned())
        if lease.held is not None:
            lease.held.let_go(good)

    # --- leases that end by themselves -------------------------------------------------------------

    def expire(self) -> None:
        """End expired leases and pins, a slice of them. A reader that is still copying gets a miss."""
        now_s, pins = self._clock_s(), 0
        for lease_id in islice(self._deadlines.due(now_s), EXPIRED_AT_ONCE):
            lease = self.leases.get(lease_id)
            if lease is None or lease.deadline_s > now_s:
                continue
            if lease.holders:
                self._space.counters.leases_expired += 1
            pins += len(lease.pinned()) + _LISTED_EACH * len(lease.pin_regions)
            self.end(lease)
            if pins >= PINS_LISTED:
                break

    def session_lost(self, owner: Owner) -> Steps[None]:
        """End all holds of a lost session. Between two slices other sessions of its instance may hold some too."""
        while owner.reads:
            done = 0
            while owner.reads and done < ENDED_AT_ONCE:
                lease = owner.reads.popitem()[1]
                lease.holders.discard(owner)
                if not lease.holders:
                    done += 1 + min(PINS, len(lease.pins)) // _PINS_EACH
                    self.end(lease)
                else:
                    done += 1
            if owner.reads:
                yield

    def suspect_all(self) -> None:
        """Something pinned was dropped: leases on it should end soon, so that its frame comes back."""
        self._suspected = True

    def work(self) -> bool:
        """End a slice of the leases that have lost a block; True while there is more."""
        done, state = 0, self._space.index.state
        while done < PINS:
            if not self._suspects:
                if not self._suspected:
                    break
                self._suspected = False
                self._suspects = list(self.leases.values())
            while self._suspects and done < PINS:
                lease = self._suspects.pop()
                pinned = lease.pinned()
                done += 1 + len(pinned) + len(lease.pin_regions) // _LISTED_EACH
                if not lease.over and DEAD in map(state.__getitem__, pinned):
                    self.end(lease)
        return done >= PINS
