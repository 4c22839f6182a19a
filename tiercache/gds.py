"""Loads from the disks straight into a pool's blocks: the engine's side of GPUDirect.

    extents ─► runs (neighbours on disk and in the pool) ─► reads, several in flight ─► lane sums ─► good

A block belongs to the load until the last read that was begun has ended, whatever becomes of the load.
Anything that goes wrong only makes the run of good blocks shorter: what is left comes up through DRAM.
After a few failures in a row, or a read that hangs, this way is not used again in this process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiercache.checksum import CHECKSUM_LANES, finish_lanes
from tiercache.gds_backend import PAGE_BYTES, RAW, Backend, ReadFailed
from tiercache.messages import Extent
from tiercache.transfer import COPY_GIVE_UP_S, Addresses, CopyLost, Limit, Pool

READ_THREADS = 8
READ_BYTES = 8 << 20
"""Most bytes of one read: neighbours are read together up to here."""
MAX_OPEN_FILES = 256
MAX_FAILURES = 3
"""Loads in a row that failed, after which this way is not used any more."""
_POLL_S = 0.0005

logger = logging.getLogger("tiercache.gds")


class DirectResult(NamedTuple):
    """How many leading blocks are verified, and whether the one behind them came with wrong bytes."""

    good: int
    bad: bool = False


class _Run(NamedTuple):
    """Blocks that are one read."""

    file: Any
    offset: int
    address: int
    length: int
    blocks: int


def direct_problem(pool: Pool) -> str:
    """Why blocks of this pool cannot be read directly; empty when they can."""
    if len(pool.segments) != 1:
        return f"a block of this pool is {len(pool.segments)} pieces: direct reads need one"
    if pool.block_bytes % PAGE_BYTES:
        return f"a block has {pool.block_bytes} bytes: direct reads need a multiple of {PAGE_BYTES}"
    return "" if pool.writable else "this pool is read-only"


class DirectLoader:
    """Reads extents into the blocks of one pool and verifies them. One load at a time; thread-safe.

    Args:
        pool: one without a `direct_problem`.
        backend: what reads, into memory of the pool's device.
        threads: reads in flight.
        give_up_s: a read that takes longer hangs.

    Attributes:
        off: why it is not used any more; empty while it is.
        counters: blocks and bytes loaded, loads that failed, blocks with wrong bytes.
    """

    def __init__(
        self, pool: Pool, backend: Backend, *, threads: int = READ_THREADS, give_up_s: float = COPY_GIVE_UP_S
    ) -> None:
        assert not direct_problem(pool)
        self.pool = pool
        self.backend = backend
        self.off = ""
        self.counters = dict.fromkeys(("direct_blocks", "direct_bytes", "direct_failures", "direct_bad_blocks"), 0)
        self._give_up_s = give_up_s
        self._threads = threads
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, str, int], Any] = OrderedDict()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._started = False
        self._failures = 0

    def load(
        self, generation: int, directories: Sequence[str], extents: Sequence[Extent], seeds: Sequence[int],
        block_ids: Addresses, limit: Limit, after: Any = None,
    ) -> DirectResult:  # fmt: skip
        """Read `extents` into `block_ids` and compare their checksums, with the `block_seed` of each.

        When it returns no read is under way. Blocks; begins no read after `limit`. Raises CopyLost
        for a read that does not end, and nothing else.
        """
        base, stride, length = self.pool.segments[0]
        addresses = base + block_ids * stride
        usable = 0
        while usable < len(extents) and self._is_usable(extents[usable], len(directories), length):
            usable += 1
        with self._lock:
            if self.off or not usable or not self._wait_ready(after, limit):
                return DirectResult(0)
            try:
                runs = self._runs(generation, directories, extents[:usable], addresses[:usable])
                came, problem = self._read(runs, limit)
                result = self._verify(extents[:came], seeds, addresses[:came])
                problem = "wrong bytes" if result.bad else problem
            except ReadFailed as error:
                result, problem = DirectResult(0), str(error)
            self._count(result, problem)
        return result

    @staticmethod
    def _is_usable(extent: Extent, directories: int, length: int) -> bool:
        """Whether an extent is as the daemon promises: nothing else may decide where bytes go."""
        as_it_is = extent.codec == RAW and extent.length == extent.stored_length == length
        return (
            as_it_is and extent.kind == CHECKSUM_LANES
            and extent.directory < directories and extent.offset % PAGE_BYTES == 0
        )  # fmt: skip

    def _wait_ready(self, after: Any, limit: Limit) -> bool:
        """Wait for what the engine has queued on the blocks: a read knows nothing of streams."""
        while not self.backend.is_ready(after):
            if limit.reached():
                return False
            time.sleep(_POLL_S)
        return not limit.reached()

    # --- reading ---------------------------------------------------------------------------------

    def _runs(
        self, generation: int, directories: Sequence[str], extents: Sequence[Extent], addresses: Addresses
    ) -> list[_Run]:
        runs: list[_Run] = []
        for extent, address in zip(extents, addresses.tolist(), strict=True):
            file = self._file(generation, directories[extent.directory], extent.segment)
            last = runs[-1] if runs else None
            if (
                last is not None and last.file is file and last.length + extent.length <= READ_BYTES
                and last.offset + last.length == extent.offset and last.address + last.length == address
            ):  # fmt: skip
                runs[-1] = last._replace(length=last.length + extent.length, blocks=last.blocks + 1)
            else:
                runs.append(_Run(file, extent.offset, address, extent.length, 1))
        self._close_files(max(MAX_OPEN_FILES, len({run.file for run in runs})))  # this load's are the newest
        return runs

    def _file(self, generation: int, directory: str, segment: int) -> Any:
        """A segment's open file. Files of another life of the daemon may have been replaced."""
        name = generation, directory, segment
        if self._files and next(iter(self._files))[0] != generation:
            self._close_files(0)
        if name not in self._files:
            self._files[name] = self.backend.open(f"{directory}/segments/{segment:08d}.seg")
        self._files.move_to_end(name)
        return self._files[name]

    def _close_files(self, keep: int) -> None:
        while len(self._files) > keep:
            self.backend.close(self._files.popitem(last=False)[1])

    def _read(self, runs: list[_Run], limit: Limit) -> tuple[int, str]:
        """Read runs until the limit or a failure: the leading blocks that have come, and what failed."""
        if not self._started:
            self._started = True
            for number in range(self._threads):
                name = f"tiercache-direct-{number}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        batch = _Batch(runs, self.backend.read, limit)
        for _ in range(min(self._threads, len(runs))):
            self._batches.put(batch)
        if not batch.wait(self._give_up_s):
            self.off = f"a read by {self.backend.name} did not end within {self._give_up_s:g} s"
            _lost.append(self)
            logger.error("direct reads are off: %s", self.off)
            raise CopyLost(self.off)
        return sum(run.blocks for run in runs[: batch.leading()]), batch.problem

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.work()

    # --- judging ---------------------------------------------------------------------------------

    def _verify(self, extents: Sequence[Extent], seeds: Sequence[int], addresses: Addresses) -> DirectResult:
        if not extents:
            return DirectResult(0)
        sums = self.backend.lane_sums(addresses, extents[0].length)
        for place, (total, seed, extent) in enumerate(zip(sums, seeds, extents, strict=False)):
            if finish_lanes(total, seed) != extent.checksum:
                return DirectResult(place, True)
        return DirectResult(len(extents))

    def _count(self, result: DirectResult, problem: str) -> None:
        self.counters["direct_blocks"] += result.good
        self.counters["direct_bytes"] += result.good * self.pool.block_bytes
        self.counters["direct_bad_blocks"] += result.bad
        if not problem:
            self._failures = 0
            return
        self.counters["direct_failures"] += 1
        self._failures += 1
        if self._failures == 1:
            logger.warning("a direct read failed, the daemon reads instead: %s", problem)
        if self._failures >= MAX_FAILURES:
            self.off = f"{self._failures} loads in a row failed: {problem}"
            logger.warning("direct reads are off: %s", self.off)

    def close(self) -> None:
        """Close the files and end the threads; no load is under way, but for one that is lost."""
        if self in _lost:
            return
        with self._lock:
            self.off = self.off or "closed"
            self._close_files(0)
            if self._started:
                for _ in range(self._threads):
                    self._batches.put(None)


