"""A tier whose directories have worker processes, and what can happen to those."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tier_rig import TierRig

from tiercache.daemon.tiers.nvme.shelf import Shelf
from tiercache.daemon.tiers.nvme.worker.remote_catalog import RemoteCatalog
from tiercache.daemon.tiers.nvme.worker.remote_queue import RemoteQueue


class WorkerRig(TierRig):
    """`TierRig`, with a process for each directory."""

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, nvme_workers="on", **settings)

    def pid(self, number: int = 0) -> int:
        """Of the process of a directory; 0 while there is none."""
        pid = self.shelves[number].directory.worker_pid  # type: ignore[attr-defined]
        assert isinstance(pid, int)
        return pid

    def queue(self, number: int = 0) -> RemoteQueue:
        its = self.shelves[number].queue
        assert isinstance(its, RemoteQueue)
        return its

    def catalog(self, number: int = 0) -> RemoteCatalog:
        its = self.shelves[number].catalog
        assert isinstance(its, RemoteCatalog)
        return its

    def signal(self, what: signal.Signals, number: int = 0) -> int:
        """Send a signal to the process; returns its pid."""
        pid = self.pid(number)
        os.kill(pid, what)
        return pid

    async def replaced(self, pid: int, number: int = 0) -> None:
        """Another process serves the directory."""
        await self.until(lambda: self.pid(number) not in (0, pid))

    def shelf(self) -> Shelf:
        return self.shelves[0]
