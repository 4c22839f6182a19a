"""Pins of clients: prefixes that stay in DRAM until a time is up, under leases without holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiercache.daemon.ground.slices import LOOKUPS, Steps
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT

from .leases import ReadLease
from .read_leases import ReadLeases
from .space import Namespace, Space

MAX_PINS = 16_384
"""Pins of clients, of any length: looking at them all takes some milliseconds."""


class ClientPins:
    """All pins of clients. Event loop only."""

    def __init__(self, reads: ReadLeases, space: Space, pin_share: float) -> None:
        self.leases: dict[tuple[tuple[int, ...], bytes], ReadLease] = {}
        self.bytes = 0
        self.blocks: Counter[int] = Counter()
        """Blocks pinned, by namespace."""
        self.changes = 0
        """How often the set of regions kept by pins has changed."""
        self._reads = reads
        self._space = space
        self._pin_share = pin_share
        reads.on_end.append(self._ended)

    def pin(self, namespaces: Sequence[Namespace], keys: bytes, ttl_s: float) -> Steps[int]:
        """Pin the present prefix until the time is up; returns the blocks pinned, 0 when over the limit."""
        self.unpin(namespaces, keys)
        block_bytes = sum(namespace.spec.frame_bytes for namespace in namespaces)
        most = min(len(keys) // KEY_BYTES, self._pinnable(block_bytes))
        blocks, ends = yield from self._reads.runs.take(namespaces, keys, most)
        if blocks == 0:
            return 0
        self.unpin(namespaces, keys)  # another client may have pinned it between two slices
        if blocks > self._pinnable(block_bytes):
            self._reads.runs.untake(ends)
            return 0
        lease = self._reads.grant(namespaces, keys, blocks, ends, ttl_s)
        lease.pin_name = _pin_name(namespaces, keys)
        self.leases[lease.pin_name] = lease
        self.bytes += blocks * block_bytes
        self.blocks.update({namespace.number: blocks for namespace in namespaces})
        yield from self._keep_regions(lease)
        return blocks

    def _pinnable(self, block_bytes: int) -> int:
        """How many blocks of each namespace one more pin may keep."""
        room = 0 if len(self.leases) >= MAX_PINS else self.limit_bytes - self.bytes
        return max(0, int(room // block_bytes))

    @property
    def limit_bytes(self) -> int:
        """What all pins together may keep."""
        return int(self._space.allocator.arena_bytes * self._pin_share)

    def _keep_regions(self, lease: ReadLease) -> Steps[None]:
        """Protect the regions of a pin from being emptied; the lease itself pins only the last block of each chain."""
        frames = [self._space.index.frame[entry] for entry in lease.pins]
        regions = {frame >> REGION_SHIFT for frame in frames}
        for namespace in lease.namespaces:
            for first in range(0, 0 if namespace.table.windowed else lease.blocks, LOOKUPS):
                if lease.over:
                    return
                regions.update(frame >> REGION_SHIFT for frame in self._reads.frames(lease, namespace, first, LOOKUPS))
                if first + LOOKUPS < lease.blocks:
                    yield
        if not lease.over:
            lease.pin_regions = regions
            self._space.pinned_regions.update(regions)
            self.changes += 1

    def unpin(self, namespaces: Sequence[Namespace], keys: bytes) -> int:
        """Undo `pin` with the same arguments; returns the blocks that were pinned."""
        lease = self.leases.get(_pin_name(namespaces, keys))
        if lease is None:
            return 0
        self._reads.end(lease)
        return lease.blocks

    def _ended(self, lease: ReadLease) -> None:
        """A lease has ended, perhaps a pin."""
        if lease.pin_name is None:
            return
        del self.leases[lease.pin_name]
        self.changes += 1
        self._space.pinned_regions.subtract(lease.pin_regions)
        self.blocks.subtract({namespace.number: lease.blocks for namespace in lease.namespaces})
        self.bytes -= lease.blocks * sum(namespace.spec.frame_bytes for namespace in lease.namespaces)


def _pin_name(namespaces: Sequence[Namespace], keys: bytes) -> tuple[tuple[int, ...], bytes]:
    return tuple(namespace.number for namespace in namespaces), keys[-KEY_BYTES:]
