"""The two numbers of a slot: the event loop's, as of a frame, and its place in the catalog."""

from __future__ import annotations

from tiercache.daemon.tiers.nvme.catalog.rows import MAX_SLOTS, SLOT_BITS
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

SLOT_MASK = MAX_SLOTS - 1
PAGE_SHIFT = 12  # a place counts pages of 4096 bytes inside its segment


def place_of_slot(slot: int) -> int:
    """The catalog's number of a slot: segment, then page inside it."""
    return (slot >> REGION_SHIFT) << SLOT_BITS | (slot & OFFSET_MASK) >> PAGE_SHIFT


def slot_of(place: int) -> int:
    """Inverse of `place_of_slot`."""
    return (place >> SLOT_BITS) << REGION_SHIFT | (place & SLOT_MASK) << PAGE_SHIFT