_lost: list[DirectLoader] = []
"""Loaders with a read that may still write: their pools and files are not given back."""


class _Batch:
    """The reads of one load, shared out to the threads in order."""

    def __init__(self, runs: list[_Run], read: Callable[[Any, int, int, int], int], limit: Limit) -> None:
        self.problem = ""
        self._runs = runs
        self._read = read
        self._limit = limit
        self._changed = threading.Condition()
        self._next = 0
        self._complete = [False] * len(runs)
        self._since_s: dict[int, float] = {}  # reads under way, by run

    def work(self) -> None:
        """Read runs until none is left. In a thread of the loader."""
        while (number := self._take()) is not None:
            run = self._runs[number]
            problem = ""
            try:
                count = self._read(run.file, run.offset, run.address, run.length)
                if count != run.length:
                    problem = f"{count} bytes came of {run.length}"
            except ReadFailed as error:
                problem = str(error)
            except Exception as error:
                logger.exception("a direct read failed in a way that nobody foresaw")
                problem = repr(error)
            with self._changed:
                del self._since_s[number]
                self._complete[number] = not problem
                self.problem = self.problem or problem
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._next == len(self._runs) or self.problem or self._limit.reached():
                return None
            number, self._next = self._next, self._next + 1
            self._since_s[number] = time.monotonic()
            return number

    def wait(self, give_up_s: float) -> bool:
        """Wait until no read is under way and none will begin; False when one hangs."""
        with self._changed:
            while self._since_s or not self._is_over():
                oldest_s = min(self._since_s.values(), default=time.monotonic())
                if time.monotonic() - oldest_s > give_up_s:
                    self.problem = self.problem or "a read hangs"  # the others take no further run
                    return False
                self._changed.wait(min(1.0, give_up_s / 4))
        return True

    def _is_over(self) -> bool:
        """Whether no run will be taken any more; decided once, so that none is taken afterwards."""
        if self._next < len(self._runs) and not self.problem and not self._limit.reached():
            return False
        self._next = len(self._runs)
        return True

    def leading(self) -> int:
        """Runs that are complete, from the first one on."""
        return self._complete.index(False) if False in self._complete else len(self._complete)
