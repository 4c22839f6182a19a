"""A cache directory with a queue, frames in plain memory, and a disk that the test controls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waiting import wait_until

from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES, DiskIO
from tiercache.daemon.tiers.nvme.disk.kernel_aio import AioContext
from tiercache.daemon.tiers.nvme.disk.queue import DiskOutcome, DiskPriority, DiskQueue, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.segment_files import segment_name
from tiercache.protocol.checksums import CHECKSUM_XXH3

DEADLINE_S = 60.0
SEGMENT_BYTES = 1 << 20
FINGERPRINT = "ab" * 16


def segment_path(directory: Directory, segment_id: int) -> Path:
    """The file of a segment."""
    return directory.path / "segments" / segment_name(segment_id)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, length: int) -> bytes:
    """Bytes that differ from block to block and from place to place."""
    line = number.to_bytes(4, "little") + bytes(range(1, 252))  # 255 bytes: no two pages are alike
    return (line * (length // len(line) + 1))[:length]


class ObedientDisk(DiskIO):
    """The real disk, with a gate to hold it, a list of calls, and a hook that may fail or shorten them.

    Transfers by Linux AIO pass the gate and the hook too, each on a thread of its own, under the names of the system
    calls that they replace.
    """

    offers_aio = True
    """Of all these disks: without it, threads carry the blocks."""

    def __init__(self, direct: bool = True) -> None:
        self.direct = direct
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, int, int]] = []  # name, views, offset
        self.hook: Callable[[str, int], int | None] = lambda name, size: None
        """Called with name and size of each call: raises, or returns the most bytes to move."""
        self.call = threading.local()
        """For the hook: `call.offset` of the call that it is asked about."""
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self.hook("fallocate", size_bytes)
        super().fallocate(fd, size_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return self._move("preadv", super().preadv, fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return self._move("pwritev", super().pwritev, fd, views, offset)

    def aio(self, depth: int, eventfd: int, most_pieces: int) -> AioContext:
        if not self.offers_aio:
            raise OSError(errno.EOPNOTSUPP, "the test wants threads")
        return ObedientContext(self, depth, eventfd, most_pieces)

    def _move(
        self,
        name: str,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        views: Sequence[memoryview],
        offset: int,
    ) -> int:
        self.begins(name, len(views), offset)
        try:
            most = self.asked(name, sum(map(len, views)), offset)
            return call(fd, views, offset) if most is None else _shorter(call, fd, views, offset, most)
        finally:
            self.ends()

    def begins(self, name: str, views: int, offset: int) -> None:
        """A call has come."""
        with self._lock:
            self.calls.append((name, views, offset))
            self.running += 1
            self.most_running = max(self.most_running, self.running)

    def asked(self, name: str, size: int, offset: int) -> int | None:
        """Wait for the gate, then ask the hook."""
        assert self.gate.wait(DEADLINE_S)
        self.call.offset = offset
        return self.hook(name, size)

    def ends(self) -> None:
        """A call has returned."""
        with self._lock:
            self.running -= 1


class ObedientContext(AioContext):
    """The kernel's AIO behind the gate and the hook of a disk.

    A transfer that the hook lets pass goes to the kernel; one that it fails has that error as its result.
    """

    def __init__(self, disk: ObedientDisk, depth: int, eventfd: int, most_pieces: int) -> None:
        self._disk, self._wakes = disk, eventfd
        self._kernel = AioContext(depth, eventfd, most_pieces)
        self._lock = threading.Lock()  # the kernel's context is for one thread at a time
        self._asked: dict[int, tuple[bool, int, list[tuple[int, int]], int]] = {}
        self._most: dict[int, int] = {}
        self._never_sent: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.flying = 0

    def ready(self, place: int, writes: bool, fd: int, pieces: Sequence[tuple[int, int]], offset: int) -> None:
        self._asked[place] = writes, fd, list(pieces), offset

    def submit(self, places: Sequence[int]) -> int:
        for place in places:
            writes, fd, pieces, offset = self._asked.pop(place)
            name = "pwritev" if writes else "preadv"
            self._disk.begins(name, len(pieces), offset)
            call = partial(self._pass, name, place, writes, fd, pieces, offset)
            threading.Thread(target=call, name=f"aio-{place}", daemon=True).start()
        self.flying += len(places)
        return len(places)

    def _pass(self, name: str, place: int, writes: bool, fd: int, pieces: list[tuple[int, int]], offset: int) -> None:
        """One transfer, on a thread of its own, as long as it is held."""
        try:
            most = self._disk.asked(name, sum(size for _, size in pieces), offset)
            with self._lock:
                if most is not None:
                    self._most[place], pieces = most, _cut(pieces, -(-most // PAGE_BYTES) * PAGE_BYTES)
                self._kernel.ready(place, writes, fd, pieces, offset)
                assert self._kernel.submit([place]) == 1
        except OSError as error:
            with self._lock:  # the carrier may close the eventfd as soon as it has this result
                self._never_sent.put((place, -(error.errno or errno.EIO)))
                os.eventfd_write(self._wakes, 1)

    def results(self, least: int = 0) -> list[tuple[int, int]]:
        with self._lock:
            found = [(place, min(result, self._most.pop(place, result))) for place, result in self._kernel.results()]
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self._never_sent.get_nowait())
        for _ in found:
            self._disk.ends()
        self.flying -= len(found)
        return found

    def close(self) -> None:
        assert not self.flying
        self._kernel.close()


def _cut(pieces: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The first `most` bytes of some memory."""
    kept = []
    for address, size in pieces:
        if most > 0:
            kept.append((address, min(size, most)))
            most -= size
    return kept


