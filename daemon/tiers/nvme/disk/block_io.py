"""Operations on blocks, and the forms of a block: what becomes of it before it is written, and after it was read.

            begin                                      carrier      end
    read:   is the row plausible?                   ─► preadv    ─► checksum ─► decode ─► OK | CORRUPT | OTHER_KEY
    write:  encode ─► zero the padding ─► checksum  ─► pwritev   ─► OK

Raw blocks move straight between frame and disk; encoded and encrypted ones, and those that are only verified, pass
through a bounce buffer of the carrier. Encryption comes after encoding, and the checksum covers its result.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import OVERHEAD_BYTES, CipherError, whose
from tiercache.ground.units import round_up
from tiercache.protocol.checksums import CHECKSUM_XXH3, KINDS, block_checksum, block_seed
from tiercache.protocol.frames import OFFSET_MASK, REGION_SHIFT

from .directory import Directory
from .disk import PAGE_BYTES

log = logging.getLogger("tiercache.daemon")

NOWHERE = 0
"""As the address of a read: only its outcome is of interest."""
SMALL_BYTES = 256 << 10
HELD_BYTES = 64 << 10
"""Bytes that xxhash digests at a time without releasing the interpreter's lock."""
RETRIES = 64
"""Consecutive short or interrupted transfers without progress before it counts as an I/O error."""


class DiskOutcome(Enum):
    """How an operation ended."""

    PENDING = "pending"
    """Not yet."""
    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes read are not what was stored. The frame holds undefined bytes."""
    OTHER_KEY = "other_key"
    """The bytes read are what was stored, under another nvme_key or none. The frame holds undefined bytes."""
    IO_ERROR = "io_error"
    """`op.errno` says which. After a failed read the frame, after a failed write the slot, holds undefined bytes."""
    CANCELLED = "cancelled"
    """Never started; frame and slot are as they were."""
    ABANDONED = "abandoned"
    """Only from `DiskQueue.stop`: still in the kernel at the deadline. Never reuse its frame or slot."""


@dataclass(slots=True, eq=False, kw_only=True)
class Op:
    """Fields of every operation. The caller sets `done` and `together`, the queue the rest.

    `done(op)` is called exactly once, on the loop; with `together` it is `done(ops)`, a list of operations with this
    very `done` that ended one after another. `unwanted = True` (set on the loop) lets an operation that has not
    started end as CANCELLED.
    """

    done: Callable[..., object]
    together: bool = False
    unwanted: bool = False
    outcome: DiskOutcome = DiskOutcome.PENDING
    errno: int = 0
    held_bytes: int = 0
    submitted_ns: int = 0
    priority: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class ReadOp(Op):
    """Read one block from its slot into a frame.

    slot: `segment_id << 48 | byte offset`, 4096-aligned. address: of the frame in this process,
    4096-aligned; the frame is at least `round_up(max(length, stored_length if raw), 4096)` bytes. NOWHERE: the block
    is read to be verified, into memory of the carrier. length: of the block. stored_length, codec, checksum, kind: from
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
        return (self.stored_length + PAGE_BYTES - 1) & -PAGE_BYTES


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
        return ((self.stored_length or self.length) + PAGE_BYTES - 1) & -PAGE_BYTES


@dataclass(slots=True, eq=False, kw_only=True)
class TaskOp(Op):
    """Anything else that blocks on this disk (making and removing segments). OSError is IO_ERROR."""

    call: Callable[[], object]

    @property
    def moved_bytes(self) -> int:
        return 0


BlockOp = ReadOp | WriteOp
AnyOp = BlockOp | TaskOp
Piece = tuple[int, int]
"""Memory of this process: address and bytes."""


@dataclass(slots=True, eq=False)
class DiskTransfer:
    """Bytes of one run on their way, all of which move before it ends, in as many system calls as that takes."""

    ops: Sequence[BlockOp]
    writes: bool
    fd: int
    offset: int
    """Of the next byte, in the segment."""
    pieces: Sequence[Piece]
    """What is left."""
    left: int
    """Bytes in them."""
    stuck: int = 0

    def advance(self, count: int) -> bool:
        """Note the bytes that a system call has moved; True when that was all. Raises OSError."""
        if count == self.left:
            self.left = 0
            return True
        # O_DIRECT continues at a page; a partial page is moved again.
        count -= (self.offset + count) % PAGE_BYTES
        self.stuck = 0 if count > 0 else self.stuck + 1
        if self.stuck > RETRIES:
            raise OSError(errno.EIO, "the transfer stands still: the segment is shorter than it was")
        if count > 0:
            self.offset, self.left, self.pieces = self.offset + count, self.left - count, _rest(self.pieces, count)
        return False


