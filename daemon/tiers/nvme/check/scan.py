"""Scan: reads blocks only to verify their checksums, while the daemon serves.

Blocks are chosen at random and read at the priority of prefetches, a few at a time and at a limited rate. A bad block
is dropped, with what follows it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, DiskOutcome, ReadOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

ALL = -1
"""As a sample: every block."""
MAX_READING = 32
MAX_READING_BYTES = 16 << 20
"""Unless a single block is larger."""
LOOKED_AT_ONCE = 2000
"""Entries passed over in one slice of the event loop, about a millisecond."""
MAX_NAMED = 20

Done = Callable[[list[str], int], None]
"""Called with the findings and the number of blocks read."""


class Scan:
    """One pass over a sample of all blocks. Event loop only; never blocks.

    `wanted()` says whether the requester still waits for it; `done` is called once, unless it is `stop`ped.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        namespaces: Mapping[int, Namespace],
        sample: int,
        bytes_per_s: int,
        wanted: Callable[[], bool],
        done: Done,
        clock_s: Callable[[], float],
    ) -> None:
        self.over = False
        self._namespaces = namespaces
        self._left = math.inf if sample == ALL else sample
        self._bytes_per_s = bytes_per_s
        self._wanted = wanted
        self._report = done
        self._entries = _in_random_order(shelves)
        self._reading = self._reading_bytes = 0
        self._blocks = 0
        self._bytes = 0
        self._bad = 0
        self._findings: list[str] = []
        self._clock_s = clock_s
        self._started_s = clock_s()

    def pump(self) -> bool:
        """Start reads that are due; True while there is more to do at once."""
        if not self._wanted():
            self._left = 0
        looked = 0
        while self._left > 0 and self._is_due():
            if looked == LOOKED_AT_ONCE:
                return True
            looked += 1
            following = next(self._entries, None)
            if following is None:
                self._left = 0
            elif self._read(*following):
                self._left -= 1
        self._finish()
        return False

    def stop(self) -> None:
        """Start nothing more and report nothing."""
        self.over, self._left = True, 0

    def _is_due(self) -> bool:
        if self._reading == MAX_READING or self._reading_bytes >= MAX_READING_BYTES:
            return False
        if not self._bytes_per_s:
            return True
        return self._bytes <= (self._clock_s() - self._started_s) * self._bytes_per_s

    def _finish(self) -> None:
        if self._left <= 0 and self._reading == 0 and not self.over:
            self.over = True
            if self._bad > len(self._findings):
                self._findings.append(f"{self._bad - len(self._findings):,} more bad blocks")
            self._report(self._findings, self._blocks)

    def _read(self, shelf: Shelf, entry: int) -> bool:
        """Start reading a block; False when there is none, or the disk is busy."""
        index = shelf.index
        if entry >= len(index.key) or index.state[entry] != LIVE or not index.key[entry] or shelf.offline:
            return False
        namespace, key = self._namespaces[index.table[entry]], index.key[entry]
        stored = shelf.find_many(namespace, [key])
        if stored.entries != [entry]:
            return False
        op = stored.read_op(namespace, [key], [NOWHERE], lambda op: self._done(shelf, namespace, entry, op))
        # As for a promotion: the entry keeps its slot, and the slot belongs to the kernel until the read ends.
        index.pin(entry)
        shelf.allocator.hold(*op.slots)
        self._reading += 1
        self._reading_bytes += namespace.spec.frame_bytes
        self._bytes += op.moved_bytes
        if not shelf.queue.submit(op, DiskPriority.PREFETCH):
            op.end(0, 1, DiskOutcome.CANCELLED)
            op.done(op)
        return True

    def _done(self, shelf: Shelf, namespace: Namespace, entry: int, op: ReadOp) -> None:
        self._reading -= 1
        self._reading_bytes -= namespace.spec.frame_bytes
        [outcome] = op.outcomes
        if outcome is DiskOutcome.ABANDONED:
            return  # only at shutdown: the kernel may still read the slot
        shelf.allocator.unhold(*op.slots)
        shelf.index.unpin(entry)
        self._blocks += outcome is not DiskOutcome.CANCELLED
        if outcome in (DiskOutcome.CORRUPT, DiskOutcome.IO_ERROR):
            self._bad += 1
            if len(self._findings) < MAX_NAMED:
                self._findings.append(_finding(shelf, op))
        if outcome in (DiskOutcome.CORRUPT, DiskOutcome.OTHER_KEY):  # of another key: no fault of the disk
            shelf.drop(namespace, *op.keys)


def _finding(shelf: Shelf, op: ReadOp) -> str:
    what = "fails its checksum and is dropped"
    if op.errnos:
        what = f"cannot be read ({os.strerror(op.errnos[0])})"
    return f"nvme directory {shelf.directory.path}: block {op.keys[0].hex()} {what}"


def _in_random_order(shelves: Sequence[Shelf]) -> Iterator[tuple[Shelf, int]]:
    """Every entry id of all indexes as they are now, once, without building a list."""
    bounds = [len(shelf.index.key) for shelf in shelves]
    count = sum(bounds)
    if count == 0:
        return
    chance = random.Random()
    stride = chance.randrange(1, count + 1)
    while math.gcd(stride, count) != 1:
        stride += 1
    start = chance.randrange(count)
    for step in range(count):
        number = (start + step * stride) % count
        for shelf, bound in zip(shelves, bounds, strict=True):
            if number < bound:
                yield shelf, number
                break
            number -= bound
