"""Moves between segment files and a pool's blocks: the common part of direct loads and stores.

    extents ─► moves (neighbours on disk and in the pool are one) ─► reads or writes, several in flight

Loads and stores each have their own: one that stops working does not affect the other. After a few failures in a row,
or a move that hangs, this way is not used again in this process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiercache.connector.direct.backend import PAGE_BYTES, Backend, DirectFailed
from tiercache.copies.pool import COPY_GIVE_UP_S, Addresses, CopyLost, Limit, Pool
from tiercache.ground import forks
from tiercache.protocol.messages import Extent

MOVE_THREADS = 8
MOVE_BYTES = 8 << 20
"""Most bytes of one read or write: neighbours are moved together up to this size."""
MAX_OPEN_FILES = 256
MAX_FAILURES = 3
"""Failed loads (or stores) in a row, after which this way is not used any more."""
_POLL_S = 0.0005

logger = logging.getLogger("tiercache.gds")


def direct_problem(pool: Pool) -> str:
    """Why blocks of this pool cannot be read or written directly; empty when they can."""
    if len(pool.segments) != 1:
        return f"a block of this pool is {len(pool.segments)} pieces: direct reads and writes need one"
    if pool.block_bytes % PAGE_BYTES:
        return f"a block has {pool.block_bytes} bytes: direct reads and writes need a multiple of {PAGE_BYTES}"
    return "" if pool.writable else "this pool is read-only"


class Move(NamedTuple):
    """One read or write: of one block, or of several neighbours."""

    file: Any
    offset: int
    address: int
    length: int
    blocks: int


class DirectMoves:
    """Moves blocks of one pool in one direction. One load or store at a time; thread-safe.

    Args:
        pool: one without a `direct_problem`.
        backend: moves bytes to or from memory of the pool's device.
        writing: from the pool to the files.
        threads: moves in flight.
        give_up_s: a move that takes longer counts as hung.

    Attributes:
        off: why it is not used any more; empty while it is.
        failures: loads or stores that failed.
    """

    def __init__(
        self,
        pool: Pool,
        backend: Backend,
        writing: bool,
        *,
        threads: int = MOVE_THREADS,
        give_up_s: float = COPY_GIVE_UP_S,
    ) -> None:
        assert not direct_problem(pool)
        self.pool = pool
        self.backend = backend
        self.off = ""
        self.failures = 0
        self._call = backend.write if writing else backend.read
        self._verb = "write" if writing else "read"
        self._writing = writing
        self._give_up_s = give_up_s
        self._threads = threads
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, str, int], Any] = OrderedDict()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._started = False
        self._in_a_row = 0
        forks.watch(self, "_lock")

    def _addresses(self, block_ids: Addresses) -> Addresses:
        base, stride, _ = self.pool.segments[0]
        return base + block_ids * stride

    def _wait_ready(self, after: Any, limit: Limit) -> bool:
        """Wait for the engine's queued work on the blocks: files know nothing of streams.

        Before the lock is taken: signal handlers run meanwhile, and may close what is in use here.
        """
        while not self.off:
            if self.backend.is_ready(after):
                return not limit.reached()
            if limit.reached():
                return False
            time.sleep(_POLL_S)
        return False

    def _moves(
        self, generation: int, directories: Sequence[str], extents: Sequence[Extent], addresses: Addresses
    ) -> list[Move]:
        moves: list[Move] = []
        for extent, address in zip(extents, addresses.tolist(), strict=True):
            file = self._file(generation, directories[extent.directory], extent.segment)
            last = moves[-1] if moves else None
            if (
                last is not None
                and last.file is file
                and last.length + extent.length <= MOVE_BYTES
                and last.offset + last.length == extent.offset
                and last.address + last.length == address
            ):
                moves[-1] = last._replace(length=last.length + extent.length, blocks=last.blocks + 1)
            else:
                moves.append(Move(file, extent.offset, address, extent.length, 1))
        self._close_files(max(MAX_OPEN_FILES, len({move.file for move in moves})))  # these are the newest
        return moves

    def _file(self, generation: int, directory: str, segment: int) -> Any:
        """A segment's open file. Files of another life of the daemon may have been replaced."""
        name = generation, directory, segment
        if self._files and next(iter(self._files))[0] != generation:
            self._close_files(0)
        if name not in self._files:
            self._files[name] = self.backend.open(f"{directory}/segments/{segment:08d}.seg", self._writing)
        self._files.move_to_end(name)
        return self._files[name]

    def _close_files(self, keep: int) -> None:
        while len(self._files) > keep:
            self.backend.close(self._files.popitem(last=False)[1])

    def _perform(self, moves: list[Move], limit: Limit) -> tuple[int, str]:
        """Make `moves` until the limit or a failure; returns the leading blocks that are complete, and the failure.

        When it returns nothing is in progress. Raises CopyLost for a move that does not end.
        """
        if not self._started:
            self._start()
        batch = _Batch(moves, self._call, limit)
        for _ in range(min(self._threads, len(moves))):
            self._batches.put(batch)
        if not batch.wait(self._give_up_s):
            self.off = f"a {self._verb} by {self.backend.name} did not end within {self._give_up_s:g} s"
            _lost.append(self)
            logger.error("direct %ss are off: %s", self._verb, self.off)
            raise CopyLost(self.off)
        return sum(move.blocks for move in moves[: batch.leading()]), batch.problem

    def _start(self) -> None:
        """Start the threads; raises DirectFailed where the process gets none."""
        for thread_index in range(self._threads):
            name = f"tiercache-direct-{self._verb}-{thread_index}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._started:
                    raise DirectFailed(str(error)) from error
                return  # fewer do as well
            self._started = True

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.work()

    def note(self, problem: str) -> None:
        """Record the result of a load or store; empty means success."""
        if not problem:
            self._in_a_row = 0
            return
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            logger.warning("a direct %s failed, the daemon does it instead: %s", self._verb, problem)
        if self._in_a_row >= MAX_FAILURES:
            self.off = f"{self._in_a_row} direct {self._verb}s in a row failed: {problem}"
            logger.warning("direct %ss are off: %s", self._verb, self.off)

    def close(self) -> None:
        """Close the files and end the threads; nothing is in progress, except for lost moves."""
        if self in _lost:
            return
        with self._lock:
            self.off = self.off or "closed"
            self._close_files(0)
            if self._started:
                for _ in range(self._threads):
                    self._batches.put(None)

    def forget_in_child(self) -> None:
        """After a fork, in the child: threads, files and device are the parent's."""
        self.off = forks.FORKED
        _lost.append(self)


