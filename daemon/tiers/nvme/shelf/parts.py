"""What the loop needs of a directory: its files, its catalog and its queue of blocks, whatever runs them.

Two carriers of a directory offer these: this process (`Directory`, `Catalog`, `DiskQueue`), and a process of its own
(`worker/`: `RemoteDirectory`, `RemoteCatalog`, `RemoteQueue`). The classes of the first have the full contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.nvme.catalog.changes import Done
from tiercache.daemon.tiers.nvme.catalog.database import CatalogState, SavedNamespace
from tiercache.daemon.tiers.nvme.catalog.rows import RowBatch, RowFields
from tiercache.daemon.tiers.nvme.disk.block_io import AnyOp
from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.disk.superblock import Superblock
from tiercache.ground.histograms import Histogram, LatencyHistogram
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import UNREADABLE


class DirectoryFiles(Protocol):
    """An open directory; see `Directory`."""

    path: Path
    cap_bytes: int
    segment_bytes: int
    cipher: Cipher | None
    direct: bool
    direct_reason: str
    superblock: Superblock
    kept_bytes: int
    home: Home | None
    trouble: str
    worker_pid: int
    worker_starts: int

    @property
    def segments(self) -> list[int]:
        """Ids of the open segments, ascending. O(segments), of which a large disk has thousands."""

    @property
    def segment_count(self) -> int:
        """Number of open segments."""

    @property
    def max_segments(self) -> int:
        """How many segments the cap allows."""

    def create_segment(self, segment_id: int) -> None:
        """Blocks; raises OSError. In a `TaskOp`."""

    def look(self) -> str:
        """Why the path is not this directory any more. Blocks; raises OSError. In a `TaskOp`."""

    def close(self) -> None:
        """Blocks. Nothing may be in flight."""


class LoadingRows(Protocol):
    """Rows on their way from the database to the loop; see `Loading`."""

    damaged: int
    error: str

    def next_batch(self) -> RowBatch | None:
        """The next batch, or None when none is ready now."""

    @property
    def finished(self) -> bool:
        """True if every batch has been taken and no more will come."""

    def cancel(self) -> None:
        """Stop reading."""


class CatalogRows(Protocol):
    """The durable index of a directory; see `Catalog`."""

    def insert(self, places: Sequence[int], rows: Sequence[RowFields], done: Done | None = None) -> None:
        """The slots now hold these blocks."""

    def delete(self, places: Sequence[int], done: Done | None = None) -> None:
        """The slots hold nothing."""

    def add_namespace(
        self, number: int, fingerprint: str, spec: bytes, epoch: int = 0, done: Done | None = None
    ) -> None:
        """Rows may refer to `number` from here on."""

    def raise_epoch(self, namespace: int, epoch: int, done: Done | None = None) -> None:
        """Drop rows of smaller epochs."""

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """The segment is divided into slots of this size."""

    def set_key(self, key_id: bytes, since: int, done: Done | None = None) -> None:
        """Encrypted rows from this sequence number on use that key."""

    def add_tombstone(self, namespace: int, key: bytes, epoch: int, done: Done | None = None) -> None:
        """Record a flush by key."""

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        """No row is left that the flush concerns."""

    def forget_namespaces(self, keep: Collection[int], done: Done | None = None) -> None:
        """Delete the namespaces not in `keep`."""

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> LoadingRows:
        """Start reading the rows."""

    def join(self) -> None:
        """After `close`: wait until nothing more is written. Blocks, perhaps for ever."""

    @property
    def error(self) -> str:
        """Why nothing can be written now."""

    @property
    def pending(self) -> int:
        """Changes posted and not yet written or refused."""

    @property
    def full(self) -> bool:
        """Too much is pending."""

    @property
    def written_bytes(self) -> int:
        """Bytes written to the database and its log."""

    def age_s(self) -> float:
        """How long the current transaction has been with the disk."""

    def bytes_on_disk(self) -> int:
        """Size of the database."""

    def close(self, timeout_s: float) -> bool:
        """Write pending changes and close. Blocks; not on the loop."""


class BlockQueue(Protocol):
    """Blocks on their way between frames and slots; see `DiskQueue`."""

    in_flight: int
    in_flight_bytes: int
    io: str
    io_reason: str
    errors: dict[int, int]
    latency: dict[str, LatencyHistogram]
    call_bytes: dict[str, Histogram]

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        """Accept one operation."""

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        """Accept as many as there is room for."""

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        """End what has not started."""

    def queued(self, priority: DiskPriority | None = None) -> int:
        """Operations that wait."""

    def oldest_age_s(self) -> float:
        """How long the longest-running operation has been under way."""

    def stats(self) -> Mapping[str, Any]:
        """All counts so far."""

    def begin_stop(self) -> None:
        """Accept nothing more and cancel what waits."""

    def stop(self, deadline_s: float) -> bool:
        """Stop, and wait for running operations. Blocks."""


LATEST = b""
"""The key of a tombstone that stays: its epoch is the latest of the namespace. Without it a flush while rows are
loading could choose an epoch that some of those rows already have."""


class SavedNames(NamedTuple):
    """The namespaces of a catalog and their tombstones, read by the thread that opens it: there may be thousands.

    `specs`: None where a namespace cannot be served any more. `stones`: by the catalog's number, epochs by key.
    """

    last_number: int
    specs: list[tuple[SavedNamespace, NamespaceSpec | None]]
    stones: dict[int, dict[bytes, int]]
    epochs: dict[int, int]
    """By the catalog's number: the epoch of rows written last."""

    @classmethod
    def read(cls, state: CatalogState) -> SavedNames:
        """Those of a catalog that was opened. Any thread."""
        epochs = {saved.number: saved.epoch for saved in state.namespaces}
        stones: dict[int, dict[bytes, int]] = {}
        for number, key, epoch in state.tombstones:
            epochs[number] = max(epochs.get(number, 0), epoch)
            if key != LATEST:
                stones.setdefault(number, {})[key] = epoch
        # Numbers of dropped namespaces are not given again: their rows are still there.
        last_number = max((saved.number for saved in state.namespaces), default=0)
        return cls(last_number, [(saved, _spec_of(saved)) for saved in state.namespaces], stones, epochs)


def _spec_of(saved: SavedNamespace) -> NamespaceSpec | None:
    try:
        spec = NamespaceSpec.received(msgspec.msgpack.decode(saved.spec, type=dict[str, Any]))
    except UNREADABLE:
        return None
    # If the fingerprint was made in another way, all of its blocks would fail their checksums.
    return spec if not spec.problem() and spec.fingerprint() == saved.fingerprint else None


class OpenDirectory(NamedTuple):
    """The parts of a shelf. `queue()` makes the last one, on the event loop."""

    directory: DirectoryFiles
    catalog: CatalogRows
    state: CatalogState
    names: SavedNames
    queue: Callable[[], BlockQueue]
