"""Read leases that grow: blocks of the tier below arrive in DRAM, and the lease holds them as they do.

rise ─► promoted by the tier below ─► grow, again and again ─► complete, or `stop`: nothing more will arrive
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiercache.daemon.ground.slices import PINS, Steps

from .below import TierBelow
from .growing_run import GrowingRun
from .leases import ReadLease
from .read_leases import ReadLeases
from .space import Space


class GrowingLeases:
    """The read leases that wait for blocks. Event loop only."""

    def __init__(self, reads: ReadLeases, space: Space, below: TierBelow) -> None:
        self.leases: dict[int, ReadLease] = {}
        self.on_progress: Callable[[int], None] = lambda lease_id: None
        """Called with the id of a growing lease when it has grown or will not grow any more."""
        self._reads = reads
        self._space = space
        self._below = below
        self._stopping: deque[ReadLease] = deque()  # nothing more arrives for them, but the search is unfinished
        self._touching: deque[tuple[ReadLease, GrowingRun, int]] = deque()  # and the block from which on to touch it
        reads.on_end.append(self._ended)

    def rise(self, lease: ReadLease, target: int) -> Steps[None]:
        """Let the lease grow to `target` blocks, promoted by the tier below."""
        lease.target = target
        lease.runs = runs = [GrowingRun(self._space.index, one, lease.keys, target) for one in lease.namespaces]
        self.leases[lease.lease_id] = lease
        started = False
        try:
            for run in runs:
                while self._may_grow(lease) and run.look():
                    yield
                if lease.lease_id in self.leases:
                    self._touch(lease, run)
            started = True
        finally:
            if not started and not lease.over:
                self._reads.end(lease)  # the client will not hear of this lease
        if lease.lease_id in self.leases:  # else it has ended, or the blocks had arrived already
            self._below.promote(lease)

    def bring_up(self, lease: ReadLease, end: int) -> Steps[None]:
        """A client wants the frames of blocks up to `end`: promote what is held below, once."""
        if lease.rises and lease.held is not None and end > lease.blocks and not lease.over:
            lease.rises = False
            yield from self.rise(lease, lease.held.blocks)

    def grow(self, lease: ReadLease) -> None:
        """Take in what has arrived for a growing lease; of very wide windows a part."""
        if not self._reads.is_whole(lease):
            self._reads.end(lease)  # before new pins hide that it has lost a block
            return
        if lease.lease_id not in self.leases:
            return
        grown, looked, runs = False, 0, lease.runs
        for number, run in enumerate(runs, 1):
            if not run.complete:
                end = run.end
                looked += run.advance()
                grown |= run.end > end
                if run.end == run.target:
                    self._touch(lease, run)
                if looked >= PINS:
                    lease.runs = runs[number:] + runs[:number]  # the runs that follow have their turn next time
                    break
        if grown:
            self.on_progress(lease.lease_id)
        if all(run.complete for run in lease.runs):
            self._stop(lease)
        elif not lease.has_windows:
            lease.blocks = min(run.end for run in lease.runs)

    def _may_grow(self, lease: ReadLease) -> bool:
        """Check before pinning more: a lease that has lost a block must end, or the new pins would hide that."""
        if lease.lease_id not in self.leases:
            return False
        if not self._reads.is_whole(lease):
            self._reads.end(lease)
            return False
        return True

    def _touch(self, lease: ReadLease, run: GrowingRun) -> None:
        """Tell the policy of a run's blocks; of a wide window the rest later (`work`)."""
        following = run.touch(run.first)
        if following < run.target:
            self._touching.append((lease, run, following))

    def stop(self, lease: ReadLease) -> None:
        """Nothing more will arrive for it. A prefetch ends with that, after a last search for what has arrived."""
        if not self._may_grow(lease):
            return
        for run in lease.runs:
            run.begin_pass()
            if not run.namespace.table.windowed:
                self._look(lease, run)
        if not self._looked(lease):
            self._stopping.append(lease)

    def _looked(self, lease: ReadLease) -> bool:
        """Run a slice of the last search for what has arrived; True when it is over and the lease stops growing."""
        if lease.lease_id not in self.leases:
            return True
        if not self._reads.is_whole(lease):
            self._reads.end(lease)
            return True
        looked = 0
        for run in lease.runs:
            if run.to_look and not run.complete:
                looked += min(PINS, run.to_look)
                self._look(lease, run)
                if looked >= PINS:
                    return False
        self._stop(lease)
        return True

    def _look(self, lease: ReadLease, run: GrowingRun) -> None:
        """Take in what has arrived for a run, or a slice of that; the policy is told once it is complete."""
        if not run.complete:
            run.look()
            if run.end == run.target:
                self._touch(lease, run)

    def _stop(self, lease: ReadLease) -> None:
        """The lease stops growing and has what its runs have."""
        del self.leases[lease.lease_id]
        pins, former = [entry for run in lease.runs for entry in run.pins], lease.pins
        lease.pins = former + pins
        complete = all(run.complete for run in lease.runs)
        if complete or not lease.has_windows:
            # The present pins hold all that was held before: for a chain the last block does, and for a window only the
            # blocks before this cut are the lease's.
            lease.blocks = min(run.end for run in lease.runs)
            lease.pins = pins
            self._reads.runs.unpin(former)
        lease.runs, lease.target = [], lease.blocks
        self.on_progress(lease.lease_id)
        if not lease.holders:
            self._reads.end(lease)

    def _ended(self, lease: ReadLease) -> None:
        """A lease has ended, perhaps while it was growing."""
        if self.leases.pop(lease.lease_id, None) is not None:
            self.on_progress(lease.lease_id)

    def work(self) -> bool:
        """Run a slice of what takes several; True while there is more."""
        if self._stopping and self._looked(self._stopping[0]):
            self._stopping.popleft()
        if self._touching:
            self._touch_more(*self._touching.popleft())
        return self.busy

    @property
    def busy(self) -> bool:
        """True if `work` has more to do."""
        return bool(self._stopping or self._touching)

    def _touch_more(self, lease: ReadLease, run: GrowingRun, first: int) -> None:
        if not lease.over and self._reads.is_whole(lease):
            following = run.touch(first)
            if following < run.target:
                self._touching.append((lease, run, following))