_lost: list[DirectMoves] = []
"""Instances with a move that may still be in progress: their pools and files are not given back."""


class _Batch:
    """The moves of one load or store, distributed to the threads in order."""

    def __init__(self, moves: list[Move], call: Callable[[Any, int, int, int], int], limit: Limit) -> None:
        self.problem = ""
        self._moves = moves
        self._call = call
        self._limit = limit
        self._changed = threading.Condition()
        self._next = 0
        self._complete = [False] * len(moves)
        self._since_s: dict[int, float] = {}  # of the moves in progress, by index

    def work(self) -> None:
        """Make moves until none is left. In a thread of the owner."""
        while (index := self._take()) is not None:
            move = self._moves[index]
            problem = ""
            try:
                count = self._call(move.file, move.offset, move.address, move.length)
                if count != move.length:
                    problem = f"{count} bytes were moved of {move.length}"
            except DirectFailed as error:
                problem = str(error)
            except Exception as error:
                logger.exception("a direct read or write failed unexpectedly")
                problem = repr(error)
            with self._changed:
                del self._since_s[index]
                self._complete[index] = not problem
                self.problem = self.problem or problem
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._next == len(self._moves) or self.problem or self._limit.passed():
                return None
            index, self._next = self._next, self._next + 1
            self._since_s[index] = time.monotonic()
            return index

    def wait(self, give_up_s: float) -> bool:
        """Wait until no move is in progress and none will begin; False when one hangs."""
        with self._changed:
            while self._since_s or not self._is_over():
                oldest_s = min(self._since_s.values(), default=time.monotonic())
                if time.monotonic() - oldest_s > give_up_s:
                    self.problem = self.problem or "it hangs"  # the others take no further move
                    return False
                self._changed.wait(min(1.0, give_up_s / 4))
        return True

    def _is_over(self) -> bool:
        """True if no move will be taken any more; decided once, so that none is taken afterwards."""
        if self._next < len(self._moves) and not self.problem and not self._limit.passed():
            return False
        self._next = len(self._moves)
        return True

    def leading(self) -> int:
        """Leading moves that are complete."""
        return self._complete.index(False) if False in self._complete else len(self._complete)
