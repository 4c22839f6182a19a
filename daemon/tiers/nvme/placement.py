"""Placement: which directory a chain lives in.

A chain lives in one directory, so that a lost disk costs its share of the chains and not a block of each. A new chain
goes where the hash of its first block with the directory's id is the largest (rendezvous hashing): neither the order of
the setting nor the other directories matter, so an added directory takes over its share and moves nothing else. An
existing chain is found wherever it is.

Blocks of windows have no chain to be found by. They go where the block before them is, as their writer names it, or
where another namespace of the model has blocks of the same keys: so a request's windows live together, with its chain
if it has one. A window may still lie in several directories, after one of them was away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.shelf import Shelf
from tiercache.protocol.messages import KEY_BYTES

_NEAR = 16
"""So many namespaces before and after one are searched for blocks of the same keys: those of a model are registered
together, and searching all of thousands for each block would hold up the event loop."""


def near(namespace: Namespace) -> range:
    """Numbers of namespaces that may have blocks of the same keys, its own among them."""
    return range(max(1, namespace.number - _NEAR), namespace.number + _NEAR + 1)


class ShelfPlacement:
    """All open shelves, in `shelves`. Event loop only."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves = shelves

    def home(self, first_key: bytes) -> Shelf:
        """Where a new chain goes: to a working directory, if there is one."""
        working = [shelf for shelf in self.shelves if shelf.works] or self.shelves
        return max(working, key=lambda shelf: xxh3_64_intdigest(first_key, shelf.directory_seed))

    def window(self, namespace: Namespace, key: bytes, before: bytes, going: Callable[[bytes], Shelf | None]) -> Shelf:
        """Where a new block of a window goes; `before` is the key of the one before it, or empty.

        `going`: where a block of that key, of this namespace or one near it, is being written.
        """
        numbers = near(namespace)
        for its in filter(None, (before, key)):
            shelf = going(its) or next((one for one in self.shelves if one.has_any(numbers, its)), None)
            if shelf is not None and shelf.works:
                return shelf
        # Rows still being loaded may tell: waiting for them is better than starting anew elsewhere.
        loading = next((one for one in self.shelves if one.loading and one.works), None)
        return loading or self.home(before or key)

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

    def with_chain(self, namespaces: Sequence[Namespace], first_key: bytes) -> Shelf | None:
        """The shelf with a chain that begins so, of one of these namespaces or near them; else the home of a new one.

        None where no directory is open.
        """
        numbers = {*near(namespaces[0]), *(namespace.number for namespace in namespaces)}
        for shelf in self.shelves:
            if shelf.has_any(numbers, first_key):
                return shelf
        return self.home(first_key) if self.shelves else None
