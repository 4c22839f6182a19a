"""What daemon and worker process say to each other besides blocks: on the line of files, and on that of rows.

Both ends are of one release: the daemon starts the process from its own files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState
from tiercache.daemon.tiers.nvme.disk.directory import Home

# --- files: one question at a time, and its answer ----------------------------------------------------


class Open(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Open the directory; once. `key`: of its cipher, empty without one. `daemon_pid`: for the lock."""

    path: str
    cap_bytes: int
    segment_bytes: int
    key: bytes
    may_shrink: bool
    require_mount: bool
    home: Home | None
    daemon_pid: int
    why_not_aio: str

    def __repr__(self) -> str:
        """Without the key."""
        return f"Open({self.path!r})"


class CreateSegment(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """See `Directory.create_segment`."""

    segment: int


class LookAtPath(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """See `Directory.look`."""


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The directory is open, and this is what the loop has to know of it."""

    directory_id: bytes
    created_s: int
    segment_bytes: int
    db_reserve_bytes: int
    direct: bool
    direct_reason: str
    io: str
    io_reason: str
    kept_bytes: int
    segments: list[int]
    home: Home
    state: CatalogState


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """It cannot be opened: `setting` says whether waiting cannot solve it (ConfigError)."""

    setting: bool
    text: str


class Good(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Done; `text` is what `LookAtPath` found."""

    text: str = ""


class Bad(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An OSError."""

    errno: int


# --- rows -------------------------------------------------------------------------------------------


class RowChanges(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Changes of the catalog, the first of them number `first`: method and arguments of `Catalog`, without `done`."""

    first: int
    changes: list[tuple[str, list[Any]]]


class LoadRows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Begin to send rows."""

    batch_rows: int


class MoreRows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A batch of rows has been taken: there is room for another one."""


class StopRows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Send no more rows."""


class CloseCatalog(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write what is pending and close the catalog, within `timeout_s`."""

    timeout_s: float


class Answers(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Runs of changes that were written, or refused: first number, how many, and whether they were written."""

    runs: list[tuple[int, int, bool]]


class Status(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The state of the catalog after a commit or a failed one."""

    error: str
    disk_bytes: int
    written_bytes: int


class Rows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A batch of rows, as `pack_placed` makes them."""

    packed: bytes


class RowsEnd(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All rows were sent."""

    damaged: int
    error: str


class CatalogClosed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`written`: see `Catalog.close`."""

    written: bool


FileQuestion = Open | CreateSegment | LookAtPath
FileAnswer = Opened | Refused | Good | Bad
RowOrder = RowChanges | LoadRows | MoreRows | StopRows | CloseCatalog
RowReport = Answers | Status | Rows | RowsEnd | CatalogClosed
encode = msgspec.msgpack.Encoder().encode
decode_question: Callable[[bytes], FileQuestion] = msgspec.msgpack.Decoder(FileQuestion).decode
decode_file_answer: Callable[[bytes], FileAnswer] = msgspec.msgpack.Decoder(FileAnswer).decode
decode_row_order: Callable[[bytes], RowOrder] = msgspec.msgpack.Decoder(RowOrder).decode
decode_row_report: Callable[[bytes], RowReport] = msgspec.msgpack.Decoder(RowReport).decode
