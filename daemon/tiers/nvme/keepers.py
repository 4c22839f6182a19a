"""All configured directories together: opened when the daemon starts, closed when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .keeper import Keeper
from .runners import Runner
from .shelf import Shelf

log = logging.getLogger("tiercache.daemon")

CLOSE_S = 5.0
PATIENCE_S = 30.0
"""How long nothing is written while directories have not opened yet."""


class Keepers:
    """Runs the keepers, each in a task of its own. Event loop only. `clock_s` is monotonic seconds."""

    def __init__(self, keepers: Sequence[Keeper], clock_s: Callable[[], float]) -> None:
        self._keepers = keepers
        self._clock_s = clock_s
        self._tasks: list[asyncio.Task[None]] = []
        self._writing_from_s = 0.0

    async def open(self, patience_s: float | None) -> None:
        """See `NvmeTier.open`."""
        self._writing_from_s = self._clock_s() + PATIENCE_S
        self._tasks = [asyncio.ensure_future(keeper.keep()) for keeper in self._keepers]
        for task in self._tasks:
            task.add_done_callback(_tell_bug)
        tried = [asyncio.ensure_future(keeper.tried.wait()) for keeper in self._keepers]
        await asyncio.wait(tried, timeout=patience_s)
        for waiting in tried:
            waiting.cancel()
        for keeper in self._keepers:
            keeper.strict = False
        if refusal := next((keeper.refusal for keeper in self._keepers if keeper.refusal is not None), None):
            self.stop()
            raise refusal

    def stop(self) -> None:
        """The daemon ends: nothing more is opened or watched, and writes wait for no directory."""
        self._writing_from_s = 0.0
        for task in self._tasks:
            task.cancel()

    @property
    def may_write(self) -> bool:
        """True if blocks may be written: a chain in a directory not yet open must not begin again in another one."""
        return all(keeper.tried.is_set() for keeper in self._keepers) or self._clock_s() >= self._writing_from_s

    def closed(self) -> list[tuple[Path, bool]]:
        """Directories that are not open, and whether that may last."""
        return [(keeper.path, keeper.away) for keeper in self._keepers if keeper.shelf is None]

    @property
    def leaving(self) -> list[Shelf]:
        """Shelves whose directories have gone, while the kernel still has I/O of them."""
        return [keeper.leaving for keeper in self._keepers if keeper.leaving is not None]


async def close_shelves(
    runner: Runner, shelves: Sequence[Shelf], leaving: Sequence[Shelf], settle: Callable[[], bool]
) -> None:
    """Close all at once, so that many hung disks take no longer than one. `settle()`: see `WriteBehind`."""
    for shelf in (*shelves, *leaving):
        shelf.queue.begin_stop()
    end_s = time.monotonic() + CLOSE_S
    stopped = [shelf.queue.stop(end_s) for shelf in shelves]
    for shelf in leaving:
        shelf.queue.stop(end_s)
    while settle():
        pass  # what was written in time is kept
    await asyncio.gather(*(runner.blocking("catalog end", partial(one.catalog.close, CLOSE_S)) for one in shelves))
    over = [shelf for shelf, all_done in zip(shelves, stopped, strict=True) if all_done]  # of others I/O is under way
    await asyncio.gather(*(runner.blocking("directory end", shelf.directory.close) for shelf in over))


def _tell_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a directory is no longer monitored: its keeper has crashed", exc_info=error)
