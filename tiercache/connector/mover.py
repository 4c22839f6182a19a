"""Moves blocks between a pool and the daemon, under a lease: through the mapped arena, or as payload frames.

The mapped way is one copy. The frames way is for clients that cannot map the arena: pieces of at most 2 MiB, up to 8 of
them in flight, through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache.client.channel import Order
from tiercache.client.session import Session
from tiercache.copies.pool import Addresses, Copier, CopyLost, Limit
from tiercache.errors import DaemonUnavailable, ProtocolError
from tiercache.protocol.messages import MAX_PAYLOAD_BYTES, Done, Payload, Read, Reply, Write

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

    def fetch(
        self,
        session: Session,
        lease: int,
        namespace: int,
        first: int,
        frames: bytes,
        block_ids: Addresses,
        limit: Limit,
        after: Any = None,
    ) -> int:
        """Copy leased blocks `first..`, with these packed `frames`, into `block_ids`.

        Returns how many leading blocks are complete; all copies are over. Raises TierCacheError.
        """
        if session.arena is None:
            return self._read(session, lease, namespace, first, block_ids, limit, after)
        with _Held(session, frames, self._block_bytes) as addresses:
            return self.copier.copy_in(addresses, block_ids, limit, after)

    def put(
        self,
        session: Session,
        lease: int,
        indices: Sequence[int],
        frames: bytes,
        block_ids: Addresses,
        limit: Limit,
        after: Any = None,
    ) -> int:
        """Copy `block_ids` into the reserved blocks `indices` of a write lease, with these `frames`.

        Returns how many leading blocks are complete; all copies are over. Raises TierCacheError.
        """
        if session.arena is None:
            return self._write(session, lease, indices, block_ids, limit, after)
        with _Held(session, frames, self._block_bytes) as addresses:
            return self.copier.copy_out(block_ids, addresses, limit, after)

    # --- payload frames ---------------------------------------------------------------------------

    def _pieces(self) -> list[tuple[int, int]]:
        """Offset and length of each piece of a block."""
        whole = self._block_bytes
        return [(at, min(MAX_PAYLOAD_BYTES, whole - at)) for at in range(0, whole, MAX_PAYLOAD_BYTES)]

    def _read(
        self,
        session: Session,
        lease: int,
        namespace: int,
        first: int,
        block_ids: Addresses,
        limit: Limit,
        after: Any,
    ) -> int:
        size, pieces = self._block_bytes, self._pieces()
        done = 0
        while done < len(block_ids) and not limit.reached():
            part = block_ids[done : done + self._staged_blocks]
            staging, view, addresses = _staging(len(part), size)
            orders: list[Order] = []
            for index in range(len(part)):
                for offset, length in pieces:
                    place = {"index": first + done + index, "offset": offset, "length": length}
                    orders.append((Read, {"lease": lease, "namespace": namespace, **place}, None))

            def take(place: int, reply: Payload, data: bytes | None, view: memoryview = view) -> None:
                block, piece = divmod(place, len(pieces))
                offset, length = pieces[piece]
                if data is None or len(data) != length or reply.length != length:
                    raise ProtocolError(f"a payload of {length} bytes was due and another came")
                view[block * size + offset : block * size + offset + length] = data

            session.pipeline(orders, Payload, take)
            copied = self.copier.copy_in(addresses, part, limit, after)
            del staging
            done += copied
            if copied < len(part):
                break
        return done

    def _write(
        self,
        session: Session,
        lease: int,
        indices: Sequence[int],
        block_ids: Addresses,
        limit: Limit,
        after: Any,
    ) -> int:
        size, pieces = self._block_bytes, self._pieces()
        done = 0
        while done < len(block_ids) and not limit.reached():
            part = block_ids[done : done + self._staged_blocks]
            staging, view, addresses = _staging(len(part), size)
            copied = self.copier.copy_out(part, addresses, limit, after)

            def orders(view: memoryview = view, done: int = done, copied: int = copied) -> Iterator[Order]:
                for block in range(copied):
                    for offset, length in pieces:
                        start = block * size + offset
                        place = {"lease": lease, "index": indices[done + block], "offset": offset}
                        yield Write, place, view[start : start + length]

            session.pipeline(orders(), Done, _ignore)
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
