"""Reads from DRAM: match, and prefetches. What is found stays in place under a lease while it is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.protocol.messages import KEY_BYTES

from .below import TierBelow
from .growing_leases import GrowingLeases
from .leases import Owner, ReadLease
from .pins import ClientPins
from .read_leases import ReadLeases
from .runs import Runs
from .space import Namespace, Space

PREFETCH_S = 30.0
MAX_PREFETCHES = 256


class Found:
    """The longest run that all requested namespaces have: `dram` blocks, `below` further ones in the tiers below.

    The last `shared` of those are in a store that hosts share.
    """

    __slots__ = ("below", "dram", "lease", "shared")

    def __init__(self, dram: int, below: int, lease: ReadLease | None, shared: int = 0) -> None:
        self.dram = dram
        self.below = below
        self.lease = lease
        self.shared = shared


class Reads(ReadLeases):
    """All read leases, with those that grow and the pins of clients. Event loop only."""

    def __init__(self, space: Space, below: TierBelow, clock_s: Callable[[], float], pin_share: float) -> None:
        super().__init__(space, Runs(space, below), clock_s)
        self.growing = GrowingLeases(self, space, below)
        self.pins = ClientPins(self, space, pin_share)
        self._below = below

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

        With `extents` the lease keeps blocks in the tier below where they are, if it can; see `GrowingLeases.bring_up`.
        """
        asked = len(keys) // KEY_BYTES
        self._space.tails.lapse()
        (blocks, local, shared), ends = yield from self.runs.use(owner, namespaces, keys, asked, ttl_s > 0)
        below = local + shared
        self._count(namespaces, asked, blocks, below, shared)
        run = keys[: (blocks + below) * KEY_BYTES]
        held = None
        if extents and local > 0 and not shared and ttl_s > 0:
            held = self._below.local.hold(namespaces, run, blocks)
        growing = promote and below > 0 and held is None
        if ttl_s <= 0 or (blocks == 0 and not growing and held is None):
            return Found(blocks, below, None, shared)
        lease = self.grant(namespaces, keys, blocks, ends, ttl_s)
        lease.holders.add(owner)
        owner.reads[lease.lease_id] = lease
        if held is not None:
            lease.keys, lease.held, lease.rises = run, held, promote
            return Found(blocks, below, lease)
        if growing:
            lease.keys = run
            yield from self.growing.rise(lease, blocks + below)
        left = lease.target - lease.blocks
        return Found(lease.blocks, left, lease, min(shared, left))

    def _count(self, namespaces: Sequence[Namespace], asked: int, blocks: int, below: int, shared: int) -> None:
        counters, now_s = self._space.counters, self._clock_s()
        counters.match_requests += 1
        counters.match_blocks_asked += asked
        counters.match_blocks_hit += blocks
        counters.match_blocks_below += below
        counters.match_blocks_shared += shared
        for namespace in namespaces:
            use = namespace.use
            use.asked_blocks += asked
            use.hit_blocks += blocks
            use.below_blocks += below
            use.shared_blocks += shared
            use.used_s = now_s

    def prefetch(self, owner: Owner, namespaces: Sequence[Namespace], keys: bytes) -> Steps[Found]:
        """As `match`, but blocks below are promoted in the background and no session holds the lease."""
        found = yield from self.match(owner, namespaces, keys, 0.0)
        if found.below and len(self.growing.leases) < MAX_PREFETCHES:
            yield from self._fetch(namespaces, keys, found.dram, found.dram + found.below)
        return found

    def bring_ahead(self, namespaces: Sequence[Namespace], keys: bytes, most: Callable[[], int]) -> Steps[int]:
        """As `prefetch`, ahead of any request: no look-up or use is counted. Returns how many blocks are promoted.

        Promotes none if there are more than `most()` of them.
        """
        blocks, below, shared = yield from self.runs.peek(namespaces, keys)
        below += shared
        if not 0 < below <= most():
            return 0
        yield from self._fetch(namespaces, keys, blocks, blocks + below)
        return below

    def _fetch(self, namespaces: Sequence[Namespace], keys: bytes, in_dram: int, target: int) -> Steps[None]:
        """Promote the first `target` blocks under a lease without holders."""
        blocks, ends = yield from self.runs.take(namespaces, keys, in_dram)
        lease = self.grant(namespaces, keys, blocks, ends, PREFETCH_S)
        lease.keys = keys[: target * KEY_BYTES]
        yield from self.growing.rise(lease, target)

    def work(self) -> bool:
        """Run a slice of deferred work of each kind; True while there is more."""
        if not (self._suspected or self._suspects or self.runs.busy or self.growing.busy):
            return False
        more = [self.runs.work(), self.growing.work(), super().work()]
        return any(more)
