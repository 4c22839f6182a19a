"""A store into DRAM, as data: its lease, and its blocks until they are published.

`writes` and `pending_blocks` change it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE, BlockState

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


class WriteLease(StoreLease):
    """Frames handed to one writer, by the index of the key in its request.

    `chain`: for a windowed namespace the key before the run (empty: the root) and the run's keys, since such blocks do
    not record the one before them.
    """

    __slots__ = ("blocks", "chain")

    def __init__(self, kept_by: KeepsStores, owner: Owner, started_s: float, ttl_s: float, frame_bytes: int) -> None:
        super().__init__(kept_by, owner, started_s, ttl_s, frame_bytes, writes_directly=owner.mapped)
        self.blocks: dict[int, PendingBlock] = {}
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
    """A complete block and the complete ones below it: each an only child, and events tell of all or none."""
    run, last, lease, told, held = [first], first, first.lease, first.lease.named is not None, BlockPhase.HELD
    while len(children := last.children) == 1 and len(run) < most:
        (child,) = children
        if child.phase is not held or (child.lease is not lease and (child.lease.named is not None) is not told):
            break
        child.parent_block, last.children = None, {}
        run.append(child)
        last = child
    return run
