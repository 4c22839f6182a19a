"""Read-only views for operators of single blocks and pins: they change nothing, not even recency."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.index.walks import path_to
from tiercache.daemon.tiers.dram.pins import ClientPins
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import MAX_INSPECTED, MAX_LISTED_PINS, BlockView, PinView

from .cache import Cache

_NAMESPACES_AT_ONCE = 256
_PINS_AT_ONCE = 256


def places_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> Steps[list[BlockView]]:
    """Every place of the block, those in DRAM first; at most MAX_INSPECTED."""
    here, below = list[BlockView](), list[BlockView]()
    for number, namespace in enumerate(namespaces, 1):
        view = _in_dram(cache, namespace, key)
        here += [] if view is None else [view]
        below += cache.below.places(namespace, key)
        if not number % _NAMESPACES_AT_ONCE:
            yield
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


def chain_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> Steps[list[bytes]]:
    """The keys from the first block to this one, as one of the tiers has them; empty if no tier knows the chain."""
    for namespace in namespaces:
        yield
        found = yield from path_to(cache.space.index, namespace.table, key)
        if not found:
            found = yield from cache.below.chain(namespace, key)
        if found:
            return found
    return []


def pins_of(pins: ClientPins, now_s: float) -> Steps[list[PinView]]:
    """The pins that end first, at most MAX_LISTED_PINS; without those that end meanwhile."""
    leases = nsmallest(MAX_LISTED_PINS, pins.leases.values(), attrgetter("deadline_s"))
    views = []
    for place, lease in enumerate(leases):
        if not place % _PINS_AT_ONCE:
            yield
        if lease.over:
            continue
        assert lease.pin_name is not None, "a pin has the name that it is ended by"
        numbers, key = lease.pin_name
        frame_bytes = sum(namespace.spec.frame_bytes for namespace in lease.namespaces)
        left_ms = max(0, int((lease.deadline_s - now_s) * 1000))
        views.append(PinView(list(numbers), key, lease.blocks, lease.blocks * frame_bytes, left_ms))
    return views
