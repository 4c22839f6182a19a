"""Finds blocks and keeps them in place while they are copied: match, resolve, hold, pin.

A match pins one entry in each namespace, the deepest: nothing before it can be evicted while it has a descendant. A
windowed namespace has no chains, so there each block of the window is pinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from tiercache.daemon.ground.slices import LOOKUPS, PINS, Steps, noted
from tiercache.daemon.index.index import DEAD
from tiercache.daemon.index.policy import NO_ENTRY, USED
from tiercache.daemon.tiers.dram.growing import GrowingRun
from tiercache.daemon.tiers.dram.leases import Deadlines, Owner, ReadLease, new_lease_id
from tiercache.daemon.tiers.dram.match_ends import Cuts
from tiercache.daemon.tiers.dram.space import Namespace, Space, first_of_window
from tiercache.daemon.tiers.lower_tier import TierBelow
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT

PREFETCH_S = 30.0
MAX_PREFETCHES = 256
MAX_PINS = 16_384
"""Pins of clients, of any length: looking at them all takes some milliseconds."""
EXPIRED_AT_ONCE = 512
"""Leases that may expire in one tick."""
ENDED_AT_ONCE = 256
"""Leases of a lost session that end in one go, about a millisecond; those with many pins count for more."""
_PINS_EACH = 4
PINS_LISTED = 1 << 16
"""Pins of leases that end in one tick: they are undone later (`work`), but each is listed for that."""
_LISTED_EACH = 4
"""A region released by a client's pin counts for so many of them; and so many regions for an undone pin."""
MAX_TOGETHER = 64
"""Namespaces that are searched and used in one slice; with more, the search is a slice of its own."""
_TRIES = 4
"""How often a run is searched again after others flush or evict part of it meanwhile."""


class Found:
    """The longest run that all requested namespaces have."""

    __slots__ = ("below", "dram", "lease")

    def __init__(self, dram: int, below: int, lease: ReadLease | None) -> None:
        self.dram = dram
        self.below = below
        self.lease = lease


