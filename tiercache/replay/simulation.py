"""Simulation: requests of a trace on the daemon's own cache; only time and disks are simulated.

    Request ─► Reads.match ─► (promotion) ─► Writes.reserve, commit ─► (write-behind) ─► Outcome
                 Space, Index, Policy          NvmeTier: Shelf, Slots, WriteBehind, Promotion on paper disks
                                               SharedTier: look-ups, fetches, writes on a paper store

The arena is numbers without memory, the disk keeps no bytes, and the clock is the trace's. All of the daemon's
background work is done between requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Region
from tiercache.daemon.cache import Cache, CacheLimits
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import POLICIES, Maker
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.daemon.tiers.nvme.catalog.database import CatalogState
from tiercache.daemon.tiers.nvme.shelf.registry import Registry
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.daemon.tiers.nvme.tier import NvmeTier
from tiercache.protocol.messages import INSTANCE_BYTES, KEY_BYTES, MAX_RESERVE, REGION_SHIFT, BlockState, Priority
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.disk import PaperCatalog, PaperDirectory, PaperQueue
from tiercache.replay.requests import RequestKind, TraceRequest
from tiercache.replay.shared import PaperShared, PaperStore

_POLICY = DaemonConfig().policy
_LEASE_S = 1e9
"""Lease time of a replay: leases end only when they are released."""
_REGION_BYTES = 1 << (REGION_SHIFT - 2)
"""Regions and segments are as large as their numbers allow, unless a size is given."""


class Outcome(NamedTuple):
    """The blocks that one request found: the leading run in DRAM, what NVMe had beyond it, and the shared store then.

    Of those in the store, other hosts had stored `of_others`. `host`: on which one it was played.
    """

    dram: int
    nvme: int
    shared: int = 0
    of_others: int = 0
    host: int = 0

    @property
    def found(self) -> int:
        """All of them."""
        return self.dram + self.nvme + self.shared


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tiers. 0 `nvme_bytes`: no NVMe tier; 0 `shared_bytes`: no shared one.

    Each of the `hosts` has its own DRAM and NVMe; `spread` says which gets a request, see `hosts.SPREADS`.

    `region_bytes`, `segment_bytes`: as the daemon's settings, where its rounding matters; 0 for one piece.
    """

    dram_bytes: int
    nvme_bytes: int = 0
    region_bytes: int = 0
    segment_bytes: int = 0
    nvme_write_budget_bytes: int = 0
    policy: str = _POLICY
    headroom_bytes: int = 0
    """Part of `dram_bytes`; see the daemon's setting."""
    shared_bytes: int = 0
    hosts: int = 1
    spread: str = "round-robin"


@dataclass
class Tallies:
    """Blocks written and evicted so far, and blocks for which DRAM had no room."""

    nvme_written: int = 0
    promoted: int = 0
    dram_evicted: int = 0
    nvme_evicted: int = 0
    refused: int = 0
    nvme_written_bytes: int = 0
    shared_fetched: int = 0
    shared_written: int = 0
    shared_written_bytes: int = 0


