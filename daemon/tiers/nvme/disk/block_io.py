"""Block I/O: one run of operations, from frames to slots or back, as done by a disk worker between two waits.

    read:   preadv into the frame ─► checksum over the stored bytes ─► decode       ─► OK | CORRUPT | OTHER_KEY
    write:  encode ─► zero the padding ─► checksum over the stored bytes ─► pwritev ─► OK

Raw blocks move straight between frame and disk; encoded and encrypted ones pass through the worker's bounce buffer.
Encryption comes after encoding, and the checksum covers its result.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import OVERHEAD_BYTES, CipherError, whose
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES, DiskIO
from tiercache.ground.units import round_up
from tiercache.protocol.checksums import CHECKSUM_XXH3, KINDS, block_checksum, block_seed
from tiercache.protocol.frames import OFFSET_MASK, REGION_SHIFT

log = logging.getLogger("tiercache.daemon")

NOWHERE = 0
"""As the address of a read: only its outcome is of interest."""
SMALL_BYTES = 256 << 10
HELD_BYTES = 64 << 10
"""xxhash digests up to so much at a time without releasing the interpreter's lock."""
RETRIES = 64
"""Consecutive short or interrupted transfers without progress before it counts as an I/O error."""


class DiskOutcome(Enum):
    """How an operation ended."""

    PENDING = "pending"
    """Not yet."""
    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes read are not what was stored. The frame holds rubbish."""
    OTHER_KEY = "other_key"
    """The bytes read are what was stored, under another nvme_key or while there was none. The frame holds rubbish."""
    IO_ERROR = "io_error"
    """`op.errno` says which. After a failed read the frame, after a failed write the slot, holds rubbish."""
    CANCELLED = "cancelled"
    """Never started; frame and slot are as they were."""
    ABANDONED = "abandoned"
    """Only from `DiskQueue.stop`: still in the kernel at the deadline. Never reuse its frame or slot."""


@dataclass(slots=True, eq=False, kw_only=True)
class Op:
    """Fields of every operation. The caller sets `done`, workers the rest.

    `done(op)` is called exactly once, on the loop. `unwanted = True` (set on the loop) lets an
    operation that has not started end as CANCELLED.
    """

    done: Callable[..., object]
    unwanted: bool = False
    outcome: DiskOutcome = DiskOutcome.PENDING
    errno: int = 0
    held_bytes: int = 0
    submitted_ns: int = 0
    io_ns: int = 0  # in system calls; of the whole run, on its first op, else 0
    calls: int = 0  # system calls of the run, on its first op
    io_bytes: int = 0  # bytes moved by them, on its first op
    priority: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class ReadOp(Op):
    """Read one block from its slot into a frame.

    slot: `segment_id << 48 | byte offset`, 4096-aligned. address: of the frame in this process,
    4096-aligned; the frame is at least `round_up(max(length, stored_length if raw), 4096)` bytes. NOWHERE: the block
    is read to be verified, into memory of the worker. length: of the block. stored_length, codec, checksum, kind: from
    the row.
    """

    slot: int
    address: int
    length: int
    key: bytes
    fingerprint: str
    stored_length: int
    checksum: int
    codec: int = codecs.RAW
    kind: int = CHECKSUM_XXH3

    @property
    def moved_bytes(self) -> int:
        """Bytes on the disk, with padding."""
        return round_up(self.stored_length, PAGE_BYTES)


@dataclass(slots=True, eq=False, kw_only=True)
class WriteOp(Op):
    """Write one block from its frame into a slot of at least `round_up(length, 4096)` bytes (see
    `cipher.sealed_bytes`).

    codec is the requested one; on OK `codec`, `stored_length` and `checksum` are what belongs in the row (raw when
    encoding does not save a page). The frame's bytes behind `length`, up to the next multiple of 4096, are zeroed.
    """

    slot: int
    address: int
    length: int
    key: bytes
    fingerprint: str
    codec: int = codecs.RAW
    kind: int = CHECKSUM_XXH3
    stored_length: int = 0
    checksum: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes on the disk, with padding; at most that, while the op has not run."""
        return round_up(self.stored_length or self.length, PAGE_BYTES)


@dataclass(slots=True, eq=False, kw_only=True)
class TaskOp(Op):
    """Anything else that blocks on this disk (making and removing segments). OSError is IO_ERROR."""

    call: Callable[[], object]

    @property
    def moved_bytes(self) -> int:
        return 0


AnyOp = ReadOp | WriteOp | TaskOp


