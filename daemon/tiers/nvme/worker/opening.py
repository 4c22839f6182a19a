"""Opens a cache directory: its files, its catalog, and the cap applied to what is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog, CatalogState
from tiercache.daemon.tiers.nvme.catalog.catalog_check import count_rows
from tiercache.daemon.tiers.nvme.disk.directory import SPARE_BYTES, Directory, Home
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES, DiskIO
from tiercache.daemon.tiers.nvme.disk.troubles import unavailable
from tiercache.errors import CatalogUnavailable, DirectoryUnavailable
from tiercache.ground.units import format_bytes

log = logging.getLogger("tiercache.daemon")

DB_RESERVE_SHARE = 64
"""The share of the cap reserved for the database is one over this: 2% is ample for blocks of 8 KiB and more."""
_FEW_SEGMENTS = 4
_SMALL_CAP_BYTES = 64 << 20
CLOSE_S = 5.0
_FOR_EVER_S = threading.TIMEOUT_MAX
"""This thread waits for a hung disk as long as it takes: the daemon goes on, and uses the disk once it is back."""


def fitted_segment_bytes(cap_bytes: int, wanted_bytes: int) -> int:
    """The segment size under a cap: as wanted, but so that at least four fit, or one if the cap is small."""
    usable = cap_bytes - cap_bytes // DB_RESERVE_SHARE
    most = max(usable // _FEW_SEGMENTS, min(usable, _SMALL_CAP_BYTES))
    return max(PAGE_BYTES, min(wanted_bytes, most) // PAGE_BYTES * PAGE_BYTES)


class Plan(NamedTuple):
    """How one directory is to be opened."""

    path: Path
    cap_bytes: int
    segment_bytes: int
    cipher: Cipher | None = None
    may_shrink: bool = False
    require_mount: bool = False
    daemon_pid: int = 0
    """In a process of its own for the directory: the daemon's."""


def open_directory(
    plan: Plan, disk: DiskIO, post: Callable[..., object], before: Home | None = None
) -> tuple[Directory, Catalog, CatalogState]:
    """Open a directory; `before`: where it was earlier in this life. Blocks as the disk does.

    Raises ConfigError for what waiting cannot solve, and DirectoryUnavailable for what may pass.
    """
    cap_bytes = plan.cap_bytes
    fitted = fitted_segment_bytes(cap_bytes, plan.segment_bytes)
    reserve_bytes = cap_bytes // DB_RESERVE_SHARE
    directory = Directory(
        plan.path, cap_bytes, fitted, reserve_bytes, disk, plan.require_mount, before, plan.daemon_pid
    )
    directory.cipher = plan.cipher
    directory.open()
    catalog = None
    try:
        if problem := directory.look():
            raise DirectoryUnavailable(f"nvme directory {plan.path} cannot be used: {problem}")
        catalog, state = _open_catalog(directory, post)
        _keep_to_cap(directory, catalog, state, plan.may_shrink)
        for segment in set(state.segments) - set(directory.segments):
            catalog.drop_segment(segment)  # its file is gone
        directory.note_database()
        return directory, catalog, state
    except BaseException as error:
        if catalog is not None:
            catalog.close(CLOSE_S)
        directory.close()
        if isinstance(error, CatalogUnavailable):
            raise DirectoryUnavailable(f"nvme directory {plan.path} cannot be used: {error}") from error
        if isinstance(error, OSError):
            raise unavailable(plan.path, error) from error
        raise


def _open_catalog(directory: Directory, post: Callable[..., object]) -> tuple[Catalog, CatalogState]:
    """Open the directory's catalog; on a full disk with the reserved room, or without any, so that reads go on. The
    catalog's `error` tells what is wrong then."""
    if directory.free_bytes() < SPARE_BYTES:
        directory.give_up_spare()
    catalog = Catalog(directory.path, directory.superblock.directory_id, post)
    return catalog, catalog.open(_FOR_EVER_S)


def _keep_to_cap(directory: Directory, catalog: Catalog, state: CatalogState, may_shrink: bool) -> None:
    """Apply a cap that was lowered: segments without blocks go, those with blocks if that is allowed."""
    excess = max(0, len(directory.segments) - directory.max_segments)
    chosen = sorted(directory.segments, key=lambda segment: (segment in state.segments, -segment))[:excess]
    used = [segment for segment in chosen if segment in state.segments]
    if used and not may_shrink:
        directory.kept_bytes = len(used) * directory.segment_bytes
        log.warning(
            "nvme directory %s: its part of nvme_size is %s now, and %s more are in use, with %s blocks: they are "
            "kept. To delete them: --nvme-shrink yes. To give it a size of its own: --nvme %s:SIZE",
            directory.path,
            format_bytes(directory.cap_bytes),
            format_bytes(directory.kept_bytes),
            _blocks_in(directory.path, used),
            directory.path,
        )
        chosen = chosen[: len(chosen) - len(used)]
    for segment in chosen:
        log.warning(
            "nvme directory %s: segment %d is removed, its part of nvme_size is %s now",
            directory.path,
            segment,
            format_bytes(directory.cap_bytes),
        )
        directory.remove_segment(segment)


def _blocks_in(path: Path, segments: Sequence[int]) -> str:
    """How many blocks are there, for people."""
    try:
        return f"{count_rows(path, segments):,}"
    except CatalogUnavailable:
        return "some"
