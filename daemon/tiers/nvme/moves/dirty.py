"""Dirty blocks: those in DRAM and in no directory, which are written before the daemon ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.shelf import Shelf


def dirty(index: Index, namespaces: Sequence[Namespace], shelves: Sequence[Shelf]) -> Iterator[tuple[Namespace, bytes]]:
    """Dirty blocks: chains, parents before children, then windows, which go where those are."""
    for namespace in sorted(namespaces, key=lambda namespace: namespace.table.windowed):
        level = [] if namespace.spec.dram_only else [namespace.table.root]
        while level:
            below = []
            for parent in level:
                child = index.first_child[parent]
                while child != NO_ENTRY:
                    below.append(child)
                    child = index.next_sibling[child]
            for entry in below:
                key = index.key[entry]
                if not any(shelf.has(namespace, key) for shelf in shelves):
                    yield namespace, key
            level = below
