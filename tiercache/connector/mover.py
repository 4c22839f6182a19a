"""Moves blocks between a pool and the daemon, under a lease: through the mapped arena, or as payload frames.

The mapped way is one copy. The frames way is for clients that cannot map the arena: pieces of at most 2 MiB, up to 8 of
them in flight, through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tiercache.client.channels import Order
from tiercache.client.session import Session
from tiercache.connector.blocks import Blocks, LeasedBlocks
from tiercache.connector.write_lease import WriteLease
from tiercache.copies.pool import Addresses, Copier, CopyLost
from tiercache.errors import DaemonUnavailable, ProtocolError
from tiercache.protocol.messages import MAX_PAYLOAD_BYTES, Payload, Read, Reply, Write

STAGING_BYTES = 16 << 20


class Mover:
    """Moves blocks of one pool. Thread-safe.

    Args:
        copier: copies between the pool and addresses of this process.
        block_bytes: length of a block.
    """

    def __init__(self, copier: Copier, block_bytes: int) -> None:
        self.copier = copier
        self._block_bytes = block_bytes
        self._staged_blocks = max(1, STAGING_BYTES // block_bytes)

    def fetch(self, leased: LeasedBlocks, frames: bytes, blocks: Blocks) -> int:
        """Copy leased blocks, with these packed `frames`, into the pool's.

        Returns how many leading blocks are complete; all copies are over. Raises TierCacheError.
        """
        if leased.session.arena is None:
            return self._read(leased, blocks)
        with _Held(leased.session, frames, self._block_bytes) as addresses:
            return self.copier.copy_in(addresses, blocks.ids, blocks.limit, blocks.after)

    def put(self, lease: WriteLease, indices: Sequence[int], frames: bytes, window: Blocks) -> int:
        """Copy the blocks of `window` with these `indices` into their reserved `frames`.

        Returns how many leading blocks are complete; all copies are over. Raises TierCacheError.
        """
        ids = window.ids if len(indices) == len(window) else window.ids[indices]
        if lease.session.arena is None:
            return self._write(lease, indices, ids, window)
        with _Held(lease.session, frames, self._block_bytes) as addresses:
            return self.copier.copy_out(ids, addresses, window.limit, window.after)

    # --- payload frames ---------------------------------------------------------------------------

    def _pieces(self) -> list[tuple[int, int]]:
        """Offset and length of each piece of a block."""
        whole = self._block_bytes
        return [(at, min(MAX_PAYLOAD_BYTES, whole - at)) for at in range(0, whole, MAX_PAYLOAD_BYTES)]

    def _read(self, leased: LeasedBlocks, blocks: Blocks) -> int:
        size, pieces = self._block_bytes, self._pieces()
        done = 0
        while done < len(blocks) and not blocks.limit.reached():
            part = blocks.part(done, done + self._staged_blocks)
            staging, view, addresses = _staging(len(part), size)
            orders: list[Order] = []
            for index in range(part.first, part.first + len(part)):
                for offset, length in pieces:
                    place = {"index": index, "offset": offset, "length": length}
                    orders.append((Read, {"lease": leased.lease, "namespace": leased.namespace_id, **place}, None))

            def take(place: int, reply: Payload, data: bytes | None, view: memoryview = view) -> None:
                block, piece = divmod(place, len(pieces))
                offset, length = pieces[piece]
                if data is None or len(data) != length or reply.length != length:
                    raise ProtocolError(f"a payload of {length} bytes was due and another came")
                view[block * size + offset : block * size + offset + length] = data

            leased.session.pipeline(orders, take)
            copied = self.copier.copy_in(addresses, part.ids, part.limit, part.after)
            del staging
            done += copied
            if copied < len(part):
                break
        return done

    def _write(self, lease: WriteLease, indices: Sequence[int], ids: Addresses, window: Blocks) -> int:
        size, pieces = self._block_bytes, self._pieces()
        done = 0
        while done < len(ids) and not window.limit.reached():
            part = ids[done : done + self._staged_blocks]
            staging, view, addresses = _staging(len(part), size)
            copied = self.copier.copy_out(part, addresses, window.limit, window.after)

            def orders(view: memoryview = view, done: int = done, copied: int = copied) -> Iterator[Order]:
                for block in range(copied):
                    for offset, length in pieces:
                        start = block * size + offset
                        place = {"lease": lease.lease_id, "index": indices[done + block], "offset": offset}
                        yield Write, place, view[start : start + length]

            lease.session.pipeline(orders(), _ignore)
            del staging
            done += copied
            if copied < len(part):
                break
        return done


class _Held:
    """The addresses of frames; holds the arena for as long as a copy needs them."""

    def __init__(self, session: Session, frames: bytes, block_bytes: int) -> None:
        assert session.arena is not None
        self._arena = session.arena
        self._frames = frames
        self._block_bytes = block_bytes
        self._timeout_s = session.timeout_s

    def __enter__(self) -> Addresses:
        if not self._arena.begin_copy():
            raise DaemonUnavailable("the daemon is gone: no copy is begun")
        try:
            return self._arena.addresses(self._frames, self._block_bytes, self._timeout_s)
        except BaseException:
            self._arena.end_copy()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A lost copy may still run: the mapping stays for as long as the process lives.
        if kind is None or not issubclass(kind, CopyLost):
            self._arena.end_copy()


def _staging(blocks: int, size: int) -> tuple[npt.NDArray[np.uint8], memoryview, Addresses]:
    """A host buffer for blocks: the array, a view of it, and the address of each block."""
    array = np.empty(blocks * size, np.uint8)
    return array, array.data, array.ctypes.data + np.arange(blocks, dtype=np.int64) * size


def _ignore(place: int, reply: Reply, payload: bytes | None) -> None:
    """Ignore a reply that only confirms."""
