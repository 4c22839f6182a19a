"""What an operator may ask about single blocks and pins: looks that change nothing, not even recency."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.cache import Cache
from tiercache.daemon.index import Index, Table
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.space import Namespace
from tiercache.messages import MAX_INSPECTED, MAX_KEYS, MAX_LISTED_PINS, BlockView, PinView


def places_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> list[BlockView]:
    """Every place of the block, those in DRAM first; at most MAX_INSPECTED."""
    here = [view for namespace in namespaces if (view := _in_dram(cache, namespace, key)) is not None]
    below = [view for namespace in namespaces for view in cache.below.places(namespace, key)]
    return (here + below)[:MAX_INSPECTED]


def _in_dram(cache: Cache, namespace: Namespace, key: bytes) -> BlockView | None:
    index = cache.space.index
    entry = namespace.table.get(key)
    if entry == NO_ENTRY:
        return None
    idle_s = cache.ages.age_s(index.columns.stamp[entry], cache.clock_s())
    length = namespace.spec.block_bytes
    return BlockView(
        namespace.number, "dram", "", length, index.children[entry], index.pins[entry], idle_s=round(idle_s, 3)
    )


def chain_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> list[bytes]:
    """The keys from the first block to this one, as one of the tiers has them; empty if none knows the chain.

    A step for each block: 5 ms for the longest.
    """
    for namespace in namespaces:
        found = path_to(cache.space.index, namespace.table, key) or cache.below.chain(namespace, key)
        if found:
            return found
    return []


def path_to(index: Index, table: Table | None, key: bytes) -> list[bytes]:
    """Keys from the root of a table down to a block of it; empty where it is not, or has no chain."""
    entry = NO_ENTRY if table is None or table.windowed else table.get(key)
    path: list[bytes] = []
    while entry != NO_ENTRY and table is not None and entry != table.root and len(path) < MAX_KEYS:
        path.append(index.key[entry])
        entry = index.parent[entry]
    # One that ends elsewhere than at the root is being unlinked, or is longer than a request may name.
    whole = table is not None and entry == table.root
    return path[::-1] if whole else []


def pins_of(cache: Cache) -> list[PinView]:
    """The pins that end first, at most MAX_LISTED_PINS."""
    now_s = cache.clock_s()
    leases = sorted(cache.reads.pins.values(), key=lambda lease: lease.deadline_s)[:MAX_LISTED_PINS]
    views = []
    for lease in leases:
        assert lease.pin_name is not None, "a pin has the name that it is ended by"
        numbers, key = lease.pin_name
        frame_bytes = sum(namespace.spec.frame_bytes for namespace in lease.namespaces)
        left_ms = max(0, int((lease.deadline_s - now_s) * 1000))
        views.append(PinView(list(numbers), key, lease.blocks, lease.blocks * frame_bytes, left_ms))
    return views
