"""The carrier `threads`: each thread takes a part, and waits in the kernel until it is done."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence

from .backlog import Backlog, Part
from .block_io import BlockForms, DiskOutcome, DiskTransfer, TaskOp, fail, needs_bounce, settle, view_of
from .directory import Directory
from .disk import PAGE_BYTES

log = logging.getLogger("tiercache.daemon")

_IDLE_LOOK_S = 60.0


class ThreadCarrier:
    """As many threads as a backlog is wide.

    Args:
        backlog: where the parts come from.
        directory: an open one.
        finished: takes parts whose blocks have outcomes; called on the threads.
    """

    name = "threads"

    def __init__(self, backlog: Backlog, directory: Directory, finished: Callable[[Sequence[Part]], None]) -> None:
        self._backlog = backlog
        self._directory = directory
        self._finished = finished
        self._threads = [
            threading.Thread(target=self._work, name=f"disk-{number}", daemon=True) for number in range(backlog.width)
        ]
        for thread in self._threads:
            thread.start()

    def wake(self, count: int) -> None:
        """`count` parts have come, or the backlog is stopping. Needs `backlog.changed` held."""
        self._backlog.changed.notify(count)

    def join(self, deadline_s: float) -> bool:
        """Wait until all threads have ended, or until a time (time.monotonic()); True if they have. Blocks."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        mover = Mover(self._directory)
        while part := self._take():
            mover.carry_out(part)
            self._finished([part])

    def _take(self) -> Part | None:
        """The next part, waiting for one; None when the queue stops."""
        backlog = self._backlog
        with backlog.changed:
            while not backlog.gave_up:
                if part := backlog.take():
                    return part
                if backlog.stopping:
                    break
                backlog.changed.wait(_IDLE_LOOK_S)
        return None


class Mover:
    """Carries out parts on the calling thread, with a bounce buffer of its own."""

    def __init__(self, directory: Directory) -> None:
        self._disk = directory.disk
        self._forms = BlockForms(directory)
        self._bounce = mmap.mmap(-1, PAGE_BYTES)
        self._bounce_address = _address_of(self._bounce)

    def carry_out(self, part: Part) -> None:
        """Give every block of a part its outcome. Blocks as the disk does; raises nothing: a thread survives any."""
        try:
            self._together(part, part.first, part.end)
        except Exception:
            log.exception("a disk worker met something unforeseen")
        settle(part.op, part.first, part.end)

    def _together(self, part: Part, first: int, end: int) -> None:
        try:
            self._attempt(part, first, end)
        except OSError as error:
            if end - first == 1:
                fail(part.op, first, error)
                return
            # One bad place must not cost its neighbours: each is tried alone.
            for place in range(first, end):
                self._together(part, place, place + 1)

    def _attempt(self, part: Part, first: int, end: int) -> None:
        op = part.op
        if isinstance(op, TaskOp):
            op.call()
            op.outcome = DiskOutcome.OK
            return
        transfer = self._forms.begin(op, first, end, self._bounce_of)
        if transfer is not None:
            self._move(part, transfer)
            self._forms.end(transfer, self._bounce_address if needs_bounce(op, first) else 0)

    def _move(self, part: Part, transfer: DiskTransfer) -> None:
        """Transfer all of its bytes. Raises OSError."""
        call = self._disk.pwritev if transfer.writes else self._disk.preadv
        over = False
        while not over:
            views = [view_of(address, size) for address, size in transfer.pieces]
            start_ns = time.perf_counter_ns()
            try:
                count = call(transfer.fd, views, transfer.offset)
            except InterruptedError:
                count = 0
            finally:
                part.io_ns += time.perf_counter_ns() - start_ns
                part.calls += 1
            left = transfer.left
            over = transfer.advance(count)
            part.io_bytes += left - transfer.left

    def _bounce_of(self, length: int) -> int:
        if len(self._bounce) < length:
            self._bounce = mmap.mmap(-1, length)
            self._bounce_address = _address_of(self._bounce)
        return self._bounce_address


def _address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))