def _shorter(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
    most: int,
) -> int:
    """Move whole pages, as direct I/O must, but report `most` bytes."""
    whole = -(-most // PAGE_BYTES) * PAGE_BYTES
    kept, left = [], whole
    for view in views:
        if left > 0:
            kept.append(view[:left])
            left -= len(kept[-1])
    return min(most, call(fd, kept, offset)) if kept else 0


class Rig:
    """Frames `0..` of `frame_bytes` each, slots of the same size in segment 1, and a queue."""

    def __init__(
        self,
        path: Path,
        disk: ObedientDisk | None = None,
        threads: int = 2,
        frame_bytes: int = 2 * PAGE_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        limits: dict[DiskPriority, int] | None = None,
    ) -> None:
        self.disk = disk or ObedientDisk()
        self.directory = Directory(path, 8 * segment_bytes, segment_bytes, disk=self.disk)
        self.directory.open()
        self.directory.create_segment(1)
        self.disk.calls.clear()
        self.frame_bytes = frame_bytes
        self.frames = segment_bytes // frame_bytes
        self.memory = mmap.mmap(-1, segment_bytes + PAGE_BYTES)  # with a page behind, to see who writes there
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.announced: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.announcements = 0
        self.finished: list[WriteOp | ReadOp] = []
        self.queue = DiskQueue(self.directory, self._announce, threads, limits, depth=threads)

    def _announce(self, call: Callable[[], None]) -> None:
        self.announcements += 1
        self.announced.put(call)

    def slot(self, number: int) -> int:
        return 1 << 48 | number * self.frame_bytes

    def fill(self, number: int, data: bytes) -> None:
        """Put data into a frame, and garbage behind it."""
        start = number * self.frame_bytes
        self.memory[start : start + self.frame_bytes] = data + b"\xee" * (self.frame_bytes - len(data))

    def frame(self, number: int, length: int) -> bytes:
        return self.memory[number * self.frame_bytes : number * self.frame_bytes + length]

    def write_op(self, number: int, data: bytes, codec: int = 0) -> WriteOp:
        """Write frame `number`, filled with `data`, to slot `number` under key `number`."""
        return self.write_run([number], [data], codec)

    def write_run(self, numbers: Sequence[int], data: Sequence[bytes], codec: int = 0) -> WriteOp:
        """One operation that writes these frames, filled with data of one length, to slots of the same numbers."""
        for number, its in zip(numbers, data, strict=True):
            self.fill(number, its)
        return WriteOp(
            slots=[self.slot(number) for number in numbers],
            addresses=[self.address + number * self.frame_bytes for number in numbers],
            length=len(data[0]),
            keys=[key(number) for number in numbers],
            fingerprint=FINGERPRINT,
            codecs=[codec] * len(numbers),
            kinds=[CHECKSUM_XXH3] * len(numbers),
            done=self.finished.append,
        )

    def read_op(self, written: WriteOp, frame: int, **changes: Any) -> ReadOp:
        """What the row of a finished write of one block asks for, into another frame; `changes` to fields of it."""
        columns = ("slots", "addresses", "keys", "codecs", "stored_lengths", "checksums", "kinds")
        fields: dict[str, Any] = {name: list(getattr(written, name)) for name in columns if name != "addresses"}
        fields["addresses"] = [self.address + frame * self.frame_bytes]
        fields |= {name: [value] for name, value in changes.items() if name in columns}
        whole = {"length": written.length, "fingerprint": written.fingerprint, "done": self.finished.append}
        return ReadOp(**fields, **{**whole, **{name: its for name, its in changes.items() if name not in columns}})

    def read_run(self, written: WriteOp, frames: Sequence[int]) -> ReadOp:
        """One operation that reads all of a write into other frames."""
        op = self.read_op(written, 0)
        op.addresses = [self.address + frame * self.frame_bytes for frame in frames]
        return op

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve announcements until the condition holds."""

        def served() -> bool:
            while not (over := condition()) and not self.announced.empty():
                self.announced.get()()
            return over

        wait_until(served, "what is announced makes it true")

    def stop(self) -> bool:
        """Stop the queue, and wait for what it has under way."""
        return self.queue.stop(time.monotonic() + DEADLINE_S)

    def run(self, ops: Sequence[WriteOp | ReadOp], priority: DiskPriority = DiskPriority.LOAD) -> list[DiskOutcome]:
        """Submit, wait, and return the outcomes of all blocks."""
        before = len(self.finished)
        assert self.queue.submit_many(ops, priority) == len(ops)
        self.until(lambda: len(self.finished) == before + len(ops))
        return [outcome for op in ops for outcome in op.outcomes]

    def store(self, numbers: Sequence[int], length: int, codec: int = 0) -> list[WriteOp]:
        """Write blocks `numbers` with their `content`; all must succeed."""
        ops = [self.write_op(number, content(number, length), codec) for number in numbers]
        assert self.run(ops, DiskPriority.WRITE) == [DiskOutcome.OK] * len(ops)
        return ops

    def close(self) -> None:
        """Check that every operation has ended and was handed over exactly once."""
        self.disk.gate.set()
        assert self.stop()
        assert self.queue.in_flight == self.queue.in_flight_bytes == self.queue.queued() == 0
        assert len(set(map(id, self.finished))) == len(self.finished)
        self.directory.close()
