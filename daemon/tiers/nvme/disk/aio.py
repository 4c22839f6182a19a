"""The carrier `aio`: one thread, which has many parts under way in the kernel.

    take ─► forms.begin: checksum, encode ─► context.ready ─┐            ┌► forms.end: verify, decode ─► finished
    take ─► ...                                             ┴► io_submit ┴► eventfd ─► results

The thread waits in one place only, for the eventfd: the kernel writes to it for each transfer that has ended, and the
loop when there is new work. io_submit may also block, on a file system that allocates or is frozen. Whatever is in the
kernel's hands (iocbs, buffers, the context itself) stays where it is until the kernel has released it, even if `stop`
has given up: then the thread waits on, touches no frame any more, and ends with the last transfer.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .backlog import MAX_PART_BLOCKS, Backlog, Part
from .block_io import AnyOp, BlockForms, DiskTransfer, TaskOp, bounce_bytes, fail, needs_bounce, settle
from .directory import Directory

log = logging.getLogger("tiercache.daemon")

UNFORESEEN = "a disk worker met something unforeseen"
END_BYTES = 8 << 20
"""Bytes verified, or a part more, before free places are filled again: the disk should not wait for the CPU."""

TOGETHER_FROM = 8
TOGETHER_SHARE = 4
"""With this many transfers under way, results are awaited until that share of them has come, or for a moment."""


BOUNCE_BYTES = 32 << 20
"""What all buffers of a directory may take together, or one larger buffer alone."""
_LEAST_BYTES = 64 << 10


class Buffer(NamedTuple):
    """Memory at a page."""

    address: int
    memory: mmap.mmap


class BouncePool:
    """Buffers that are used again. For one thread."""

    def __init__(self, limit_bytes: int = BOUNCE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[Buffer] = []
        self.used_bytes = 0
        """Bytes of the buffers that were taken and not given back."""

    def has_room(self, size_bytes: int) -> bool:
        """True if such a buffer may be taken now."""
        return self.used_bytes == 0 or self.used_bytes + _rounded(size_bytes) <= self._limit_bytes

    def take(self, size_bytes: int) -> Buffer:
        """A buffer of at least that many bytes, with anything in it. Ask `has_room` first."""
        wanted_bytes = _rounded(size_bytes)
        found = next((buffer for buffer in self._free if len(buffer.memory) == wanted_bytes), None)
        if found is not None:
            self._free.remove(found)
        else:
            memory = mmap.mmap(-1, wanted_bytes)
            found = Buffer(ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory)
        self.used_bytes += wanted_bytes
        return found

    def give_back(self, buffer: Buffer) -> None:
        """The buffer is free; the kernel does not use it any more."""
        self.used_bytes -= len(buffer.memory)
        self._free.append(buffer)
        while self.used_bytes + sum(len(one.memory) for one in self._free) > self._limit_bytes:
            self._free.pop(0)


def _rounded(size_bytes: int) -> int:
    """Powers of two, so that blocks of about the same size share buffers."""
    return max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())


class _Flight:
    """A part in one of the context's places."""

    __slots__ = ("attempts", "buffer", "part", "sent_ns", "transfer")
    sent_ns: int  # set when it is sent

    def __init__(self, part: Part) -> None:
        self.part = part
        self.attempts: deque[tuple[int, int]] = deque([(part.first, part.end)])
        """Blocks to be tried, one after another; the first ones are under way."""
        self.transfer: DiskTransfer | None = None
        self.buffer: Buffer | None = None


