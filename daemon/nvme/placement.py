"""Which directory a chain lives in.

A chain lives in one directory, so that a lost disk costs its share of the chains and not a block of
each. A new one goes where its first block's hash with the directory's id is the largest: neither the
order of the setting nor the other directories matter, so that one more of them takes over its share
and moves nothing else. One that is there already is found wherever it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from tiercache.daemon.nvme.shelf import Shelf
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.space import Namespace
from tiercache.messages import KEY_BYTES


class Placement:
    """All shelves that are open, in `shelves`. Event loop only."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves = shelves

    def home(self, first_key: bytes) -> Shelf:
        """Where a new chain goes: to a directory that works, if there is one."""
        working = [shelf for shelf in self.shelves if shelf.works] or self.shelves
        return max(working, key=lambda shelf: xxh3_64_intdigest(first_key, shelf.directory_seed))

    def find(self, namespace: Namespace, keys: bytes, limit: int) -> tuple[Shelf | None, int]:
        """Who has the longest run of the first `limit` keys and can be read, and its length."""
        best, longest = None, 0
        for shelf in self.shelves:
            if shelf.has(namespace, keys[:KEY_BYTES]) and not shelf.offline:
                length = shelf.length(namespace, keys, limit)
                if length > longest:
                    best, longest = shelf, length
        return best, longest

    def with_block(self, namespace: Namespace, key: bytes) -> Shelf | None:
        """Who has this block."""
        for shelf in self.shelves:
            if shelf.has(namespace, key):
                return shelf
        return None

    def with_chain(self, first_key: bytes) -> Shelf:
        """Who has a chain that begins so, of whatever namespace; else where a new one would go."""
        for shelf in self.shelves:
            if any(table.get(first_key) != NO_ENTRY for table in shelf.index.tables.values()):
                return shelf
        return self.home(first_key)
