"""Look-ups of single blocks on NVMe for operators."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.walks import path_to
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.forms.codecs import SEALED, codec_name
from tiercache.daemon.tiers.nvme.shelf import Shelf
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3
from tiercache.protocol.messages import BlockView

_CHECKSUMS = {CHECKSUM_XXH3: "xxh3", CHECKSUM_LANES: "lanes"}


def places(shelves: Sequence[Shelf], namespace: Namespace, key: bytes) -> list[BlockView]:
    """Where the block is; more than once only while a directory that was away holds an older copy."""
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