class AioCarrier:
    """One thread and one context of Linux AIO. Raises OSError when the kernel gives none.

    Args:
        backlog: where the parts come from: blocks only.
        directory: an open one, with direct I/O.
        finished: takes parts whose blocks have outcomes; called on the thread.
    """

    name = "aio"

    def __init__(self, backlog: Backlog, directory: Directory, finished: Callable[[Sequence[Part]], None]) -> None:
        self._backlog = backlog
        self._finished = finished
        self._forms = BlockForms(directory)
        self._pool = BouncePool()
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._context = directory.disk.aio(backlog.width, self._eventfd, MAX_PART_BLOCKS)
        except OSError:
            os.close(self._eventfd)
            raise
        self._flights: dict[int, _Flight] = {}
        self._unsent: list[int] = []  # places that are ready
        self._full = False  # the kernel takes no more before one has ended
        self._results: deque[tuple[int, int]] = deque()
        self._ended: list[Part] = []
        self._asleep = False  # guarded by backlog.changed; may be True for a moment after it woke up
        self._thread = threading.Thread(target=self._work, name="disk-aio", daemon=True)
        self._thread.start()

    def wake(self, count: int) -> None:
        """`count` parts have come, or the backlog is stopping. Needs `backlog.changed` held."""
        if self._asleep and (self._backlog.busy < self._backlog.width or self._backlog.stopping):
            self._asleep = False
            os.eventfd_write(self._eventfd, 1)

    def join(self, deadline_s: float) -> bool:
        """Wait until the thread has ended, or until a time (time.monotonic()); True if it has. Blocks."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._step():
                pass
            self._context.close()
            os.close(self._eventfd)
        except BaseException:
            self._backlog.never_again()
            raise

    def _step(self) -> bool:
        """Begin what may begin, wait if there is nothing else to do, end what has ended; False at the end."""
        backlog = self._backlog
        with backlog.changed:
            parts = self._take()
            idle = not (parts or self._results or (self._unsent and not self._full))
            if idle and not self._flights and (backlog.stopping or backlog.gave_up):
                return False
            self._asleep = idle
        for part in parts:
            flight = self._flights[part.place] = _Flight(part)
            self._go_on(flight)
        if self._unsent and not self._full:
            self._submit()
        found = self._wait() if idle else self._context.results()
        if found:
            self._full = False
            self._arrived(found)
        landed_bytes = 0
        while self._results and landed_bytes < END_BYTES:
            place, result = self._results.popleft()
            landed_bytes += max(0, result)
            self._land(place, result)
        if self._ended:
            ended, self._ended = self._ended, []
            self._finished(ended)
        return True

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for results or for new work.

        Where many transfers are under way, a few results are awaited together: each wake-up of this thread, and of the
        loop, costs more than a small block.
        """
        flying = self._context.flying
        found = self._context.results(flying // TOGETHER_SHARE) if flying >= TOGETHER_FROM else []
        if not found:
            os.eventfd_read(self._eventfd)
            found = self._context.results()
        self._asleep = False
        return found

    def _take(self) -> list[Part]:
        """What may begin now. Needs `backlog.changed` held."""
        parts: list[Part] = []
        if self._backlog.gave_up:
            return parts
        while part := self._backlog.take(self._may_begin):
            parts.append(part)
            if isinstance(part.op, TaskOp) or needs_bounce(part.op, part.first):
                break  # the pool is asked again when this one has its buffer
        return parts

    def _may_begin(self, op: AnyOp, place: int) -> bool:
        return isinstance(op, TaskOp) or not needs_bounce(op, place) or self._pool.has_room(bounce_bytes(op, place))

    def _go_on(self, flight: _Flight) -> None:
        """Make the next attempt of a part ready; without another one the part has ended."""
        part = flight.part
        while flight.attempts:
            first, end = flight.attempts[0]
            assert not isinstance(part.op, TaskOp)
            try:
                flight.transfer = self._forms.begin(part.op, first, end, lambda size: self._bounce(flight, size))
                if flight.transfer is not None:
                    self._ready(flight, flight.transfer)
                    return
                flight.attempts.popleft()  # its outcome is known
            except OSError as error:
                self._failed(flight, error)
            except Exception:
                log.exception(UNFORESEEN)
                settle(part.op, *flight.attempts.popleft())
        settle(part.op, part.first, part.end)
        del self._flights[part.place]
        if flight.buffer is not None:
            self._pool.give_back(flight.buffer)
        self._ended.append(part)

    def _bounce(self, flight: _Flight, size_bytes: int) -> int:
        """The part's buffer; a part with a block that needs one has no other block."""
        if flight.buffer is None:
            flight.buffer = self._pool.take(size_bytes)
        return flight.buffer.address

    def _failed(self, flight: _Flight, error: OSError) -> None:
        """One bad place must not cost its neighbours: each is tried alone."""
        first, end = flight.attempts.popleft()
        if end - first > 1:
            flight.attempts.extendleft((place, place + 1) for place in reversed(range(first, end)))
        else:
            fail(flight.part.op, first, error)

    def _ready(self, flight: _Flight, transfer: DiskTransfer) -> None:
        place = flight.part.place
        self._context.ready(place, transfer.writes, transfer.fd, transfer.pieces, transfer.offset)
        self._unsent.append(place)

    def _submit(self) -> None:
        """Hand what is ready to the kernel, all at once. What it does not take waits until a transfer has ended."""
        if self._backlog.gave_up:
            for place in self._unsent:  # the kernel never heard of these
                del self._flights[place]
            self._unsent.clear()
            return
        now_ns = time.perf_counter_ns()
        for place in self._unsent:
            self._flights[place].sent_ns = now_ns
        try:
            taken = self._context.submit(self._unsent)
        except OSError as error:
            if error.errno == errno.EAGAIN and self._context.flying:
                self._full = True
                return
            # The kernel refuses the first of them, before it has done anything.
            flight = self._flights[self._unsent.pop(0)]
            flight.part.calls += 1
            self._failed(flight, error)
            self._go_on(flight)
            return
        for place in self._unsent[:taken]:
            self._flights[place].part.calls += 1
        del self._unsent[:taken]

    def _arrived(self, found: list[tuple[int, int]]) -> None:
        """Note what the kernel has released."""
        now_ns = time.perf_counter_ns()
        for place, _ in found:
            flight = self._flights[place]
            flight.part.io_ns += now_ns - flight.sent_ns
        self._results.extend(found)

    def _land(self, place: int, result: int) -> None:
        """Go on with a part of which a transfer has ended: with the rest of it, its verification, the next attempt."""
        flight = self._flights[place]
        if self._backlog.gave_up:  # its operation was handed back, and its frames may be gone
            del self._flights[place]
            return
        transfer = flight.transfer
        assert transfer is not None
        try:
            if result < 0 and result != -errno.EINTR:
                raise OSError(-result, os.strerror(-result))
            left, over = transfer.left, transfer.advance(max(0, result))
            flight.part.io_bytes += left - transfer.left
            if not over:
                self._ready(flight, transfer)
                return
            buffer = flight.buffer if needs_bounce(transfer.op, transfer.first) else None
            self._forms.end(transfer, 0 if buffer is None else buffer.address)
            flight.attempts.popleft()
        except OSError as error:
            self._failed(flight, error)
        except Exception:
            log.exception(UNFORESEEN)
            settle(flight.part.op, *flight.attempts.popleft())
        self._go_on(flight)
