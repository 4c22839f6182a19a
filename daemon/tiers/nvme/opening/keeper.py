"""Keeps one configured directory open: gives it up when it has gone, and opens it again.

    opening ─► open ─► leaving ─► away ─► (a pause, twice as long each time) ─► opening
       └────────────────────────────┘

A directory that cannot be used affects nothing else: DRAM and the other directories go on, and it is retried until it
works. Its counters live as long as the daemon.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, TaskOp
from tiercache.daemon.tiers.nvme.disk.directory import Home
from tiercache.daemon.tiers.nvme.disk.tally import COUNTERS, LATENCIES
from tiercache.daemon.tiers.nvme.shelf.parts import OpenDirectory
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.daemon.tiers.nvme.worker.opening import Plan
from tiercache.errors import ConfigError, DirectoryUnavailable
from tiercache.ground.histograms import LatencyHistogram

from .runners import Runner

log = logging.getLogger("tiercache.daemon")

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
LOOK_S = 2.0
"""How often to check that the path is still the directory that was opened."""
QUIET_POLL_S = 0.05
CLOSE_S = 5.0
TOLD_AT_ONCE = 2000
"""Blocks of a lost directory that events report in one go."""
KNOWN_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
"""Counted from zero, so that the first one is an increase."""
_COUNTERS = (*COUNTERS, "evicted_blocks", "write_failures", "database_written_bytes")


# --- one directory -------------------------------------------------------------------------------------


class Keeper:
    """Event loop only; never blocks.

    `await opened(directory)` makes its shelf and takes it into use, `gone(shelf)` takes it out of use.
    """

    def __init__(
        self,
        plan: Plan,
        runner: Runner,
        opened: Callable[[OpenDirectory], Awaitable[Shelf]],
        gone: Callable[[Shelf], None],
    ) -> None:
        self.plan = plan
        self.path: Path = plan.path
        self.shelf: Shelf | None = None
        self.leaving: Shelf | None = None
        """A shelf whose directory has gone, while the kernel still has I/O of it."""
        self.problem = ""
        """Why it is not open; empty until the first attempt has ended."""
        self.refusal: ConfigError | None = None
        """What is wrong with the setting itself, if it was tried while `strict`."""
        self.strict = True
        """True if a wrong setting keeps the daemon from starting, instead of running without the directory."""
        self.tried = asyncio.Event()
        self.open_failures = 0
        self._runner = runner
        self._opened = opened
        self._gone = gone
        self._home: Home | None = None
        self._past: dict[str, int] = {}  # counters of shelves that have gone
        self._past_errors: dict[str, int] = {str(number): 0 for number in KNOWN_ERRORS}

    @property
    def away(self) -> bool:
        """True if it is known to be unusable now."""
        return bool(self.problem)

    async def keep(self) -> None:
        """Run until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            found = await self._try()
            if found is not None:
                pause_s = FIRST_PAUSE_S
                await self._use(found)
            self.tried.set()
            if self.refusal is not None:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _try(self) -> OpenDirectory | None:
        call = partial(self._runner.opener(self.plan), self._home)
        try:
            return await self._runner.blocking(f"open {self.path}", call)
        except (ConfigError, DirectoryUnavailable) as error:
            if self.strict and isinstance(error, ConfigError):
                self.refusal = error
            else:
                self._is_away(str(error))
        except RuntimeError:  # a bug of ours, logged by its thread
            self._is_away(f"nvme directory {self.path} could not be opened; the log says where it went wrong")
        self.open_failures += 1
        return None

    def _is_away(self, problem: str) -> None:
        if problem != self.problem:
            log.error("%s; the daemon goes on without it and tries again", problem)
        self.problem = problem

    async def _use(self, found: OpenDirectory) -> None:
        """Have it used until it has gone, then close what was open."""
        if self.problem:
            log.info("nvme directory %s can be used again", self.path)
        self._home, self.problem = found.directory.home, ""
        try:
            shelf = self.shelf = await self._opened(found)
        except Exception:  # a bug of ours: it stays locked
            self._is_away(f"nvme directory {self.path} cannot be used until the daemon restarts; the log says why")
            raise
        finally:
            self.tried.set()
        what = await self._watch(shelf)
        self._is_away(f"nvme directory {self.path} cannot be used: {what}")
        self._keep_counters(shelf)
        self.shelf, self.leaving = None, shelf
        self._gone(shelf)
        await _tell_gone(shelf)
        shelf.queue.begin_stop()
        while shelf.queue.in_flight:
            await asyncio.sleep(QUIET_POLL_S)
        await self._runner.blocking(f"close {self.path}", partial(_close, shelf))
        self.leaving = None

    async def _watch(self, shelf: Shelf) -> str:
        """Wait until it has gone; returns why."""
        while True:
            await asyncio.sleep(LOOK_S)
            said = ""

            def look() -> None:
                nonlocal said
                said = shelf.directory.look()

            done: asyncio.Future[TaskOp] = asyncio.get_running_loop().create_future()
            op = TaskOp(call=look, done=partial(_hand_over, done))
            if not shelf.queue.submit(op, DiskPriority.PREFETCH):
                continue  # its queue is full
            await done
            if op.outcome is DiskOutcome.IO_ERROR:
                return f"its files cannot be reached ({errno.errorcode.get(op.errno, op.errno)}): see dmesg"
            if op.outcome is DiskOutcome.OK and said:
                return said

    # --- figures -----------------------------------------------------------------------------------

    def _keep_counters(self, shelf: Shelf) -> None:
        figures = shelf.stats()
        self._past = {name: self._past.get(name, 0) + figures[name] for name in _COUNTERS}
        self._past_errors = self._all_errors(figures["errors"])

    def _all_errors(self, now: dict[str, int]) -> dict[str, int]:
        past = self._past_errors
        return {number: past.get(number, 0) + now.get(number, 0) for number in past.keys() | now.keys()}

    def stats(self) -> dict[str, Any]:
        """Everything known of this directory; the same names whether it is open or not."""
        figures = _figures_of_none() if self.shelf is None else self.shelf.stats()
        state = figures["state"] if self.shelf is not None else "away" if self.problem else "opening"
        return {
            "path": str(self.path),
            **figures,
            "state": state,
            "problem": self.problem,
            "open_failures": self.open_failures,
            **{name: figures[name] + self._past.get(name, 0) for name in _COUNTERS},
            "errors": self._all_errors(figures["errors"]),
        }

    def reasons(self) -> list[str]:
        """What is not well, for people."""
        if self.shelf is not None:
            return self.shelf.reasons()
        left = "" if self.leaving is None else "; operations from before are still under way"
        return [f"{self.problem}{left}" if self.problem else f"nvme directory {self.path}: it is not open yet"]


