"""Placement: which directory a chain lives in.

Each directory is prefix-closed by itself, so that a lost disk costs its own chains and not a block of each. Blocks are
found wherever they are. A new chain goes to a directory that has room, if there is one; among those, the hash of its
first block with the directory's id decides (rendezvous hashing, weighted by the room that each directory may take), so
that neither the order of the setting nor the other directories matter.

A branch is placed like a new chain: chains with one common head, a system prompt, shall use all disks. Where the branch
goes to a directory that lacks its head, the head is copied there first, from DRAM, which has all blocks before the one
that is written. A copy is worth its writes only for a head with many chains below it, and copies are never more than a
small share of all that was written: see `HeadCopies`. A chain that goes on without a branch stays where it is.

Blocks of windows have no chain to be found by. They go where another namespace of the model has blocks of the same
keys, or where the block before them is, as their writer names it: so a request's windows live together, with its chain
if it has one. A window may still lie in several directories: after one of them was away, and where a branch that went
to another directory is shorter than the window, since windows are not copied with a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.protocol.messages import KEY_BYTES

_NEAR = 16
"""Namespaces before and after one that are searched for blocks of the same keys: those of a model are registered
together, and searching all of thousands for each block would hold up the event loop."""


def near(namespace: Namespace) -> range:
    """Numbers of namespaces that may have blocks of the same keys, its own among them."""
    return range(max(1, namespace.number - _NEAR), namespace.number + _NEAR + 1)


HEAD_PER_BRANCH = 2
"""A head is copied if it has at most this many blocks for each branch that hangs below it."""
MAX_HEAD = 2048
"""Blocks of a head that is copied: more are not looked for."""
COPIED_SHARE = 8
"""One byte in this number of bytes written may be a copy."""


class HeadCopies:
    """Heads of chains that were written to a further directory, and what that may cost. Bytes are those of frames."""

    def __init__(self) -> None:
        self.blocks = 0
        self.bytes = 0
        self.written_bytes = 0
        """All bytes written, copies included."""

    @property
    def allowed_bytes(self) -> int:
        """How many bytes of copies there may be now."""
        return max(0, self.written_bytes // COPIED_SHARE - self.bytes)

    def copied(self, blocks: int, size_bytes: int) -> None:
        """Count blocks that are being copied, and their bytes."""
        self.blocks += blocks
        self.bytes += size_bytes


class Branch(NamedTuple):
    """A shelf that a branch goes to, and how many blocks of its head may be copied there before it."""

    shelf: Shelf
    most_copied: int


class ShelfPlacement:
    """All open shelves, in `shelves`. Event loop only."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves = shelves
        self.copies = HeadCopies()

    @property
    def takes_walks(self) -> bool:
        """True if something dropped is being unlinked: a look-up of a chain may walk up to its root meanwhile."""
        return any(shelf.index.is_unlinking for shelf in self.shelves)

    def home(self, namespace: Namespace, key: bytes, among: Sequence[Shelf] = ()) -> Shelf:
        """Where a chain or a branch that begins with this block goes: to a working directory, if there is one."""
        shelves = among or self.shelves
        if len(shelves) == 1:
            return shelves[0]
        working = [shelf for shelf in shelves if shelf.works] or shelves
        roomy = [shelf for shelf in working if shelf.has_room(namespace)]

        def score(shelf: Shelf) -> float:
            share = (
                (xxh3_64_intdigest(key, shelf.directory_seed) >> 12) + 0.5
            ) / 2**52  # between 0 and 1, never either
            return -max(1, shelf.directory.max_segments * shelf.directory.segment_bytes) / math.log(share)

        return max(roomy or working, key=score)

    def holders(self, namespace: Namespace, key: bytes) -> list[Shelf]:
        """The shelves that have this block."""
        return [shelf for shelf in self.shelves if shelf.has(namespace, key)]

    def branch(self, namespace: Namespace, key: bytes, parent: bytes, holders: Sequence[Shelf]) -> Branch | None:
        """Where a new block below `parent` would go as a branch that leaves the shelves `holders`; None if it stays.

        `holders` have or get the parent.
        """
        if len(holders) == len(self.shelves):
            return None
        branches = sum(shelf.branches(namespace, parent) for shelf in holders)
        home = self.home(namespace, key) if branches else holders[0]
        if home in holders or not home.may_write:
            return None
        allowed = self.copies.allowed_bytes // namespace.size_class.frame_bytes
        return Branch(home, min(branches * HEAD_PER_BRANCH, MAX_HEAD, allowed))

    def window(self, namespace: Namespace, key: bytes, before: bytes, going: Callable[[bytes], Shelf | None]) -> Shelf:
        """Where a new block of a window goes; `before` is the key of the one before it, or empty.

        `going`: where a block of that key, of this namespace or one near it, is being written.
        """
        numbers = near(namespace)
        shelf = going(key) or next((one for one in self.shelves if one.has_any(numbers, key)), None)
        if before and (shelf is None or not shelf.works):
            holders = [one for one in self.shelves if one.has_any(numbers, before)]
            shelf = going(before) or (self.home(namespace, key, holders) if holders else None)
        if shelf is not None and shelf.works:
            return shelf
        # Rows still being loaded may tell: waiting for them is better than starting again elsewhere.
        loading = next((one for one in self.shelves if one.loading and one.works), None)
        return loading or self.home(namespace, before or key)

    def find(self, namespace: Namespace, keys: bytes, limit: int) -> tuple[Shelf | None, int]:
        """The readable shelf with the longest run of the first `limit` keys, and its length."""
        best, longest = None, 0
        for shelf in self.shelves:
            if shelf.has(namespace, keys[:KEY_BYTES]) and not shelf.offline:
                length = shelf.length(namespace, keys, limit)
                if length > longest:
                    best, longest = shelf, length
        return best, longest

    def with_block(self, namespace: Namespace, key: bytes, to_read: bool = False) -> Shelf | None:
        """The shelf that has this block; `to_read`: and can be read."""
        for shelf in self.shelves:
            if shelf.has(namespace, key) and not (to_read and shelf.offline):
                return shelf
        return None

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        """See `TierBelow.lookup`: each block of a window may be in another directory."""
        found = [one for shelf in self.shelves if not shelf.offline and (one := shelf.lookup(namespace)) is not None]
        if len(found) < 2:
            return found[0] if found else None

        def here(key: bytes) -> bool:
            for has in found:  # noqa: SIM110 (any() with a generator takes three times as long)
                if has(key):
                    return True
            return False

        return here

    def with_any(self, namespaces: Sequence[Namespace], key: bytes) -> list[Shelf]:
        """The shelves that have this block, of one of these namespaces or near them."""
        numbers = {*near(namespaces[0]), *(namespace.number for namespace in namespaces)}
        return [shelf for shelf in self.shelves if shelf.has_any(numbers, key)]
