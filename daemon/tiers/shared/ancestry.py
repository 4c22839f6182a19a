"""Where a block stands in its chain: its first block and its number, for names, lifetimes and packs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace

MAX_PLACES = 65_536
"""Blocks remembered; the oldest are forgotten. Those of chains are found again by a walk."""
MAX_WALK = 16_384
"""Steps of such a walk: about three milliseconds. Blocks further down have no place until a client asks for them."""
NOTED_EVERY = 32
"""A walk remembers every 32nd block that it passes: the next walk from nearby ends there."""


class ChainPlace(NamedTuple):
    """The key of a chain's first block, and the number of a block in it."""

    root: bytes
    number: int


_UNPLACED = ChainPlace(b"", -1)
"""Remembered for blocks on a walk that did not reach the root: the next walk, from a neighbour, ends at once."""


class Ancestry:
    """Places by tenant and key: a key stands for all blocks before it, in every namespace.

    A client may say of the blocks of a window what it likes, so what one tenant says is not believed of another.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._places = OrderedDict[tuple[str, bytes], ChainPlace]()

    def note(self, namespace: Namespace, key: bytes, before: bytes) -> ChainPlace | None:
        """The place of a block that follows `before` (empty: it is the first); None where that is not known."""
        tenant = namespace.spec.tenant
        place = self._places.get((tenant, key), _UNPLACED)
        if place is _UNPLACED:
            place = self._after(self._places.get((tenant, before), _UNPLACED), key, before)
            if place is not _UNPLACED:
                self._put(tenant, key, place)
        return None if place is _UNPLACED else place

    def _after(self, above: ChainPlace, key: bytes, before: bytes) -> ChainPlace:
        if not before:
            return ChainPlace(key, 0)
        return _UNPLACED if above is _UNPLACED else ChainPlace(above.root, above.number + 1)

    def place(self, namespace: Namespace, key: bytes) -> ChainPlace | None:
        """The place of a block in DRAM: as remembered, or for a chain by walking up to its root."""
        tenant = namespace.spec.tenant
        found = self._places.get((tenant, key))
        if found is not None or namespace.table.windowed:
            return None if found is _UNPLACED else found
        index, walked, entry, above = self._index, list[bytes](), namespace.table.get(key), None
        while entry not in (NO_ENTRY, namespace.table.root) and len(walked) < MAX_WALK:
            above = self._places.get((tenant, index.key[entry]))
            if above is not None:
                break
            walked.append(index.key[entry])
            entry = index.parent[entry]
        if not walked:
            return None
        if above is _UNPLACED or (above is None and entry != namespace.table.root):
            for passed in walked[::NOTED_EVERY]:
                self._put(tenant, passed, _UNPLACED)
            return None
        root, number = (walked[-1], -1) if above is None else above
        number += len(walked)  # of `key`
        for steps in range(0, len(walked), NOTED_EVERY):
            self._put(tenant, walked[steps], ChainPlace(root, number - steps))
        return self._places[tenant, key]

    def root_of(self, namespaces: Sequence[Namespace], key: bytes, most: int = MAX_WALK) -> bytes | None:
        """The first block of a chain, by the indexes of these namespaces alone and not by what was said of windows.

        None where none of them has the block, where they differ, where part of the chain is being unlinked, or where
        the walks take more than `most` steps in all.
        """
        index, left, roots = self._index, most, set[bytes]()
        for namespace in namespaces:
            table = namespace.table
            entry, root = NO_ENTRY if table.windowed else table.get(key), b""
            if entry == NO_ENTRY:
                continue
            while entry not in (NO_ENTRY, table.root) and left:
                root, entry = index.key[entry], index.parent[entry]
                left -= 1
            if entry != table.root:  # a block that was dropped hangs below nothing, and is no root
                return None
            roots.add(root)
        return roots.pop() if len(roots) == 1 else None

    def _put(self, tenant: str, key: bytes, place: ChainPlace) -> None:
        if len(self._places) >= MAX_PLACES:
            self._places.popitem(last=False)
        self._places[tenant, key] = place