def by_done(ops: Sequence[AnyOp]) -> Iterator[tuple[Callable[..., object], AnyOp | Sequence[AnyOp]]]:
    """How operations that have ended are passed to their `done`: it, and what it takes."""
    first = 0
    while first < len(ops):
        op, end = ops[first], first + 1
        if op.together:
            while end < len(ops) and ops[end].done is op.done:
                end += 1
        yield op.done, ops[first:end] if op.together else op
        first = end


def adjoins(before: AnyOp, after: AnyOp) -> bool:
    """True if two operations can share a system call: same direction, raw, adjoining slots."""
    if type(before) is not type(after) or isinstance(before, TaskOp) or isinstance(after, TaskOp):
        return False
    if before.slot + before.moved_bytes != after.slot:
        return False
    return not needs_bounce(before) and not needs_bounce(after)


def needs_bounce(op: BlockOp) -> bool:
    """True if a block does not move straight between its frame and the disk; a run has one of these at most."""
    return op.codec != codecs.RAW or op.address == NOWHERE


def bounce_bytes(op: BlockOp) -> int:
    """The most bytes of a bounce buffer that a block can take."""
    if isinstance(op, ReadOp):
        return op.moved_bytes if plausible_length(op.codec, op.stored_length, op.length) else 0
    return round_up(op.length + OVERHEAD_BYTES, PAGE_BYTES)


