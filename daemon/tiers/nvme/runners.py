"""Who runs a directory: the daemon itself, in threads, or a worker process. Chosen for all directories together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue
from tiercache.daemon.tiers.nvme.opening import Plan, open_directory
from tiercache.daemon.tiers.nvme.parts import OpenDirectory

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles


class Runner(Protocol):
    """Opens directories, and runs them from then on."""

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        """A call that opens a directory, for a thread: it blocks. Made on the event loop, for one opening.

        It raises ConfigError and DirectoryUnavailable, as `open_directory`.
        """


class InDaemon:
    """This process: `disk_of(path)` are the system calls, and `why_not_aio` says why threads must do the I/O, if so."""

    def __init__(self, disk_of: Callable[[Path], DiskIO], why_not_aio: str) -> None:
        self._disk_of = disk_of
        self._why_not_aio = why_not_aio

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        """See `Runner`."""
        return partial(self._open, plan, asyncio.get_running_loop())

    def _open(self, plan: Plan, loop: asyncio.AbstractEventLoop, before: Home | None) -> OpenDirectory:
        post = loop.call_soon_threadsafe
        directory, catalog, state = open_directory(plan, self._disk_of(plan.path), post, before)

        def queue() -> DiskQueue:
            return DiskQueue(directory, post, again=loop.call_soon, why_not_aio=self._why_not_aio)

        return OpenDirectory(directory, catalog, state, queue)


class InWorkers:
    """A process for each directory."""

    def __init__(self, arena: ArenaFiles, why_not_aio: str) -> None:
        self._arena = arena
        self._why_not_aio = why_not_aio

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        """See `Runner`."""
        # Imported here: most daemons have one disk and no such process.
        from tiercache.daemon.tiers.nvme.worker.directory_worker import DirectoryWorker

        return DirectoryWorker(plan, self._why_not_aio, self._arena, asyncio.get_running_loop()).open