class Simulation:
    """A cache of the daemon, driven request by request. Single-threaded; no I/O.

    store: what it shares with other simulations; `host` is its number among them.
    """

    def __init__(
        self,
        sizes: Sizes,
        specs: Mapping[int, NamespaceSpec],
        start_s: float = 0.0,
        policies: Mapping[str, Maker] = POLICIES,
        store: PaperStore | None = None,
        host: int = 0,
    ) -> None:
        self.now_s = start_s
        self._sizes = sizes
        self._owner = Owner(b"replay".ljust(INSTANCE_BYTES, b"\0"))
        self._queue: PaperQueue | None = None
        self._catalog = PaperCatalog()
        self._shelf: Shelf | None = None
        # Frames have no memory behind them: every region begins at address 0.
        self._regions = cast(dict[int, Region], _Anywhere())
        self._shared_store = store
        self._shared = None if store is None else PaperShared(store, host, lambda: self.now_s, self._regions)
        tier = self._tier() if sizes.nvme_bytes else None
        below = LowerTiers(tier, self._shared, self._regions, clock_s=lambda: self.now_s)
        limits = CacheLimits(policies[sizes.policy], sizes.headroom_bytes, quarantine_bytes=sizes.dram_bytes)
        self.cache = Cache(lambda: self.now_s, limits, below)
        for number, size_bytes in enumerate(_pieces(sizes.dram_bytes, sizes.region_bytes), 1):
            self.cache.space.allocator.add_region(number, size_bytes)
        below.attach(self.cache.space, self.cache.reads.growing, self.cache.writes)
        if tier is not None:
            self._open(tier)
        self._nvme = tier
        self._namespaces: dict[int, Namespace] = {}
        for number, spec in specs.items():
            self.declare(number, spec)

    # --- the tiers below ---------------------------------------------------------------------------

    def _tier(self) -> NvmeTier:
        config = DaemonConfig(nvme_write_budget_bytes=self._sizes.nvme_write_budget_bytes)
        return NvmeTier(config, self._regions, clock_s=lambda: self.now_s)

    def _open(self, tier: NvmeTier) -> None:
        sizes = self._sizes
        segment_bytes = sizes.segment_bytes or min(sizes.nvme_bytes, _REGION_BYTES)
        directory = PaperDirectory(sizes.nvme_bytes // segment_bytes, segment_bytes)
        self._queue = PaperQueue()
        space, state = self.cache.space, CatalogState(True, [], {}, [], 1)
        paper: tuple[Any, Any, Any] = directory, self._catalog, self._queue
        registry = Registry("paper", paper[1], space)
        shelf = self._shelf = Shelf(*paper, state, registry, space, tier.shelves_soon, lambda: self.now_s)
        tier.use(shelf)
        shelf.work()  # it has no rows to load

    def _settle(self) -> None:
        """Do all of the daemon's background work."""
        queue, shared, more = self._queue, self._shared, True
        while more:
            more = self.cache.work()
            if queue is not None:
                more = queue.deliver() or more
                more = self._catalog.deliver() or more
            if shared is not None:
                more = shared.lines.deliver() or more

    # --- requests --------------------------------------------------------------------------------

    def declare(self, number: int, spec: NamespaceSpec) -> None:
        """A namespace of the trace, by the trace's number."""
        self._namespaces[number] = self.cache.space.open_namespace(spec)

    def play(self, request: TraceRequest) -> Outcome:
        """Play one request, and all that follows from it."""
        self.now_s = max(self.now_s, request.time_s)
        if self._shared_store is not None:
            self._shared_store.now_s = self.now_s
        self.cache.expire()
        if self.cache.below.tiers and not self.cache.below.settled:
            self._settle()  # land the promotion of a hint's prefetch first
        namespaces = [self._namespaces[number] for number in request.namespaces]
        if request.kind is RequestKind.FORGET:
            self._forget(namespaces, request.keys, request.tier)
            return Outcome(0, 0)
        if request.kind is RequestKind.KEEP:
            self._keep(namespaces[0], request)
            return Outcome(0, 0)
        if request.kind is RequestKind.HINT:
            told = request.told
            priority = Priority(told.priority) if told.priority else None
            said = hint_given_at(self.now_s, told.done, told.return_in_s, told.ttl_s, priority)
            finish(self.cache.hint(namespaces, request.keys, request.first, said))
            return Outcome(0, 0)
        if request.kind is RequestKind.FETCH:
            self._look_up(namespaces, request.keys)
            fetched = finish(self.cache.reads.prefetch(self._owner, namespaces, request.keys))
            self._settle()
            return Outcome(fetched.dram, fetched.below - fetched.shared, fetched.shared)
        found, here = self._match(namespaces, request.keys, request.promote)
        # An engine would have computed, and stored, what the recorded daemon had and this one lacks.
        end = request.blocks if request.kind is RequestKind.ASK else sum(request.had)
        if here < end:
            for namespace in namespaces:
                self._store(namespace, request.keys[: end * KEY_BYTES], here)
        self._settle()
        return found

    def _match(self, namespaces: list[Namespace], keys: bytes, promote: bool) -> tuple[Outcome, int]:
        """What was found, and how much of it an engine can load: the blocks in DRAM after the rest is promoted.

        Of the store's part only what arrived counts as found: what a look-up says is a claim.
        """
        self._look_up(namespaces, keys)
        before = 0 if self._shared is None else self._shared.connection.of_others
        asked = self.cache.reads.match(self._owner, namespaces, keys, _LEASE_S if promote else 0.0, promote)
        found = finish(asked)
        outcome, here, lease = Outcome(found.dram, found.below - found.shared, found.shared), found.dram, found.lease
        if self.cache.below.tiers:
            self._settle()
        if lease is not None:
            here = lease.blocks
            self.cache.reads.release(self._owner, lease.lease_id)
        if not promote:
            return outcome, outcome.found
        if self._shared is not None:
            arrived = min(outcome.shared, max(0, here - outcome.dram - outcome.nvme))
            of_others = min(arrived, self._shared.connection.of_others - before)
            outcome = outcome._replace(shared=arrived, of_others=of_others)
        return outcome, here

    def _look_up(self, namespaces: list[Namespace], keys: bytes) -> None:
        """See `StoreWaits`: ask the store, if this host lacks anything."""
        runs = self.cache.reads.runs
        if self._shared is None or sum(finish(runs.peek(namespaces, keys))) * KEY_BYTES == len(keys):
            return
        if self.cache.below.wait(namespaces, keys, runs.lengths(namespaces, keys), lambda: None):
            self._shared.lines.deliver()

    def _keep(self, namespace: Namespace, request: TraceRequest) -> None:
        """Play a recorded store; from the root on if the cache lacks the block before it."""
        keys, first = request.keys, request.first
        before = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else b""
        here = not before or namespace.table.windowed or namespace.table.get(before) != NO_ENTRY
        if here or request.rooted:
            self._store(namespace, keys, first if here else 0)

    def _store(self, namespace: Namespace, keys: bytes, first: int) -> None:
        """Reserve and commit from block `first` on, as far as there is room."""
        cache, blocks = self.cache, len(keys) // KEY_BYTES
        while first < blocks:
            count = min(MAX_RESERVE, blocks - first)
            parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else b""
            run = keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
            got = cache.writes.reserve(self._owner, namespace, parent, run, _LEASE_S)
            if got.frames:
                numbers = [number for number, state in enumerate(got.states) if state == BlockState.FRAME]
                cache.writes.commit(self._owner, got.lease_id, numbers)
            self._settle()
            if got.parent_missing or BlockState.NONE in got.states:
                return
            first += count

    def _forget(self, namespaces: list[Namespace], keys: bytes, tier: str) -> None:
        key, below = keys[-KEY_BYTES:], None
        if tier != "dram":
            below = self.cache.below.begin_flush(namespaces, key, lambda blocks, durable: None, tier=tier or "all")
        finish(self.cache.flush(namespaces, key, below, dram=tier in ("", "dram")))
        if below is not None:
            below.end()
        self._settle()

    # --- resident blocks --------------------------------------------------------------------------

    def tallies(self) -> Tallies:
        """Blocks written and evicted so far."""
        counters = self.cache.counters
        tallies = Tallies(dram_evicted=counters.evicted_blocks, refused=counters.refused_blocks)
        if self._nvme is not None and self._shelf is not None:
            writes = self._nvme._writes
            tallies.nvme_written, tallies.nvme_written_bytes = writes.written_blocks, writes.written_bytes
            tallies.promoted = self._nvme.sources.promoted.blocks
            tallies.nvme_evicted = self._shelf.slots.evicted_blocks
        if self._shared is not None:
            tallies.shared_fetched = self._shared.source.tally.blocks
            tallies.shared_written = self._shared._writes.written_blocks
            tallies.shared_written_bytes = self._shared._writes.written_bytes
        return tallies

    def resident(self, number: int) -> tuple[set[bytes], set[bytes]]:
        """The keys of a namespace's blocks in DRAM and on NVMe. O(blocks)."""
        namespace = self._namespaces[number]
        tables = [namespace.table]
        if self._shelf is not None:
            tables.append(self._shelf.table(namespace))
        here = [{key for shard in table.shards for key in shard} for table in tables]
        return here[0], here[1] if len(here) > 1 else set()

    def check_integrity(self) -> list[str]:
        """Findings where the daemon's parts disagree; see `Cache.check`."""
        return finish(self.cache.check()) + finish(self.cache.below.check())


class _Anywhere(dict[int, Any]):
    """Every region, at address 0."""

    def __missing__(self, number: int) -> SimpleNamespace:
        found = self[number] = SimpleNamespace(address=0)
        return found


def _pieces(size_bytes: int, piece_bytes: int) -> list[int]:
    """A size split into pieces, the last perhaps smaller."""
    whole, rest = divmod(size_bytes, piece_bytes or _REGION_BYTES)
    return [piece_bytes or _REGION_BYTES] * whole + ([rest] if rest else [])
