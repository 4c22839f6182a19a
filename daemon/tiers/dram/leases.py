"""Leases, and who has them.

A read lease keeps a prefix in place while its frames are copied from; a lease to store keeps places that are being
copied into. Both are only data: `read_leases` and `store_leases` change them.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from tiercache.protocol.messages import Extent

if TYPE_CHECKING:
    from tiercache.daemon.events.events import Named

    from .growing_run import GrowingRun
    from .space import Namespace

_SPARE_NOTES = 1024
_SWEPT_AT_ONCE = 4
"""Old notes checked for each one added: more than one, so that the sweep ends."""


class Owner:
    """One session as far as leases are concerned.

    `instance` is shared by all sessions of an engine: its workers may copy under its scheduler's lease, and finish what
    a lost session of it was writing. The client chooses it, so no limit counts by it: `party` is accountable for the
    session, a process of this host or a tenant on others. `mapped`: the client writes into frames itself. Otherwise
    every byte in its frames passed through the daemon.
    """

    __slots__ = (
        "broken_chains",
        "instance",
        "internal",
        "mapped",
        "party",
        "quarantined",
        "reads",
        "writes",
    )

    def __init__(self, instance: bytes, internal: bool = False, mapped: bool = True, party: str = "") -> None:
        self.instance = instance
        self.internal = internal  # the daemon itself, promoting blocks: these are not stores
        self.mapped = mapped
        self.party = party or f"instance {instance.hex()}"
        self.broken_chains = 0
        """Lists of keys that this session sent as chains and that are not chains."""
        self.reads: dict[int, ReadLease] = {}
        self.writes: dict[int, StoreLease] = {}  # into DRAM, and into the tier below
        self.quarantined: dict[int, StoreLease] = {}  # over, with places quarantined until its process exits

    def same_engine(self, other: Owner) -> bool:
        """True if one session may continue what the other has begun."""
        return self.instance == other.instance and self.internal is other.internal


class HeldBelow(Protocol):
    """What a lease keeps in the tier below, of a run of `blocks` from the root: its end, beyond what DRAM has."""

    blocks: int

    def extents(self, namespace: Namespace, first: int, count: int) -> tuple[list[str], list[Extent]]:
        """Directories and places of blocks from `first` on; fewer than `count` where one cannot be named."""

    def doubt(self, namespace: Namespace, number: int) -> None:
        """A client reports that a block named to it is bad."""

    @property
    def intact(self) -> bool:
        """True if nothing of the run was flushed meanwhile."""

    def let_go(self, good: bool) -> None:
        """The lease has ended; `good` if the copies made under it were found right."""


class ReadLease:
    """Holds the first `blocks` of `keys` in each of `namespaces`, by pinning `pins`.

    While blocks are being promoted from the tier below, `target` is how many there will be and `runs` hold what has
    arrived in each namespace. `blocks` grows with chains; if any namespace is windowed it becomes `target` once all is
    here. `over`: the lease has ended, for the code that still works on it. `held` is what it keeps in the tier below
    instead, for clients that read there; `rises` while that may still be promoted on request.

    A revoked lease (expired, or something under it was dropped) is taken from its holders, who learn at release that
    their copies are worth nothing. A lease without holders is a pin.
    """

    __slots__ = (
        "blocks",
        "deadline_s",
        "held",
        "holders",
        "keys",
        "lease_id",
        "namespaces",
        "over",
        "pin_name",
        "pin_regions",
        "pins",
        "rises",
        "runs",
        "started_s",
        "target",
        "whole_at",
    )

    def __init__(
        self,
        lease_id: int,
        namespaces: list[Namespace],
        keys: bytes,
        blocks: int,
        pins: list[int],
        started_s: float,
        ttl_s: float,
    ) -> None:
        self.lease_id = lease_id
        self.namespaces = namespaces
        self.keys = keys
        self.blocks = blocks
        self.target = blocks
        self.over = False
        self.held: HeldBelow | None = None
        self.rises = False
        self.whole_at = -1  # number of drops up to which nothing of it was lost
        self.pins = pins
        self.runs: list[GrowingRun] = []
        self.started_s = started_s
        self.deadline_s = started_s + ttl_s
        self.holders: set[Owner] = set()
        self.pin_name: tuple[tuple[int, ...], bytes] | None = None
        self.pin_regions: set[int] = set()  # regions of the arena that hold what it pins

    @property
    def has_windows(self) -> bool:
        """True if any of its namespaces is windowed: then it only holds whole cuts."""
        return any(namespace.table.windowed for namespace in self.namespaces)

    def pinned(self) -> list[int]:
        """Every entry that it pins, including those of its runs; not to be changed."""
        return [*self.pins, *chain.from_iterable(run.pins for run in self.runs)] if self.runs else self.pins


class KeepsStores(Protocol):
    """Whose lease to store it is: see `StoreLeases`."""

    def renew(self, lease: Any, ttl_s: float) -> None:
        """Move the deadline of a live lease."""

    def give_up(self, lease: Any, finished: bool = False) -> None:
        """Publish nothing more of it; its places wait in quarantine, unless its copies have `finished`."""

    def finish(self, lease: Any) -> None:
        """All copies of a lease that is over have ended."""


class StoreLease:
    """Places of `frame_bytes` handed to one writer.

    `over`: it expired or was given up without word that its copies are finished. From then on nothing of it is
    published, and its places are in quarantine. `writes_directly`: its writer has access to the places. Otherwise every
    byte passes through the daemon, which writes none after the end. `named`: what events say of its blocks.
    """

    __slots__ = (
        "deadline_s",
        "frame_bytes",
        "frames",
        "kept_by",
        "lease_id",
        "named",
        "over",
        "owner",
        "started_s",
        "steps",
        "writes_directly",
        "writing",
    )

    def __init__(
        self,
        kept_by: KeepsStores,
        owner: Owner,
        started_s: float,
        ttl_s: float,
        frame_bytes: int,
        writes_directly: bool = True,
    ) -> None:
        self.lease_id = new_lease_id()
        self.kept_by = kept_by
        self.owner = owner
        self.frame_bytes = frame_bytes
        self.writes_directly = writes_directly
        self.started_s = started_s
        self.deadline_s = started_s + ttl_s
        self.steps = 0  # what giving it up costs
        self.writing = 0  # places that the writer may still write to
        self.frames = 0  # those, plus frames of complete blocks not published yet
        self.over = False
        self.named: Named | None = None


class Lease(Protocol):
    """The part of a lease that `Deadlines` reads."""

    deadline_s: float


class Deadlines:
    """Ids of `leases` by deadline; a renewed lease is discovered when its old deadline comes up.

    Notes on ended or renewed leases are swept out once they are the majority, so that pins for a week, set again and
    again, do not pile up for a week. O(log n), also while sweeping.
    """

    def __init__(self, leases: Mapping[int, Lease]) -> None:
        self._leases = leases
        self._heap: list[tuple[float, int]] = []
        self._old: list[tuple[float, int]] = []  # a heap too, swept from its end

    def add(self, deadline_s: float, lease_id: int) -> None:
        """Note the deadline of a lease, one of `leases`."""
        heapq.heappush(self._heap, (deadline_s, lease_id))
        if not self._old and len(self._heap) > 2 * len(self._leases) + _SPARE_NOTES:
            self._old, self._heap = self._heap, []
        for _ in range(min(_SWEPT_AT_ONCE, len(self._old))):
            note = self._old.pop()
            lease = self._leases.get(note[1])
            if lease is not None and lease.deadline_s == note[0]:
                heapq.heappush(self._heap, note)

    def __len__(self) -> int:
        return len(self._heap) + len(self._old)

    def due(self, now_s: float) -> Iterator[int]:
        """Ids of leases whose noted deadline has passed; their notes are removed."""
        while self._old and self._old[0][0] <= now_s:
            yield heapq.heappop(self._old)[1]
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]


def new_lease_id() -> int:
    """A random id, never 0, that fits msgpack's unsigned integer."""
    return secrets.randbits(63) | 1