class Reads:
    """All read leases and pins. Event loop only."""

    def __init__(self, space: Space, below: TierBelow, clock_s: Callable[[], float], pin_share: float) -> None:
        self.leases: dict[int, ReadLease] = {}
        self.growing: dict[int, ReadLease] = {}
        self.pins: dict[tuple[tuple[int, ...], bytes], ReadLease] = {}
        self.pinned_bytes = 0
        self.pinned_blocks: Counter[int] = Counter()
        """Blocks pinned by clients, by namespace."""
        self.pin_changes = 0
        """How often the set of regions kept by pins has changed."""
        self.on_progress: Callable[[int], None] = lambda lease_id: None
        """Called with the id of a growing lease when it has grown or will not grow any more."""
        self.ages = LatencyHistogram()
        """How long leases of clients were held."""
        self._space = space
        self._below = below
        self._cuts = Cuts(space, below)
        self._clock_s = clock_s
        self._pin_share = pin_share
        self._deadlines = Deadlines(self.leases)
        self._suspected = False  # something was dropped since `_suspects` were listed
        self._suspects: list[ReadLease] = []  # leases that may have lost a block
        self._taken: dict[int, list[int]] = {}  # pinned entries meant for a lease, by the list's id
        self._stopping: deque[ReadLease] = deque()  # nothing more arrives for them, but the search is unfinished
        self._touching: deque[tuple[ReadLease, GrowingRun, int]] = deque()  # and the block from which on to touch it
        self._unpinning: list[int] = []  # entries of which one pin each is to be undone

    def match(
        self,
        owner: Owner,
        namespaces: Sequence[Namespace],
        keys: bytes,
        ttl_s: float,
        promote: bool = False,
        extents: bool = False,
    ) -> Steps[Found]:
        """The longest run; with `ttl_s` > 0 also a lease on it, which `promote` lets grow.

        With `extents` the lease keeps blocks in the tier below where they are, if it can; see `bring_up`.
        """
        asked = len(keys) // KEY_BYTES
        self._space.tails.lapse()
        blocks, below, ends = yield from self._use(namespaces, keys, asked, ttl_s > 0)
        self._count(namespaces, asked, blocks, below)
        run = keys[: (blocks + below) * KEY_BYTES]
        held = self._below.hold(namespaces, run, blocks) if extents and below > 0 and ttl_s > 0 else None
        growing = promote and below > 0 and held is None
        if ttl_s <= 0 or (blocks == 0 and not growing and held is None):
            return Found(blocks, below, None)
        lease = self._grant(namespaces, keys, blocks, ends, ttl_s)
        lease.holders.add(owner)
        owner.reads[lease.lease_id] = lease
        if held is not None:
            lease.keys, lease.held, lease.rises = run, held, promote
            return Found(blocks, below, lease)
        if growing:
            lease.keys = run
            yield from self._rise(lease, blocks + below)
        return Found(lease.blocks, lease.target - lease.blocks, lease)

    def _count(self, namespaces: Sequence[Namespace], asked: int, blocks: int, below: int) -> None:
        counters, now_s = self._space.counters, self._clock_s()
        counters.match_requests += 1
        counters.match_blocks_asked += asked
        counters.match_blocks_hit += blocks
        counters.match_blocks_below += below
        for namespace in namespaces:
            use = namespace.use
            use.asked_blocks += asked
            use.hit_blocks += blocks
            use.below_blocks += below
            use.used_s = now_s

    def _use(
        self, namespaces: Sequence[Namespace], keys: bytes, limit: int, pin: bool
    ) -> Steps[tuple[int, int, list[int]]]:
        """The longest run: blocks in DRAM, blocks with the tier below, and the entries that hold it, if they are to be
        pinned (see `_hold`). The policies are told that it is used.
        """
        wide = len(namespaces) > MAX_TOGETHER
        for _ in range(_TRIES):
            blocks, searched_in_slices = yield from noted(self._cuts.in_dram(namespaces, keys, limit))
            below, extended_in_slices = yield from noted(self._cuts.with_below(namespaces, keys, blocks))
            if wide:
                yield
            use = self._user(namespaces, keys, blocks, below)
            ends, held_in_slices = yield from noted(self._hold(namespaces, keys, blocks, use, pin))
            if ends is not None:
                return blocks, below - blocks, ends
            limit = self._shortened(blocks, wide or searched_in_slices or extended_in_slices or held_in_slices)
        self._user(namespaces, keys, 0, 0)([], True)
        return 0, 0, []

    def _shortened(self, blocks: int, sliced: bool) -> int:
        """How far to search next, after a run of so many blocks turned out not to be here."""
        if sliced:
            return blocks
        # Another namespace cut the search short at a key that this one lacks, although it has a later one: the list is
        # no chain.
        self._space.index.invariant_failures += 1
        return 0

    def _user(
        self, namespaces: Sequence[Namespace], keys: bytes, blocks: int, found: int
    ) -> Callable[[list[int], bool], None]:
        """A callback that tells the policies of both tiers what is requested, and which blocks are used.

        The deepest block in each namespace stands for all. Blocks after the first slice are used too, but other
        requests may have come in between, so nothing is learnt from them.
        """
        predictor = self._space.policies.predictor

        def use(entries: list[int], first: bool) -> None:
            if not keys:
                return
            how = USED
            if first:
                self._space.prompts.asked(keys)
                if predictor is not None:
                    how = predictor.asked(keys, blocks, found)
                self._below.matched(namespaces, keys, blocks, found, how)
            for entry in entries:
                self._space.index.touch(entry, how)

        return use

    def peek(self, namespaces: Sequence[Namespace], keys: bytes) -> Steps[tuple[int, int]]:
        """Blocks in DRAM and below that `match` would find. Changes nothing, not even recency."""
        blocks = yield from self._cuts.in_dram(namespaces, keys, len(keys) // KEY_BYTES)
        return blocks, (yield from self._cuts.with_below(namespaces, keys, blocks)) - blocks

    def bring_up(self, lease: ReadLease, end: int) -> Steps[None]:
        """A client wants the frames of blocks up to `end`: promote what is held below, once."""
        if lease.rises and lease.held is not None and end > lease.blocks and not lease.over:
            lease.rises = False
            yield from self._rise(lease, lease.held.blocks)

    def prefetch(self, owner: Owner, namespaces: Sequence[Namespace], keys: bytes) -> Steps[Found]:
        """As `match`, but blocks below are promoted in the background and no session holds the lease."""
        found = yield from self.match(owner, namespaces, keys, 0.0)
        if found.below and len(self.growing) < MAX_PREFETCHES:
            yield from self._fetch(namespaces, keys, found.dram, found.dram + found.below)
        return found

    def bring_ahead(self, namespaces: Sequence[Namespace], keys: bytes, most: Callable[[], int]) -> Steps[int]:
        """As `prefetch`, ahead of any request: no look-up or use is counted. Returns how many blocks are promoted.

        Promotes none if there are more than `most()` of them.
        """
        blocks, below = yield from self.peek(namespaces, keys)
        if not 0 < below <= most():
            return 0
        yield from self._fetch(namespaces, keys, blocks, blocks + below)
        return below

    def _fetch(self, namespaces: Sequence[Namespace], keys: bytes, in_dram: int, target: int) -> Steps[None]:
        """Promote the first `target` blocks under a lease without holders."""
        blocks, ends = yield from self._take(namespaces, keys, in_dram)
        lease = self._grant(namespaces, keys, blocks, ends, PREFETCH_S)
        lease.keys = keys[: target * KEY_BYTES]
        yield from self._rise(lease, target)

    # --- finding and pinning -----------------------------------------------------------------------

    def _take(self, namespaces: Sequence[Namespace], keys: bytes, limit: int) -> Steps[tuple[int, list[int]]]:
        """The longest run of at most `limit` blocks, and the entries whose pins hold all of it, pinned.

        The pins are for `_grant` or `_untake`. Blocks lost between two slices make the run shorter.
        """
        for _ in range(_TRIES):
            blocks, searched_in_slices = yield from noted(self._cuts.in_dram(namespaces, keys, limit))
            ends, held_in_slices = yield from noted(self._hold(namespaces, keys, blocks))
            if ends is not None:
                return blocks, ends
            limit = self._shortened(blocks, searched_in_slices or held_in_slices)
        return 0, []

    def _hold(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        blocks: int,
        use: Callable[[list[int], bool], None] = lambda entries, first: None,
        pin: bool = True,
    ) -> Steps[list[int] | None]:
        """Pin the entries that hold a run: each block of a window, the deepest of a chain.

        None where one is not here (any more). `use` is called with a slice of them at a time, and whether it is the
        first.
        """
        index = self._space.index
        drops, ends, entries = index.drops, list[int](), self._ends(namespaces, keys, blocks)
        if pin and blocks:
            self._taken[id(ends)] = ends
        first, whole = True, False
        try:
            while True:
                some = list(islice(entries, PINS))
                if NO_ENTRY in some:
                    return None
                if first or some:
                    use(some, first)
                if pin:
                    for entry in some:
                        index.pin(entry)
                    ends.extend(some)
                if len(some) < PINS:
                    break
                first = False
                yield
            whole = index.drops == drops or index.all_attached(ends)
            return ends if whole else None
        finally:
            if not whole:
                self._untake(ends)

    def _ends(self, namespaces: Sequence[Namespace], keys: bytes, blocks: int) -> Iterator[int]:
        """Entries, looked up lazily; NO_ENTRY for what is not here."""
        attached = self._space.index.attached
        for namespace in namespaces if blocks else ():
            table = namespace.table
            for number in range(first_of_window(namespace, blocks) if table.windowed else blocks - 1, blocks):
                entry = table.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
                yield entry if entry != NO_ENTRY and attached(entry) else NO_ENTRY

    def _untake(self, ends: list[int]) -> None:
        """Unpin what was taken and did not become a lease's."""
        if self._taken.pop(id(ends), None) is not None:
            self._unpin(ends)

    def _unpin(self, entries: list[int]) -> None:
        """Undo one pin of each; of many, a slice at a time."""
        if len(entries) > PINS:
            self._unpinning.extend(entries)
            self._space.index.note_moved(entries)
            return
        for entry in entries:
            self._space.index.unpin(entry)

    def loose_pins(self) -> Iterator[int]:
        """Entries with a pin that no lease has: not yet, or no longer."""
        return chain(self._unpinning, self._space.index.walked_from, *self._taken.values())

    def _grant(
        self, namespaces: Sequence[Namespace], keys: bytes, blocks: int, ends: list[int], ttl_s: float
    ) -> ReadLease:
        """A lease that takes over the pins of `ends`."""
        self._taken.pop(id(ends), None)
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
        return self._space.index.run_frames(namespace.table, lease.keys, first, count)

    def _held_end(self, lease: ReadLease, namespace: Namespace, first: int) -> int:
        """Up to where a lease holds the blocks of a namespace from `first` on; 0 where it does not hold `first`."""
        for run in lease.runs:
            if run.namespace is namespace and run.first <= first < run.end:
                return run.end
        return lease.blocks if first >= first_of_window(namespace, lease.blocks) else 0

    # --- leases that grow ------------------------------------------------------------------------

    def _rise(self, lease: ReadLease, target: int) -> Steps[None]:
        """Let the lease grow to `target` blocks, promoted by the tier below."""
        lease.target = target
        lease.runs = runs = [GrowingRun(self._space.index, one, lease.keys, target) for one in lease.namespaces]
        self.growing[lease.lease_id] = lease
        started = False
        try:
            for run in runs:
                while self._may_grow(lease) and run.look():
                    yield
                if lease.lease_id in self.growing:
                    self._touch(lease, run)
            started = True
        finally:
            if not started and not lease.over:
                self._end(lease)  # the client will not hear of this lease
        if lease.lease_id in self.growing:  # else it has ended, or the blocks had arrived already
            self._below.promote(lease)

    def grow(self, lease: ReadLease) -> None:
        """Take in what has arrived for a growing lease; of very wide windows a part."""
        if not self._is_whole(lease):
            self._end(lease)  # before new pins hide that it has lost a block
            return
        if lease.lease_id not in self.growing:
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
        if lease.lease_id not in self.growing:
            return False
        if not self._is_whole(lease):
            self._end(lease)
            return False
        return True

    def _touch(self, lease: ReadLease, run: GrowingRun) -> None:
        """Tell the policy of a run's blocks; of a wide window the rest later (`work`)."""
        following = run.touch(run.first)
        if following < run.target:
            self._touching.append((lease, run, following))

    def stop_growing(self, lease: ReadLease) -> None:
        """Nothing more will arrive for it. A prefetch ends with that, after a last search for what has arrived."""
        if not self._may_grow(lease):
            return
        for run in lease.runs:
            run.begin_pass()
            self._look(lease, run)
        if not self._looked(lease):
            self._stopping.append(lease)

    def _looked(self, lease: ReadLease) -> bool:
        """Run a slice of the last search for what has arrived; True when it is over and the lease stops growing."""
        if lease.over or lease.lease_id not in self.growing:
            return True
        if not self._is_whole(lease):
            self._end(lease)
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
        del self.growing[lease.lease_id]
        pins, former = [entry for run in lease.runs for entry in run.pins], lease.pins
        lease.pins = former + pins
        complete = all(run.complete for run in lease.runs)
        if complete or not lease.has_windows:
            # The present pins hold all that was held before: for a chain the last block does, and for a window only the
            # blocks before this cut are the lease's.
            lease.blocks = min(run.end for run in lease.runs)
            lease.pins = pins
            self._unpin(former)
        lease.runs, lease.target = [], lease.blocks
        self.on_progress(lease.lease_id)
        if not lease.holders:
            self._end(lease)

    def hold(self, owner: Owner, lease_id: int) -> bool:
        """Let another session of the same instance hold the lease too."""
        lease = self.leases.get(lease_id)
        if lease is None or not lease.holders or not self._is_whole(lease):
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
                self._end(lease, good)
        return good

    def renew(self, lease: ReadLease, ttl_s: float) -> None:
        """Move the deadline of a live lease."""
        lease.deadline_s = self._clock_s() + ttl_s
        self._deadlines.add(lease.deadline_s, lease.lease_id)

    def pin(self, namespaces: Sequence[Namespace], keys: bytes, ttl_s: float) -> Steps[int]:
        """Pin the present prefix until the time is up; returns the blocks pinned, 0 when over the limit."""
        self.unpin(namespaces, keys)
        block_bytes = sum(namespace.spec.frame_bytes for namespace in namespaces)
        blocks, ends = yield from self._take(namespaces, keys, min(len(keys) // KEY_BYTES, self._pinnable(block_bytes)))
        if blocks == 0:
            return 0
        self.unpin(namespaces, keys)  # another client may have pinned it between two slices
        if blocks > self._pinnable(block_bytes):
            self._untake(ends)
            return 0
        lease = self._grant(namespaces, keys, blocks, ends, ttl_s)
        lease.pin_name = _pin_name(namespaces, keys)
        self.pins[lease.pin_name] = lease
        self.pinned_bytes += blocks * block_bytes
        self.pinned_blocks.update({namespace.number: blocks for namespace in namespaces})
        yield from self._keep_regions(lease)
        return blocks

    def _pinnable(self, block_bytes: int) -> int:
        """How many blocks of each namespace one more pin may keep."""
        room = 0 if len(self.pins) >= MAX_PINS else self.pin_limit_bytes - self.pinned_bytes
        return max(0, int(room // block_bytes))

    @property
    def pin_limit_bytes(self) -> int:
        """What all pins together may keep."""
        return int(self._space.allocator.arena_bytes * self._pin_share)

    def _keep_regions(self, lease: ReadLease) -> Steps[None]:
        """Protect the regions of a pin from being emptied; the lease itself pins only the last block of each chain."""
        frames = [self._space.index.frame[entry] for entry in lease.pins]
        regions = {frame >> REGION_SHIFT for frame in frames}
        for namespace in lease.namespaces:
            for first in range(0, 0 if namespace.table.windowed else lease.blocks, LOOKUPS):
                if lease.over or not self._is_whole(lease):
                    return  # it ends, or has ended: nothing to keep
                regions.update(frame >> REGION_SHIFT for frame in self.frames(lease, namespace, first, LOOKUPS))
                if first + LOOKUPS < lease.blocks:
                    yield
        if not lease.over:
            lease.pin_regions = regions
            self._space.pinned_regions.update(regions)
            self.pin_changes += 1

    def unpin(self, namespaces: Sequence[Namespace], keys: bytes) -> int:
        """Undo `pin` with the same arguments; returns the blocks that were pinned."""
        lease = self.pins.get(_pin_name(namespaces, keys))
        if lease is None:
            return 0
        self._end(lease)
        return lease.blocks

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
            self._end(lease)
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
                    self._end(lease)
                else:
                    done += 1
            if owner.reads:
                yield

    # --- leases that have lost a block -------------------------------------------------------------

    def find(self, owner: Owner, lease_id: int) -> ReadLease | None:
        """A lease that the owner holds and that has lost nothing; else it ends here, and the load is a miss."""
        lease = owner.reads.get(lease_id)
        if lease is not None and not self._is_whole(lease):
            self._end(lease)
            return None
        return lease

    def _is_whole(self, lease: ReadLease) -> bool:
        """Whether all that the lease pins can still be found. Checked at every use, so that leases need not be ended
        before the frames they hold go to new owners."""
        index = self._space.index
        if lease.whole_at != index.drops:
            if not index.all_attached(lease.pinned()):
                return False
            lease.whole_at = index.drops
        return True

    def suspect_all(self) -> None:
        """Something pinned was dropped: leases on it should end soon, so that its frame comes back."""
        self._suspected = True

    def work(self) -> bool:
        """End a slice of pins and of leases that have lost a block; True while there is more."""
        for _ in range(min(PINS, len(self._unpinning))):
            self._space.index.unpin(self._unpinning.pop())
        if self._stopping and self._looked(self._stopping[0]):
            self._stopping.popleft()
        if self._touching:
            self._touch_more(*self._touching.popleft())
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
                    self._end(lease)
        return bool(self._unpinning or self._stopping or self._touching) or done >= PINS

    def _touch_more(self, lease: ReadLease, run: GrowingRun, first: int) -> None:
        if not lease.over and self._is_whole(lease):
            following = run.touch(first)
            if following < run.target:
                self._touching.append((lease, run, following))

    def _end(self, lease: ReadLease, good: bool = False) -> None:
        """Unpin, and take the lease from its remaining holders: their release then finds none."""
        del self.leases[lease.lease_id]
        if lease.pin_name is None:
            self.ages.observe(int((self._clock_s() - lease.started_s) * 1e9))
        if self.growing.pop(lease.lease_id, None) is not None:
            self.on_progress(lease.lease_id)
        lease.over = True
        for holder in lease.holders:
            del holder.reads[lease.lease_id]
        lease.holders.clear()
        self._unpin(lease.pinned())
        if lease.held is not None:
            lease.held.let_go(good)
        if lease.pin_name is not None:
            del self.pins[lease.pin_name]
            self.pin_changes += 1
            kept = self._space.pinned_regions
            for region_id in lease.pin_regions:
                kept[region_id] -= 1
                if not kept[region_id]:
                    del kept[region_id]
            self.pinned_blocks.subtract({namespace.number: lease.blocks for namespace in lease.namespaces})
            frames = (namespace.spec.frame_bytes for namespace in lease.namespaces)
            self.pinned_bytes -= lease.blocks * sum(frames)


def _pin_name(namespaces: Sequence[Namespace], keys: bytes) -> tuple[tuple[int, ...], bytes]:
    return tuple(namespace.number for namespace in namespaces), keys[-KEY_BYTES:]