class BlockForms:
    """What is done to blocks before and after their transfer. For one thread; takes what the CPU takes."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._scratch = bytearray()  # where blocks that are only verified are decoded

    def begin(self, ops: Sequence[BlockOp], bounce: Callable[[int], int]) -> DiskTransfer | None:
        """The transfer of operations that adjoin; None when their outcome is known without. Raises OSError.

        bounce: the address of as many bytes, at a page, which stay until the transfer has ended.
        """
        first = ops[0]
        if isinstance(first, WriteOp):
            pieces = [self._to_store(op, bounce) for op in ops if isinstance(op, WriteOp)]
            return self._transfer(ops, True, pieces)
        if not all(_plausible(op) for op in ops if isinstance(op, ReadOp)):
            if len(ops) > 1:
                raise OSError(errno.EINVAL, "a row that cannot be true")
            first.outcome = DiskOutcome.CORRUPT
            return None
        if needs_bounce(first):
            size = first.moved_bytes
            return self._transfer(ops, False, [(bounce(size), size)])
        return self._transfer(ops, False, [(op.address, op.moved_bytes) for op in ops])

    def end(self, ops: Sequence[BlockOp], address: int) -> None:
        """Give operations their outcome, all of whose bytes have moved. address: of the bounce buffer, if they had one.

        Does the rest of what `begin` began: verifies and decodes what was read.
        """
        for op in ops:
            op.outcome = DiskOutcome.OK if isinstance(op, WriteOp) else self._verified(op, address or op.address)

    def _transfer(self, ops: Sequence[BlockOp], writes: bool, pieces: list[Piece]) -> DiskTransfer:
        slot, total = ops[0].slot, sum(size for _, size in pieces)
        offset = slot & OFFSET_MASK
        if slot < 0 or offset % PAGE_BYTES or offset + total > self._directory.segment_bytes:
            raise OSError(errno.EINVAL, "a slot that is not in its segment")
        return DiskTransfer(ops, writes, self._directory.fd(slot >> REGION_SHIFT), offset, pieces, total)

    def _verified(self, op: ReadOp, address: int) -> DiskOutcome:
        stored = view_of(address, op.stored_length)
        seed = block_seed(op.key, op.fingerprint, op.length, op.codec, op.kind)
        if _checksum(stored, seed, op.kind) != op.checksum:
            return DiskOutcome.CORRUPT
        try:
            if op.codec & codecs.SEALED:
                self._open(op, stored)
            elif op.codec != codecs.RAW:
                codecs.decode(op.codec, stored, self._frame(op))
        except CipherError:
            return DiskOutcome.OTHER_KEY
        except codecs.CodecError as error:
            log.error("a block with a good checksum could not be decoded: %s", error)
            return DiskOutcome.CORRUPT
        return DiskOutcome.OK

    def _open(self, op: ReadOp, stored: memoryview) -> None:
        cipher, plain_codec, frame = self._directory.cipher, codecs.unsealed(op.codec), self._frame(op)
        if cipher is None:
            raise CipherError("it is encrypted, and this daemon has no nvme_key")
        owner = whose(op.key, op.fingerprint, op.length, op.codec)
        if plain_codec == codecs.RAW:
            cipher.open(stored, owner, frame)
            return
        encoded = memoryview(bytearray(len(stored) - OVERHEAD_BYTES))
        cipher.open(stored, owner, encoded)
        codecs.decode(plain_codec, encoded, frame)

    def _to_store(self, op: WriteOp, bounce: Callable[[int], int]) -> Piece:
        """The bytes for the disk, whole pages with zeroed padding; sets codec, stored length and checksum."""
        address = op.address
        if op.codec == codecs.RAW:
            op.stored_length = op.length
        else:
            address = self._to_encode(op, bounce)
        moved_bytes = op.moved_bytes
        padding = moved_bytes - op.stored_length
        if padding:
            view_of(address + op.stored_length, padding)[:] = bytes(padding)
        seed = block_seed(op.key, op.fingerprint, op.length, op.codec, op.kind)
        op.checksum = _checksum(view_of(address, op.stored_length), seed, op.kind)
        return address, moved_bytes

    def _to_encode(self, op: WriteOp, bounce: Callable[[int], int]) -> int:
        """Encode and seal a block as its codec asks; returns where the result is."""
        sealed, plain_codec = op.codec & codecs.SEALED, codecs.unsealed(op.codec)
        frame = view_of(op.address, op.length)
        encoded = codecs.encode(plain_codec, frame) if plain_codec != codecs.RAW else None
        if sealed:
            assert self._directory.cipher is not None
            op.codec = codecs.SEALED if encoded is None else op.codec
            plain = frame if encoded is None else encoded
            op.stored_length = len(plain) + OVERHEAD_BYTES
            address = bounce(op.moved_bytes)
            owner = whose(op.key, op.fingerprint, op.length, op.codec)
            self._directory.cipher.seal(plain, owner, view_of(address, op.stored_length))
            return address
        if encoded is None:
            op.codec, op.stored_length = codecs.RAW, op.length
            return op.address
        op.stored_length = len(encoded)
        address = bounce(op.moved_bytes)
        ctypes.memmove(address, encoded, len(encoded))  # a slice assignment holds the GIL
        return address

    def _frame(self, op: ReadOp) -> memoryview:
        if op.address == NOWHERE:
            if len(self._scratch) < op.length:
                self._scratch = bytearray(op.length)
            return memoryview(self._scratch)[: op.length]
        return view_of(op.address, op.length)


def view_of(address: int, length: int) -> memoryview:
    """Memory of this process as bytes."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def settle(ops: Sequence[AnyOp]) -> None:
    """Give each operation of a run that has none an outcome: it was not wanted, or something unforeseen came up."""
    for op in ops:
        if op.outcome is DiskOutcome.PENDING:
            op.outcome = DiskOutcome.CANCELLED if op.unwanted else DiskOutcome.IO_ERROR
            op.errno = 0 if op.unwanted else errno.EIO


def fail(op: AnyOp, error: OSError) -> None:
    """Its outcome is this error."""
    op.outcome = DiskOutcome.IO_ERROR
    op.errno = error.errno or errno.EIO


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


def _plausible(op: ReadOp) -> bool:
    """True if a row may be acted on: a stored length beyond the block's would write past its frame."""
    if op.kind not in KINDS or not codecs.known(op.codec):
        return False
    return plausible_length(op.codec, op.stored_length, op.length)


def plausible_length(codec: int, stored_length: int, length: int) -> bool:
    """True if a codec can have stored a block of `length` in that many bytes."""
    plain_length = stored_length - OVERHEAD_BYTES if codec & codecs.SEALED else stored_length
    return plain_length == length if codecs.unsealed(codec) == codecs.RAW else 0 < plain_length <= length


def _rest(pieces: Sequence[Piece], moved: int) -> list[Piece]:
    """The pieces without their first `moved` bytes."""
    rest = []
    for address, size in pieces:
        if moved < size:
            rest.append((address + moved, size - moved))
        moved = max(0, moved - size)
    return rest
