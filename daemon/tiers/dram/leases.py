"""Leases, and the blocks being written under them.

A read lease keeps a prefix in place while its frames are copied from; a write lease keeps frames that are being copied
into. Both are only data: `writes` and `reads` change them.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiercache.daemon.index.index import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE, BlockState, Extent

if TYPE_CHECKING:
    from tiercache.daemon.events.events import Named
    from tiercache.daemon.tiers.dram.growing import GrowingRun
    from tiercache.daemon.tiers.dram.space import Namespace

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
        "grants",
        "instance",
        "internal",
        "mapped",
        "party",
        "quarantined",
        "quarantined_grants",
        "reads",
        "writes",
    )

    def __init__(self, instance: bytes, internal: bool = False, mapped: bool = True, party: str = "") -> None:
        self.instance = instance
        self.internal = internal  # the daemon itself, promoting blocks: these are no stores
        self.mapped = mapped
        self.party = party or f"instance {instance.hex()}"
        self.reads: dict[int, ReadLease] = {}
        self.writes: dict[int, WriteLease] = {}
        self.quarantined: dict[int, WriteLease] = {}  # over, with frames quarantined until its process exits
        self.grants: set[int] = set()  # ids of write leases in the tier below
        self.quarantined_grants: set[int] = set()  # likewise, of those that are over

    def same_engine(self, other: Owner) -> bool:
        """Whether one session may continue what the other has begun."""
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
        """Whether nothing of the run was flushed meanwhile."""

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
        """Whether any of its namespaces is windowed: then it only holds whole cuts."""
        return any(namespace.table.windowed for namespace in self.namespaces)

    def pinned(self) -> list[int]:
        """Every entry that it pins, including those of its runs."""
        return [*self.pins, *chain.from_iterable(run.pins for run in self.runs)]


class BlockPhase(Enum):
    """The state of a reserved block.

    WRITING ─commit→ HELD ─parent published→ VISIBLE
       └──────────────┴─abort, expiry, loss of the parent, flush→ DROPPED
    """

    WRITING = "writing"
    HELD = "held"
    VISIBLE = "visible"
    DROPPED = "dropped"


class PendingBlock:
    """A block between reserve and publication.

    It hangs below an entry of the index (`parent_entry`, pinned meanwhile), below another pending block
    (`parent_block`), or below nothing. `frame` belongs to it until it is published or its writer is known to be done
    with it.
    """

    __slots__ = (
        "among",
        "children",
        "frame",
        "key",
        "lease",
        "parent_block",
        "parent_entry",
        "phase",
        "place",
        "table",
        "written",
    )

    def __init__(
        self, table: Table, key: bytes, frame: int, lease: WriteLease, place: int, among: dict[PendingBlock, None]
    ) -> None:
        self.among = among  # all pending blocks of its namespace, or those pending when it was flushed
        self.table = table
        self.key = key
        self.frame = frame
        self.lease = lease
        self.place = place  # position of its key in the request
        self.parent_entry = NO_ENTRY
        self.parent_block: PendingBlock | None = None
        self.children: dict[PendingBlock, None] = {}  # in order
        self.phase = BlockPhase.WRITING
        self.written = 0  # bytes received as payload, from the start without a gap


class WriteLease:
    """Frames handed to one writer, by the index of the key in its request.

    `over`: it expired or was given up without word that its copies are finished. From then on nothing of it is
    published, and its frames are in quarantine. `named`: what events say of its blocks. `chain`: for a windowed
    namespace the key before the run (empty: the root) and the run's keys, since such blocks do not record the one
    before them.
    """

    __slots__ = (
        "blocks",
        "chain",
        "deadline_s",
        "frame_bytes",
        "frames",
        "lease_id",
        "named",
        "over",
        "owner",
        "started_s",
        "writing",
    )

    def __init__(self, lease_id: int, owner: Owner, started_s: float, ttl_s: float, frame_bytes: int) -> None:
        self.lease_id = lease_id
        self.owner = owner
        self.frame_bytes = frame_bytes
        self.started_s = started_s
        self.deadline_s = started_s + ttl_s
        self.blocks: dict[int, PendingBlock] = {}
        self.writing = 0  # blocks whose frame the writer may still write to
        self.frames = 0  # those, plus frames of complete blocks not published yet
        self.over = False
        self.named: Named | None = None
        self.chain = (b"", b"")

    def before(self, place: int) -> bytes:
        """The key of the block before that one in the run, as its writer has named it; empty for none."""
        parent, keys = self.chain
        return keys[(place - 1) * KEY_BYTES : place * KEY_BYTES] if place else parent


class Reservation(NamedTuple):
    """Answer to `reserve`: one state per key, frames of those in state FRAME, in order."""

    lease_id: int
    states: list[BlockState]
    frames: list[int]
    parent_missing: bool


def complete_run(first: PendingBlock, most: int = MAX_RESERVE) -> list[PendingBlock]:
    """A complete block and the complete ones below it, as far as each is an only child."""
    run, last = [first], first
    while len(last.children) == 1 and len(run) < most:
        child = next(iter(last.children))
        if child.phase is not BlockPhase.HELD:
            break
        child.parent_block, last.children = None, {}
        run.append(child)
        last = child
    return run


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
