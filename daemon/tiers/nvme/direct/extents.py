"""Extents held: blocks that stay on NVMe while a client reads them there itself, under a read lease.

    match(extents) ─► Held: the deepest entry of a chain is pinned, so none of it is evicted; of a window each
    extents        ─► each named slot is held: it gets no new owner before the lease ends
    release        ─► good unless the run was flushed in between
    bad_extent     ─► the block is read here, and dropped if it is bad: the client's word is not enough

Only blocks that a GPU can verify are named: stored raw, with lane sums for a checksum.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, DiskOutcome, ReadOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.moves.placement import ShelfPlacement
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf, StoredBlock
from tiercache.protocol.checksums import CHECKSUM_LANES
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT, Extent

log = logging.getLogger("tiercache.daemon")

MAX_HELD_BLOCKS = 2048
"""Of all windows of a lease: each block is looked up and pinned, in some 2 us."""
MAX_DOUBTS = 16
"""Reported blocks that are read again at a time; further reports are only counted."""


class HeldExtents:
    """Everything held for clients that read from the disks. Event loop only; never blocks."""

    def __init__(self, placement: ShelfPlacement) -> None:
        self.direct_blocks = 0
        self.direct_bytes = 0
        self.held_leases = 0
        self.reported_blocks = 0
        self.bad_blocks = 0
        self._placement = placement
        self._doubts: set[tuple[Shelf, int]] = set()

    def hold(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> Held | None:
        """Keep in place what a cut at the end of `keys` needs from block `first` on; None if that is no use.

        It is also None if not all of it is in one directory, or its windows are too wide: then it is promoted to DRAM.
        """
        cut = len(keys) // KEY_BYTES
        windows = [one for one in namespaces if one.table.windowed]
        if sum(cut - max(first, first_of_window(one, cut)) for one in windows) > MAX_HELD_BLOCKS:
            return None
        for shelf in self._placement.with_any(namespaces, keys[-KEY_BYTES:]):
            if shelf.offline or not shelf.directory.direct or not str(shelf.directory.path).isprintable():
                continue
            parts = _find_parts(shelf, namespaces, keys, first)
            if parts is None:
                continue
            for part in parts:
                for entry in part.entries:
                    shelf.index.touch(entry)
                    shelf.index.pin(entry)
            self.held_leases += 1
            return Held(self, shelf, keys, parts)
        return None

    def doubt(self, shelf: Shelf, namespace: Namespace, key: bytes) -> None:
        """Read a block that a client has reported as bad."""
        self.reported_blocks += 1
        stored = shelf.find_many(namespace, [key])
        if not stored or (shelf, stored.slots[0]) in self._doubts or len(self._doubts) >= MAX_DOUBTS:
            return
        [entry], [slot] = stored.entries, stored.slots
        self._doubts.add((shelf, slot))
        shelf.index.pin(entry)
        shelf.allocator.hold(slot)
        op = stored.read_op(namespace, [key], [NOWHERE], lambda op: self._judged(shelf, namespace, entry, op))
        if not shelf.queue.submit(op, DiskPriority.PREFETCH):
            op.end(0, 1, DiskOutcome.CANCELLED)
            op.done(op)

    def _judged(self, shelf: Shelf, namespace: Namespace, entry: int, op: ReadOp) -> None:
        [outcome], [slot] = op.outcomes, op.slots
        if outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still read the slot
        self._doubts.discard((shelf, slot))
        shelf.allocator.unhold(slot)
        shelf.index.unpin(entry)
        if outcome is DiskOutcome.CORRUPT:
            self.bad_blocks += 1
            shelf.drop_damaged(namespace, *op.keys)
        elif outcome is DiskOutcome.OK:
            log.warning("%s: a client finds a block bad that is good here", shelf.directory.path)


class _Part(NamedTuple):
    """What is kept of one namespace: blocks from `first` on, by pins on `entries`, as of a certain epoch."""

    namespace: Namespace
    first: int
    entries: list[int]
    epoch: int


def _find_parts(shelf: Shelf, namespaces: Sequence[Namespace], keys: bytes, first: int) -> list[_Part] | None:
    """`_find_part` of each namespace; None unless a shelf has all of it."""
    parts = []
    for namespace in namespaces:
        part = _find_part(shelf, namespace, keys, first)
        if part is None:
            return None
        parts.append(part)
    return parts


def _find_part(shelf: Shelf, namespace: Namespace, keys: bytes, first: int) -> _Part | None:
    """What a cut at the end of `keys` needs of a namespace from block `first` on; None unless all of it is here."""
    cut = len(keys) // KEY_BYTES
    low = max(first, first_of_window(namespace, cut)) if namespace.table.windowed else 0
    pinned = range(low, cut) if namespace.table.windowed else (cut - 1,)
    found = [shelf.find(namespace, keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]) for number in pinned]
    entries = [stored.entry for stored in found if stored is not None]
    return _Part(namespace, low, entries, shelf.epoch(namespace)) if len(entries) == len(found) else None


class Held:
    """What a read lease keeps on NVMe of a run of `blocks`, counted from the root."""

    __slots__ = ("_extents", "_keys", "_named", "_parts", "_shelf", "blocks")

    def __init__(self, extents: HeldExtents, shelf: Shelf, keys: bytes, parts: list[_Part]) -> None:
        self.blocks = len(keys) // KEY_BYTES
        self._extents = extents
        self._shelf = shelf
        self._keys = keys
        self._parts = parts
        self._named: dict[tuple[int, int], StoredBlock] = {}  # by namespace number and block

    def extents(self, namespace: Namespace, first: int, count: int) -> tuple[list[str], list[Extent]]:
        """Directories and places of blocks `first ..< first + count`; fewer where one cannot be named."""
        named = []
        low = next(part.first for part in self._parts if part.namespace is namespace)
        for number in range(first, min(first + count, self.blocks) if first >= low else first):
            stored = self._name(namespace, number)
            if stored is None:
                break
            named.append(
                Extent(
                    stored.slot >> REGION_SHIFT,
                    0,
                    stored.kind,
                    stored.codec,
                    stored.slot & OFFSET_MASK,
                    namespace.spec.block_bytes,
                    stored.stored_length,
                    stored.checksum,
                )
            )
        return ([str(self._shelf.directory.path)] if named else []), named

    def _name(self, namespace: Namespace, number: int) -> StoredBlock | None:
        """Where a block is; it is held from now on."""
        name = namespace.number, number
        stored = self._named.get(name)
        if stored is None:
            stored = self._shelf.find(namespace, self._key(number))
            if stored is None or stored.kind != CHECKSUM_LANES or stored.codec != codecs.RAW:
                return None
            self._shelf.allocator.hold(stored.slot)
            self._named[name] = stored
        return stored

    def _key(self, number: int) -> bytes:
        return self._keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def doubt(self, namespace: Namespace, number: int) -> None:
        """A client reports that a block named to it is bad."""
        if (namespace.number, number) in self._named:
            self._extents.doubt(self._shelf, namespace, self._key(number))

    @property
    def intact(self) -> bool:
        """True if nothing of the run was flushed meanwhile.

        A block dropped because it is bad does not affect the others, whose slots are held and whose bytes their reader
        has verified.
        """
        shelf = self._shelf
        if shelf.retired:
            return False  # flushes no longer reach it
        whole = shelf.index.all_attached
        return all(shelf.epoch(part.namespace) == part.epoch or whole(part.entries) for part in self._parts)

    def let_go(self, good: bool) -> None:
        """The lease ends; `good` if its last holder was told that its copies are right."""
        for stored in self._named.values():
            self._shelf.allocator.unhold(stored.slot)
        for part in self._parts:
            for entry in part.entries:
                self._shelf.index.unpin(entry)
        self._extents.held_leases -= 1
        if good:
            self._extents.direct_blocks += len(self._named)
            self._extents.direct_bytes += sum(stored.stored_length for stored in self._named.values())
