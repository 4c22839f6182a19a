"""Who runs a directory: the daemon itself, in threads, or a worker process. Chosen for all directories together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.tiers.nvme.disk.carriers import why_threads
from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue
from tiercache.daemon.tiers.nvme.shelf.parts import OpenDirectory, SavedNames
from tiercache.daemon.tiers.nvme.worker.opening import Plan, open_directory
from tiercache.errors import TierCacheError

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles

T = TypeVar("T")


class Runner(Protocol):
    """Opens directories, and runs them from then on."""

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        """A call that opens a directory, for a thread: it blocks. Made on the event loop, for one opening.

        It raises ConfigError and DirectoryUnavailable, as `open_directory`.
        """

    async def blocking(self, name: str, call: Callable[[], T]) -> T:
        """The result of a call that may block forever, which holds up nothing else; `name` is for people."""


class Threads:
    """Calls that may block run on a thread each, so that a hung disk delays nothing else."""

    async def blocking(self, name: str, call: Callable[[], T]) -> T:
        """See `Runner`; the thread does not keep the process from ending."""
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(call())
            except (TierCacheError, OSError) as error:
                outcome.set_exception(error)
            finally:
                if not outcome.done():  # a bug of ours: the thread ends with its traceback
                    outcome.set_exception(RuntimeError(f"{name} went wrong"))

        threading.Thread(target=run, name=name, daemon=True).start()
        return await asyncio.wrap_future(outcome)


class InDaemon(Threads):
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

        return OpenDirectory(directory, catalog, state, SavedNames.read(state), queue)


class InWorkers(Threads):
    """A process for each directory."""

    def __init__(self, arena: ArenaFiles, why_not_aio: str) -> None:
        self._arena = arena
        self._why_not_aio = why_not_aio

    def opener(self, plan: Plan) -> Callable[[Home | None], OpenDirectory]:
        """See `Runner`."""
        # Imported here: most daemons have one disk and no such process.
        from tiercache.daemon.tiers.nvme.worker.directory_worker import DirectoryWorker

        return DirectoryWorker(plan, self._why_not_aio, self._arena, asyncio.get_running_loop()).open


def runner_for(config: DaemonConfig, arena: ArenaFiles | None) -> Runner:
    """The one that the settings ask for; `arena` is there if directories have processes of their own."""
    why_not_aio = why_threads(config.nvme_io, config.nvme_codec, beside_loop=arena is None)
    return InDaemon(lambda path: DiskIO(), why_not_aio) if arena is None else InWorkers(arena, why_not_aio)
