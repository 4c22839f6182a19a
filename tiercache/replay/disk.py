"""A simulated disk that keeps no bytes: the daemon's NVMe tier on it decides as on a real one, and waits for nothing.

It replaces a directory, its catalog and its queue, the three things through which a `Shelf` touches a disk. Submitted
operations are done at the next `deliver`, in order, since the daemon's code relies on not being called back from inside
`submit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tiercache.daemon.tiers.nvme.catalog.rows import RowFields
from tiercache.daemon.tiers.nvme.disk.block_io import AnyOp, DiskOutcome, TaskOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.disk.superblock import Superblock

Done = Callable[[bool], None]


class PaperDirectory:
    """Segments as bare numbers: the part of `nvme.directory.Directory` that a shelf uses."""

    cipher = None
    direct = True
    direct_reason = ""

    def __init__(self, max_segments: int, segment_bytes: int) -> None:
        self.path = Path("/replay")
        self.segment_bytes = segment_bytes
        self.max_segments = max_segments
        self.segments: list[int] = []
        self.superblock = Superblock(bytes(16), segment_bytes, 0)

    @property
    def segment_count(self) -> int:
        """Number of segments."""
        return len(self.segments)

    def create_segment(self, segment_id: int) -> None:
        """Add one segment."""
        self.segments.append(segment_id)


class PaperQueue:
    """Completes every operation at the next `deliver`."""

    def __init__(self) -> None:
        self.written_blocks = 0
        self._waiting: list[AnyOp] = []

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        """Take one operation."""
        self._waiting.append(op)
        return True

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        """Take several operations."""
        self._waiting.extend(ops)
        return len(ops)

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        """Nothing to do: no operation waits long enough to be cancelled."""
        return 0

    def oldest_age_s(self) -> float:
        """It never hangs."""
        return 0.0

    def deliver(self) -> bool:
        """Complete what was submitted so far; False if there was nothing."""
        waiting, self._waiting = self._waiting, []
        for op in waiting:
            if isinstance(op, WriteOp):
                op.stored_lengths = [op.length] * op.count
                self.written_blocks += op.count
            elif isinstance(op, TaskOp):
                op.call()
            op.end(0, op.count, DiskOutcome.OK)
        for op in waiting:
            op.done(op)
        return bool(waiting)

    def stats(self) -> dict[str, Any]:
        """No latencies to report."""
        return {}


class NoRows:
    """See `LoadingRows`."""

    damaged = 0
    error = ""
    finished = True

    def next_batch(self) -> None:
        """None are there."""

    def cancel(self) -> None:
        """Nothing is being read."""


class PaperCatalog:
    """An `nvme.catalog.Catalog` without rows. Deletions end at the next `deliver`: until then a slot is leaving."""

    full = False
    error = ""
    written_bytes = 0

    def __init__(self) -> None:
        self._deleted: list[Done] = []

    @property
    def pending(self) -> int:
        """Deletions that are still waiting."""
        return len(self._deleted)

    def deliver(self) -> bool:
        """Delete what was requested so far; False if there was nothing."""
        deleted, self._deleted = self._deleted, []
        for done in deleted:
            done(True)
        return bool(deleted)

    def insert(self, places: Sequence[int], rows: Sequence[RowFields], done: Done | None = None) -> None:
        """Add the rows of a run that was written."""
        if done is not None:
            done(True)

    def delete(self, places: Sequence[int], done: Done | None = None) -> None:
        """Delete the rows of blocks that have left."""
        if done is not None:
            self._deleted.append(done)

    def add_namespace(self, number: int, fingerprint: str, spec: bytes, done: Done | None = None) -> None:
        """Record a namespace."""

    def raise_epoch(self, namespace: int, epoch: int, done: Done | None = None) -> None:
        """Flush a namespace."""
        if done is not None:
            done(True)

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """Record how a segment is divided."""

    def add_tombstone(self, namespace: int, key: bytes, epoch: int, done: Done | None = None) -> None:
        """Flush a block and all that follow it."""
        if done is not None:
            done(True)

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        """End the flush."""

    def forget_namespaces(self, keep: Collection[int]) -> None:
        """Nothing to load: no rows are kept."""

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> NoRows:
        """No rows are kept."""
        return NoRows()

    def age_s(self) -> float:
        """It never hangs."""
        return 0.0

    def bytes_on_disk(self) -> int:
        """Nothing to close: there is no database."""
        return 0
