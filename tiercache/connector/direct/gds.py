"""The engine's side of GPUDirect: loads from the disks straight into a pool's blocks, and stores the other way.

    load    extents ─► reads ─► lane sums of what came ─► the leading blocks that are right
    store   places ─► writes ─► lane sums of what was written ─► checksums of the leading blocks that went

A block belongs to the load or store until the last move that was begun has ended, whatever its result. A failure only
makes the run shorter: the rest goes through DRAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercache.connector.blocks import Blocks
from tiercache.connector.direct.backend import PAGE_BYTES, RAW, Backend, DirectFailed
from tiercache.connector.direct.transfers import MOVE_THREADS, DirectMoves
from tiercache.copies.pool import COPY_GIVE_UP_S, Addresses, Pool
from tiercache.protocol.checksums import CHECKSUM_LANES, block_seed, finish_lanes
from tiercache.protocol.messages import KEY_BYTES, Extent


class DirectResult(NamedTuple):
    """How many leading blocks are verified, and whether the block after them came with wrong bytes."""

    good: int
    bad: bool = False


class DirectLoader(DirectMoves):
    """Reads extents into the blocks of one pool and verifies them. Arguments as for `DirectMoves`."""

    def __init__(
        self, pool: Pool, backend: Backend, *, threads: int = MOVE_THREADS, give_up_s: float = COPY_GIVE_UP_S
    ) -> None:
        super().__init__(pool, backend, False, threads=threads, give_up_s=give_up_s)
        self._blocks = 0
        self._bad_blocks = 0

    @property
    def counters(self) -> dict[str, int]:
        """Blocks and bytes loaded, loads that failed, blocks with wrong bytes."""
        return {
            "direct_blocks": self._blocks,
            "direct_bytes": self._blocks * self.pool.block_bytes,
            "direct_failures": self.failures,
            "direct_bad_blocks": self._bad_blocks,
        }

    def load(
        self,
        generation: int,
        directories: Sequence[str],
        extents: Sequence[Extent],
        seeds: Sequence[int],
        blocks: Blocks,
    ) -> DirectResult:
        """Read `extents` into `blocks` and compare their checksums, with the `block_seed` of each.

        When it returns no read is in progress. Blocks; begins no read after the limit. Raises CopyLost for a read that
        does not end, and nothing else.
        """
        addresses = self._addresses(blocks.ids)
        usable = 0
        while usable < len(extents) and self._is_usable(extents[usable], len(directories)):
            usable += 1
        if not usable or not self._wait_ready(blocks.after, blocks.limit):
            return DirectResult(0)
        with self._lock:
            if self.off:
                return DirectResult(0)
            try:
                moves = self._moves(generation, directories, extents[:usable], addresses[:usable])
                came, problem = self._perform(moves, blocks.limit)
                result = self._verify(extents[:came], seeds, addresses[:came])
                problem = "wrong bytes" if result.bad else problem
            except DirectFailed as error:
                result, problem = DirectResult(0), str(error)
            self._blocks += result.good
            self._bad_blocks += result.bad
            self.note(problem)
        return result

    def _is_usable(self, extent: Extent, directories: int) -> bool:
        """True if an extent is as the daemon promises, so that a GPU can verify it."""
        as_it_is = extent.codec == RAW and extent.stored_length == extent.length
        return as_it_is and extent.kind == CHECKSUM_LANES and is_place(extent, directories, self.pool.block_bytes)

    def _verify(self, extents: Sequence[Extent], seeds: Sequence[int], addresses: Addresses) -> DirectResult:
        if not extents:
            return DirectResult(0)
        sums = self.backend.lane_sums(addresses, self.pool.block_bytes)
        for place, (total, seed, extent) in enumerate(zip(sums, seeds, extents, strict=False)):
            if finish_lanes(total, seed) != extent.checksum:
                return DirectResult(place, True)
        return DirectResult(len(extents))


class DirectStorer(DirectMoves):
    """Writes the blocks of one pool to places that the daemon has granted. Arguments as for `DirectMoves`."""

    def __init__(
        self, pool: Pool, backend: Backend, *, threads: int = MOVE_THREADS, give_up_s: float = COPY_GIVE_UP_S
    ) -> None:
        super().__init__(pool, backend, True, threads=threads, give_up_s=give_up_s)
        self._blocks = 0

    @property
    def counters(self) -> dict[str, int]:
        """Blocks and bytes written, stores that failed."""
        return {
            "direct_stored_blocks": self._blocks,
            "direct_stored_bytes": self._blocks * self.pool.block_bytes,
            "direct_store_failures": self.failures,
        }

    def store(
        self,
        generation: int,
        directory: str,
        places: Sequence[Extent],
        seeds: Sequence[int],
        blocks: Blocks,
    ) -> list[int]:
        """Write `blocks` to `places`; returns checksums, seeded by `block_seed`, of the leading ones written.

        When it returns no write is in progress. Blocks; begins no write after the limit. Raises CopyLost for a write
        that does not end, and nothing else.
        """
        addresses = self._addresses(blocks.ids)
        if not all(is_place(place, 1, self.pool.block_bytes) for place in places):
            return []
        if not self._wait_ready(blocks.after, blocks.limit):
            return []
        with self._lock:
            if self.off:
                return []
            try:
                moves = self._moves(generation, [directory], places, addresses)
                went, problem = self._perform(moves, blocks.limit)
                sums = self.backend.lane_sums(addresses[:went], self.pool.block_bytes) if went else []
            except DirectFailed as error:
                sums, problem = [], str(error)
            self._blocks += len(sums)
            self.note(problem)
        return [finish_lanes(total, seed) for total, seed in zip(sums, seeds, strict=False)]


def is_place(extent: Extent, directories: int, length: int) -> bool:
    """True if an extent is one block at a place that direct I/O can reach: this check alone guards where bytes go."""
    return extent.length == length and extent.directory < directories and extent.offset % PAGE_BYTES == 0


def block_seeds(keys: bytes, fingerprint: str, block_bytes: int) -> list[int]:
    """The `block_seed` of each block with these packed keys, as direct loads and stores have them on NVMe."""
    each = range(0, len(keys), KEY_BYTES)
    return [block_seed(keys[at : at + KEY_BYTES], fingerprint, block_bytes, RAW, CHECKSUM_LANES) for at in each]
