"""What operators see of NVMe: single blocks, and figures for `stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.walks import path_to
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.source import FetchTally
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.forms.codecs import SEALED, codec_name
from tiercache.daemon.tiers.nvme.direct.extents import HeldExtents
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.moves.placement import HeadCopies
from tiercache.daemon.tiers.nvme.moves.writebehind import WriteBehind
from tiercache.daemon.tiers.nvme.opening.keeper import Keeper
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import BlockView

LEAST_AMPLIFIED_BYTES = 64 << 20
"""Bytes of blocks that must have been written before write amplification is reported."""
_CHECKSUMS = {CHECKSUM_XXH3: "xxh3", CHECKSUM_LANES: "lanes"}


def places(shelves: Sequence[Shelf], namespace: Namespace, key: bytes) -> list[BlockView]:
    """Where the block is: more than once if it is in the head of chains in several directories."""
    found = []
    for shelf in shelves:
        stored = shelf.find(namespace, key)
        if stored is not None:
            sealed = "+aes-256-gcm" if stored.codec & SEALED else ""
            index, kind = shelf.index, _CHECKSUMS.get(stored.kind, str(stored.kind))
            found.append(
                BlockView(
                    namespace.number,
                    "nvme",
                    str(shelf.directory.path),
                    stored.stored_length,
                    index.children[stored.entry],
                    index.pins[stored.entry],
                    codec_name(stored.codec) + sealed,
                    kind,
                )
            )
    return found


def chain(shelves: Sequence[Shelf], namespace: Namespace, key: bytes) -> Steps[list[bytes]]:
    """The keys from the first block to this one; empty when it is in no directory."""
    for shelf in list(shelves):
        path = yield from path_to(shelf.index, shelf.index.tables.get(namespace.number), key)
        if path:
            return path
    return []


def blocks_of(shelves: Sequence[Shelf], number: int) -> int:
    """Blocks of a namespace, over all directories."""
    tables = (shelf.index.tables.get(number) for shelf in shelves)
    return sum(table.blocks for table in tables if table is not None)


def write_figures(
    writes: WriteBehind, copies: HeadCopies, budget: WriteBudget, keepers: Sequence[Keeper]
) -> dict[str, Any]:
    """What `stats` shows of blocks written to the disks."""
    return {
        "written_blocks": writes.written_blocks,
        "written_bytes": writes.written_bytes,
        "codec": writes.codec,
        "saved_by_codec_bytes": writes.saved_bytes,
        "write_amplification": _write_amplification(writes, keepers),
        "head_copied_blocks": copies.blocks,
        "head_copied_bytes": copies.bytes,
        "write_failed_blocks": writes.failed_blocks,
        "skipped_by_budget": writes.skipped_by_budget,
        "skipped_by_worth": writes.skipped_by_worth,
        "skipped_by_quota": writes.skipped_by_quota,
        "skipped_without_parent": writes.skipped_without_parent,
        "skipped_queue_full": writes.skipped_queue_full,
        "skipped_too_large": writes.skipped_too_large,
        "write_queue_blocks": writes.queued,
        "write_in_flight_bytes": writes.coming_bytes,
        "write_budget_bytes_per_day": budget.bytes_per_day,
        "write_budget_left": budget.fullness,
    }


def _write_amplification(writes: WriteBehind, keepers: Sequence[Keeper]) -> float | None:
    """Bytes written to the disks, padding, lost writes and databases included, per byte kept there.

    None while too little was written: the database of an idle daemon over nothing gives no ratio.
    """
    if writes.written_bytes < LEAST_AMPLIFIED_BYTES:
        return None
    written = [(one["written_bytes"], one["database_written_bytes"]) for one in map(Keeper.stats, keepers)]
    return round(sum(map(sum, written)) / writes.written_bytes, 4)


def read_figures(promoted: FetchTally, promotion: Promotion, extents: HeldExtents) -> dict[str, Any]:
    """What `stats` shows of blocks read from the disks, by the daemon and by clients themselves."""
    return {
        "promoted_blocks": promoted.blocks,
        "promoted_bytes": promoted.stored_bytes,
        "promotion_in_flight_bytes": promotion.in_flight_bytes(promoted),
        "direct_blocks": extents.direct_blocks,
        "direct_bytes": extents.direct_bytes,
        "direct_leases": extents.held_leases,
        "direct_reported_blocks": extents.reported_blocks,
        "bad_blocks": promoted.bad_blocks + extents.bad_blocks,
        "failed_reads": promoted.failed,
    }