def adjoins(before: AnyOp, after: AnyOp) -> bool:
    """Whether two operations can share a system call: same direction, raw, adjoining slots."""
    if isinstance(before, TaskOp) or isinstance(after, TaskOp) or type(before) is not type(after):
        return False
    if before.address == NOWHERE or after.address == NOWHERE:  # a worker has room for one of them
        return False
    return before.codec == codecs.RAW == after.codec and before.slot + before.moved_bytes == after.slot


class BlockMover:
    """The I/O part of one worker thread, with its bounce buffer. Blocks; raises nothing."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._disk: DiskIO = directory.disk
        self._bounce = mmap.mmap(-1, PAGE_BYTES)
        self._bounce_address = _address_of(self._bounce)
        self._scratch = bytearray()  # where blocks that are only verified are decoded
        self._io_ns = 0
        self._calls = 0
        self._io_bytes = 0

    def run(self, ops: Sequence[AnyOp]) -> None:
        """Carry out a run of adjoining operations; every one of them has an outcome afterwards."""
        self._io_ns = self._calls = self._io_bytes = 0
        try:
            self._attempt(ops)
        except OSError as error:
            if len(ops) > 1:
                # One bad place must not cost its neighbours: run each alone.
                for op in ops:
                    self._alone(op)
            else:
                _fail(ops[0], error)
        ops[0].io_ns, ops[0].calls, ops[0].io_bytes = self._io_ns, self._calls, self._io_bytes

    def _alone(self, op: AnyOp) -> None:
        try:
            self._attempt([op])
        except OSError as error:
            _fail(op, error)

    def _attempt(self, ops: Sequence[AnyOp]) -> None:
        reads = [op for op in ops if isinstance(op, ReadOp)]
        writes = [op for op in ops if isinstance(op, WriteOp)]
        if reads:
            self._read(reads)
        elif writes:
            self._write(writes)
        for op in ops:
            if isinstance(op, TaskOp):
                op.call()
                op.outcome = DiskOutcome.OK

    def _read(self, ops: list[ReadOp]) -> None:
        if not all(map(_plausible, ops)):
            if len(ops) > 1:
                raise OSError(errno.EINVAL, "a row that cannot be true")
            ops[0].outcome = DiskOutcome.CORRUPT
            return
        straight = ops[0].codec == codecs.RAW and ops[0].address != NOWHERE
        views = [self._frame(op, op.moved_bytes) if straight else self._bounce_view(op.moved_bytes) for op in ops]
        self._move(self._disk.preadv, ops, views)
        for op, view in zip(ops, views, strict=True):
            op.outcome = self._verified(op, view[: op.stored_length])

    def _verified(self, op: ReadOp, stored: memoryview) -> DiskOutcome:
        seed = block_seed(op.key, op.fingerprint, op.length, op.codec, op.kind)
        if _checksum(stored, seed, op.kind) != op.checksum:
            return DiskOutcome.CORRUPT
        try:
            if op.codec & codecs.SEALED:
                self._open(op, stored)
            elif op.codec != codecs.RAW:
                codecs.decode(op.codec, stored, self._frame(op, op.length))
        except CipherError:
            return DiskOutcome.OTHER_KEY
        except codecs.CodecError as error:
            log.error("a block with a good checksum could not be decoded: %s", error)
            return DiskOutcome.CORRUPT
        return DiskOutcome.OK

    def _open(self, op: ReadOp, stored: memoryview) -> None:
        cipher, plain_codec, frame = self._directory.cipher, codecs.unsealed(op.codec), self._frame(op, op.length)
        if cipher is None:
            raise CipherError("it is encrypted, and this daemon has no nvme_key")
        owner = whose(op.key, op.fingerprint, op.length, op.codec)
        if plain_codec == codecs.RAW:
            cipher.open(stored, owner, frame)
            return
        encoded = memoryview(bytearray(len(stored) - OVERHEAD_BYTES))
        cipher.open(stored, owner, encoded)
        codecs.decode(plain_codec, encoded, frame)

    def _write(self, ops: list[WriteOp]) -> None:
        views = [self._to_store(op) for op in ops]
        for op, view in zip(ops, views, strict=True):
            seed = block_seed(op.key, op.fingerprint, op.length, op.codec, op.kind)
            op.checksum = _checksum(view[: op.stored_length], seed, op.kind)
        self._move(self._disk.pwritev, ops, views)
        for op in ops:
            op.outcome = DiskOutcome.OK

    def _to_store(self, op: WriteOp) -> memoryview:
        """The bytes for the disk, whole pages with zeroed padding; sets codec and stored length."""
        sealed, plain_codec = op.codec & codecs.SEALED, codecs.unsealed(op.codec)
        encoded = codecs.encode(plain_codec, self._frame(op, op.length)) if plain_codec != codecs.RAW else None
        if sealed:
            assert self._directory.cipher is not None
            op.codec = codecs.SEALED if encoded is None else op.codec
            plain = self._frame(op, op.length) if encoded is None else encoded
            op.stored_length = len(plain) + OVERHEAD_BYTES
            view = self._bounce_view(op.moved_bytes)
            owner = whose(op.key, op.fingerprint, op.length, op.codec)
            self._directory.cipher.seal(plain, owner, view[: op.stored_length])
        elif encoded is None:
            op.codec, op.stored_length = codecs.RAW, op.length
            view = self._frame(op, op.moved_bytes)
        else:
            op.stored_length = len(encoded)
            view = self._bounce_view(op.moved_bytes)
            ctypes.memmove(self._bounce_address, encoded, len(encoded))  # a slice assignment holds the GIL
        padding = len(view) - op.stored_length
        if padding:
            view[op.stored_length :] = bytes(padding)
        return view

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        ops: Sequence[ReadOp | WriteOp],
        views: Sequence[memoryview],
    ) -> None:
        """Transfer all views, one after another, to or from the slots of `ops`. Raises OSError."""
        segment_id, offset = ops[0].slot >> REGION_SHIFT, ops[0].slot & OFFSET_MASK
        total = sum(map(len, views))
        if ops[0].slot < 0 or offset % PAGE_BYTES or offset + total > self._directory.segment_bytes:
            raise OSError(errno.EINVAL, "a slot that is not in its segment")
        fd = self._directory.fd(segment_id)
        moved = stuck = 0
        while moved < total:
            start_ns = time.perf_counter_ns()
            try:
                count = call(fd, views if moved == 0 else _rest(views, moved), offset + moved)
            except InterruptedError:
                count = 0
            finally:
                self._io_ns += time.perf_counter_ns() - start_ns
                self._calls += 1
            # O_DIRECT continues at a page; a partial page is moved again.
            count -= (moved + count) % PAGE_BYTES if moved + count < total else 0
            moved += count
            self._io_bytes += max(0, count)
            stuck = 0 if count > 0 else stuck + 1
            if stuck > RETRIES:
                raise OSError(errno.EIO, "the transfer stands still: the segment is shorter than it was")

    def _frame(self, op: ReadOp | WriteOp, length: int) -> memoryview:
        if op.address == NOWHERE:
            if len(self._scratch) < length:
                self._scratch = bytearray(length)
            return memoryview(self._scratch)[:length]
        return memoryview((ctypes.c_char * length).from_address(op.address)).cast("B")

    def _bounce_view(self, length: int) -> memoryview:
        if len(self._bounce) < length:
            self._bounce = mmap.mmap(-1, length)
            self._bounce_address = _address_of(self._bounce)
        return memoryview(self._bounce)[:length]


def _checksum(view: memoryview, seed: int, kind: int) -> int:
    """`block_checksum`, without releasing the interpreter's lock for a small block.

    Hashing 128 KiB takes 12 us; getting the lock back from a busy loop takes milliseconds.
    """
    if kind != CHECKSUM_XXH3 or len(view) > SMALL_BYTES:
        return block_checksum(view, seed, kind)
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(view), HELD_BYTES):
        state.update(view[start : start + HELD_BYTES])
    return state.intdigest()


def _address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def _plausible(op: ReadOp) -> bool:
    """Whether a row may be acted on: a stored length beyond the block's would write past its frame."""
    if op.kind not in KINDS or not codecs.known(op.codec):
        return False
    return plausible_length(op.codec, op.stored_length, op.length)


def plausible_length(codec: int, stored_length: int, length: int) -> bool:
    """Whether a codec can have stored a block of `length` in that many bytes."""
    plain_length = stored_length - OVERHEAD_BYTES if codec & codecs.SEALED else stored_length
    return plain_length == length if codecs.unsealed(codec) == codecs.RAW else 0 < plain_length <= length


def _rest(views: Sequence[memoryview], moved: int) -> list[memoryview]:
    """The views without their first `moved` bytes."""
    rest = []
    for view in views:
        if moved < len(view):
            rest.append(view[moved:])
        moved = max(0, moved - len(view))
    return rest


def _fail(op: AnyOp, error: OSError) -> None:
    op.outcome = DiskOutcome.IO_ERROR
    op.errno = error.errno or errno.EIO
