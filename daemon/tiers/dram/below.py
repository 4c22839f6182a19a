"""The interface between DRAM and the tiers below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tiercache.protocol.messages import NO_LEASE, BlockView, CommitState, Extent

if TYPE_CHECKING:
    from tiercache.daemon.events.events import Named
    from tiercache.daemon.ground.slices import Steps
    from tiercache.daemon.index.entries import Table
    from tiercache.daemon.index.index import Index
    from tiercache.daemon.index.policy import Touch

    from .leases import HeldBelow, Owner, ReadLease
    from .space import Namespace


class Granted(NamedTuple):
    """How many leading keys are in the tier below, and places in `directory` for those that follow.

    `soon`: places are being made, or another client is writing the next block: ask again.
    """

    present: int = 0
    lease_id: int = NO_LEASE
    directory: str = ""
    extents: Sequence[Extent] = ()
    soon: bool = False


class GrantsBelow(Protocol):
    """Places in the tier below that clients write themselves, under leases as for `Writes`."""

    def reserve(
        self, owner: Owner, namespace: Namespace, parent: bytes, keys: bytes, ttl_s: float, named: Named | None = None
    ) -> Granted:
        """Places for a run of `keys` below `parent` (empty: the root), past those that are here."""

    def commit(self, owner: Owner, lease_id: int, checksums: Sequence[int]) -> list[CommitState]:
        """The writes have ended; the leading blocks are complete and have these checksums. Ends the lease."""

    def abort(self, owner: Owner, lease_id: int, finished: bool) -> None:
        """Drop everything of a lease, if it is one of these. Unless `finished`, its places go into quarantine."""


class FlushBelow(Protocol):
    """A flush of the tier below, which is told part by part what to drop."""

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """Drop these now, out of sight at once."""

    def end(self) -> None:
        """Those were all. If this raises, `done` is not called: the exception is the answer."""

    def give_up(self) -> None:
        """It failed half way, and the exception is the answer: `done` is not called."""

    @property
    def settled(self) -> bool:
        """True if it was answered and no disk has any of it left to write: until then it takes memory."""

    @property
    def unconfirmed(self) -> Sequence[str]:
        """Which tiers have not confirmed it, once `done` was told that it is not durable."""

    @property
    def lost(self) -> str:
        """Why it is not kept either for a store that is away: it is lost if the daemon ends."""


class _NoFlush:
    unconfirmed: Sequence[str] = ()
    lost = ""
    settled = True

    def __init__(self, done: Callable[[int, bool], None]) -> None:
        self._done = done

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        return

    def end(self) -> None:
        self._done(0, True)

    def give_up(self) -> None:
        return


class Claim(NamedTuple):
    """What a shared store was found to have, a short time ago.

    It has what is missing of blocks 0 ..< `end`, if this host still has the `starts[i]` leading ones of chain i, of the
    namespaces in the order of the request. `stored`: of namespaces with a window, the blocks that it has.
    """

    end: int
    starts: dict[int, int]
    stored: dict[int, set[int]]

    @property
    def blocks_in_windows(self) -> int:
        """How many blocks `stored` names."""
        return sum(map(len, self.stored.values()))


class TierBelow:
    """What the DRAM tier asks and tells the tiers below it. Event loop only; never blocks.

    As it stands there is none: DRAM is the last tier, and evicted blocks are gone.
    """

    tiers: tuple[str, ...] = ()
    """Their names, the nearest first; empty where there are none."""
    grants: GrantsBelow | None = None
    """Its places that clients write themselves; None when there are none."""

    @property
    def local(self) -> TierBelow:
        """The nearest of them. It has an index on this host: questions about single blocks go to it alone."""
        return self

    def expire(self) -> None:
        """End what has expired, a slice of it."""

    def writer_gone(self, instance: bytes) -> None:
        """An engine's session has ended: its chains are not about to continue."""

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """How many of the first `limit` keys of a chain are in this tier, as a leading run."""
        return 0

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        """A function that tells whether this tier has a block of a window, to be used at once; None if it has none."""
        return None

    @property
    def unlinking(self) -> bool:
        """True if something dropped is being unlinked: a look-up may walk up to the root meanwhile."""
        return False

    def matched(
        self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> None:
        """A client asked for `keys`; DRAM has the first `dram_blocks`, both tiers together the first `found_blocks`.

        `how` it touches them.
        """

    def holders(self, namespace: Namespace, keys: bytes) -> list[tuple[Index, Table]]:
        """Indexes and tables with blocks of this prompt in this tier, for hints: of a chain the longest run."""
        return []

    @property
    def may_extend(self) -> bool:
        """True if there is a shared store that may extend what this host has."""
        return False

    def wait(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        lengths: Sequence[int],
        go: Callable[[], None],
        patience_s: float = math.inf,
    ) -> bool:
        """Have `go` called when it is known how far a shared store extends what this host has of a prompt.

        `lengths`: leading blocks on this host, by namespace. Not later than a time-out, nor than after `patience_s`;
        never from within this call.
        False where there is nothing to wait for.
        """
        return False

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """What a shared store was found to have of a prompt a short time ago."""
        return None

    def promote(self, lease: ReadLease) -> None:
        """Promote what `lease.runs` wait for; it arrives in DRAM as if a client stored it."""

    def hold(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> HeldBelow | None:
        """Keep in place what a cut at the end of `keys` needs from block `first` on, for clients to read it here.

        None where that is no use, or not all of it is in this tier.
        """
        return None

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        """Blocks have become visible in DRAM, each below the one before it.

        Of a windowed namespace they come one by one: `before` is the key of the block before it, or empty.
        """

    def begin_flush(
        self,
        namespaces: Sequence[Namespace],
        key: bytes,
        done: Callable[[int, bool], None],
        named: bool = False,
        tier: str = "all",
    ) -> FlushBelow:
        """Flush all these, part by part; `done(blocks, durable)` once a crash cannot bring them back, or still may.

        Unless the namespaces are `named`, the flush includes those known only to a disk that is not open yet. `tier` is
        one of `tiers`, or `all`.
        """
        return _NoFlush(done)

    @property
    def settled(self) -> bool:
        """True if no block waits to be written there, or is being promoted."""
        return True

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        """Functions that each run a slice of one kind of deferred work; True while there is more."""
        return ()

    def check(self) -> Steps[list[str]]:
        """Every way in which its parts disagree. O(blocks)."""
        yield from ()
        return []

    def scan(
        self, sample: int, bytes_per_s: int, wanted: Callable[[], bool], done: Callable[[list[str], int], None]
    ) -> bool:
        """Read that many blocks (-1: all) and compare checksums, as long as `wanted()`.

        Calls `done(findings, blocks)` at the end. False when another scan is under way.
        """
        done([], 0)
        return True

    def stats_by_tier(self) -> dict[str, dict[str, Any]]:
        """What `stats` shows of each tier, by its name."""
        return {}

    def places(self, namespace: Namespace, key: bytes) -> list[BlockView]:
        """Where a block is in this tier; changes nothing, not even recency."""
        return []

    def chain(self, namespace: Namespace, key: bytes) -> Steps[list[bytes]]:
        """The keys from the first block of a chain to this one; empty when it is not here."""
        yield from ()
        return []

    def blocks_of(self, number: int) -> int:
        """Blocks of a namespace."""
        return 0