def _hand_over(done: asyncio.Future[TaskOp], op: TaskOp) -> None:
    if not done.done():
        done.set_result(op)


def _close(shelf: Shelf) -> None:
    """Nothing is in flight. Blocks, perhaps for ever: while a transaction is with the disk, nobody else may have it."""
    shelf.queue.stop(time.monotonic() + CLOSE_S)
    shelf.catalog.close(CLOSE_S)
    shelf.catalog.join()
    shelf.directory.close()


async def _tell_gone(shelf: Shelf) -> None:
    """Publish that its blocks have left, some at a time."""
    left, index = shelf.index.on_left, shelf.index
    shelf.index.on_left = None
    if left is None:
        return
    for entry in range(len(index.key)):
        if index.state[entry] == LIVE and index.key[entry]:
            left(index.table[entry], index.key[entry])
        if entry % TOLD_AT_ONCE == TOLD_AT_ONCE - 1:
            await asyncio.sleep(0)


def _figures_of_none() -> dict[str, Any]:
    """The figures of a directory that is not open: the same names as those of a `Shelf`."""
    zeros = (
        "blocks",
        "used_bytes",
        "capacity_bytes",
        "segments",
        "kept_bytes",
        "database_bytes",
        "database_queue",
        "loaded_rows",
        "orphan_rows",
        "other_key_rows",
        "lost_slots",
        "in_flight",
        "in_flight_bytes",
        "queued",
        "worker_pid",
        "worker_starts",
    )
    return {
        **dict.fromkeys((*zeros, *_COUNTERS), 0),
        "direct": False,
        "io": "",
        "io_reason": "",
        "writing": "off",
        "waiting": {priority.name.lower(): 0 for priority in DiskPriority},
        "oldest_age_s": 0.0,
        "errors": {},
        "latency": {name: LatencyHistogram().snapshot() for name in LATENCIES},
    }


# --- all directories -----------------------------------------------------------------------------------


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
    ends = (runner.blocking("catalog end", partial(shelf.catalog.close, CLOSE_S)) for shelf in shelves)
    closed = zip(shelves, stopped, await asyncio.gather(*ends), strict=True)
    # Where I/O or a transaction is still under way, the directory stays locked until this process has ended.
    over = [shelf for shelf, has_stopped, has_written in closed if has_stopped and has_written]
    await asyncio.gather(*(runner.blocking("directory end", shelf.directory.close) for shelf in over))


def _tell_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a directory is no longer monitored: its keeper has crashed", exc_info=error)
