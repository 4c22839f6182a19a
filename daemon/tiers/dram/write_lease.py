"""A store into DRAM, as data: its lease, and its blocks until they are published.

`writes` and `pending_blocks` change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import repeat
from typing import NamedTuple

from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import KEY_BYTES, BlockState

from .leases import KeepsStores, Owner, StoreLease


class BlockPhase(Enum):
    """The state of a reserved block.

    WRITING ─commit→ HELD ─parent published→ VISIBLE
       └──────────────┴─abort, expiry, loss of the parent, flush→ DROPPED
    """

    WRITING = "writing"
    HELD = "held"
    VISIBLE = "visible"
    DROPPED = "dropped"


class PendingRun:
    """Blocks of a chain between reserve and publication, each below the one before it. All are in the same phase.

    The first hangs below an entry of the index (`parent_entry`, pinned meanwhile), below the last block of another run
    (`parent`), or below nothing. Frames belong to them until they are published or their writer is known to be done
    with them, and are NO_FRAME then. Blocks of windows, and those that come as payload, are runs of one.
    """

    __slots__ = (
        "among",
        "children",
        "frames",
        "keys",
        "lease",
        "parent",
        "parent_entry",
        "phase",
        "place",
        "table",
        "written",
    )

    def __init__(
        self,
        table: Table,
        keys: list[bytes],
        frames: list[int],
        lease: WriteLease,
        place: int,
        among: dict[PendingRun, None],
    ) -> None:
        self.among = among  # all pending runs of its namespace, or those pending when it was flushed
        self.table = table
        self.keys = keys
        self.frames = frames
        self.lease = lease
        self.place = place  # position of its first key in the request; the others follow
        self.parent_entry = NO_ENTRY
        self.parent: PendingRun | None = None
        self.children: dict[PendingRun, None] = {}  # in order; below its last block
        self.phase = BlockPhase.WRITING
        self.written = 0  # bytes received as payload, from the start without a gap

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.keys)

    @property
    def places(self) -> range:
        """The positions of its keys in the request."""
        return range(self.place, self.place + len(self.keys))

    @property
    def names(self) -> Iterator[tuple[int, bytes]]:
        """Namespace number and key of each block."""
        return zip(repeat(self.table.number), self.keys)


class WriteLease(StoreLease):
    """Frames handed to one writer, by the index of the key in its request.

    `chain`: for a windowed namespace the key before the run (empty: the root) and the run's keys, since such blocks do
    not record the one before them.
    """

    __slots__ = ("blocks", "chain")

    def __init__(self, kept_by: KeepsStores, owner: Owner, started_s: float, ttl_s: float, frame_bytes: int) -> None:
        super().__init__(kept_by, owner, started_s, ttl_s, frame_bytes, writes_directly=owner.mapped)
        self.blocks: dict[int, PendingRun] = {}
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


def complete_runs(first: PendingRun, most: int) -> list[PendingRun]:
    """A complete run and the complete ones below it, to about so many blocks: each an only child, and events tell of
    all or none."""
    runs, last, left, told, held = [first], first, most - first.count, first.lease.named is not None, BlockPhase.HELD
    while len(children := last.children) == 1 and left > 0:
        (child,) = children
        if child.phase is not held or (child.lease.named is not None) is not told:
            break
        child.parent, last.children = None, {}
        runs.append(child)
        last, left = child, left - child.count
    return runs
