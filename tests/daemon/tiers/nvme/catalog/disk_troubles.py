"""Disks that fail or hang when a test says so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog


def fail(name: str, number: int, code: int = errno.EIO) -> Callable[[str, int], int | None]:
    """A disk's hook: the n-th call of that name fails."""
    left = number

    def hook(called: str, size: int) -> int | None:
        nonlocal left
        if called == name:
            left -= 1
            if left == -1:
                raise OSError(code, os.strerror(code))
        return None

    return hook


def hang(catalog: Catalog) -> threading.Event:
    """The database's disk hangs until the event is set."""
    gate, commit = threading.Event(), catalog._writer._commit

    def hanging(db: Any, batch: Any) -> str:
        assert gate.wait(30)
        return commit(db, batch)

    catalog._writer._commit = hanging  # type: ignore[method-assign]
    return gate
