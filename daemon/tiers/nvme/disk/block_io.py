"""Operations on runs of blocks, and the forms of a block: what is done before it is written, and after it was read.

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
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

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
    """`op.errnos` says which. After a failed read the frame, after a failed write the slot, holds undefined bytes."""
    CANCELLED = "cancelled"
    """Never started; frame and slot are as they were."""
    ABANDONED = "abandoned"
    """Only from `DiskQueue.stop`: still in the kernel at the deadline. Never reuse its frame or slot."""


class Call(NamedTuple):
    """What a part of an operation took: nanoseconds in system calls (or in the kernel), their number, bytes moved."""

    io_ns: int
    calls: int
    io_bytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class Op:
    """Fields of every operation. The caller sets `done`, the queue the rest. `done(op)` is called once, on the loop."""

    done: Callable[..., object]
    held_bytes: int = 0
    submitted_ns: int = 0
    priority: int = 0
    begun: int = 0
    """Blocks that a carrier has taken; those after them can still be cancelled."""
    ended: int = 0
    """Blocks that have an outcome."""


@dataclass(slots=True, eq=False, kw_only=True)
class BlocksOp(Op):
    """Fields of operations on a run of blocks, as one list each: as many slots, addresses and so on as keys.

    slots: `segment_id << 48 | byte offset`, 4096-aligned. addresses: of the frames in this process, 4096-aligned; a
    frame is at least `round_up(max(length, stored_length if raw), 4096)` bytes. length: of each block.
    """

    slots: list[int]
    addresses: list[int]
    length: int
    keys: list[bytes]
    fingerprint: str
    codecs: list[int]
    kinds: list[int]
    stored_lengths: list[int]
    checksums: list[int]
    outcomes: list[DiskOutcome] = field(init=False)
    """Of each block. Those of a run need not be the same."""
    errnos: dict[int, int] = field(init=False)
    """Of blocks that are IO_ERROR, by their place in the run."""
    sizes: list[int] = field(init=False)
    """Bytes of each block on the disk, with padding; of a write at most that, until it has run."""
    calls: list[Call] = field(init=False)
    """One for each part of the run that was moved by itself."""

    def __post_init__(self) -> None:
        self.outcomes, self.errnos, self.calls = [DiskOutcome.PENDING] * len(self.keys), {}, []
        self.sizes = self._sizes()

    @abstractmethod
    def _sizes(self) -> list[int]: ...

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.keys)

    @property
    def moved_bytes(self) -> int:
        """Bytes on the disk, with padding; of a write at most that, until it has run."""
        return sum(self.sizes)

    @property
    def is_well(self) -> bool:
        """True if the outcome of each block is OK."""
        return self.outcomes.count(DiskOutcome.OK) == len(self.outcomes)

    def end(self, first: int, end: int, outcome: DiskOutcome) -> None:
        """The outcome of some of the blocks."""
        self.outcomes[first:end] = [outcome] * (end - first)


@dataclass(slots=True, eq=False, kw_only=True)
class ReadOp(BlocksOp):
    """Read blocks from their slots into frames.

    addresses: NOWHERE for a block that is read to be verified, into memory of the carrier. stored_lengths, codecs,
    checksums, kinds: from the rows.
    """

    def _sizes(self) -> list[int]:
        return [(stored + PAGE_BYTES - 1) & -PAGE_BYTES for stored in self.stored_lengths]


@dataclass(slots=True, eq=False, kw_only=True)
class WriteOp(BlocksOp):
    """Write blocks from their frames into slots of at least `round_up(length, 4096)` bytes (see
    `cipher.sealed_bytes`).

    codecs are the requested ones; of a block that is OK its codec, stored length and checksum are what belongs in the
    row (raw when encoding does not save a page). The frame's bytes behind `length`, up to the next multiple of 4096,
    are zeroed.
    """

    stored_lengths: list[int] = field(init=False)
    checksums: list[int] = field(init=False)

    def _sizes(self) -> list[int]:
        self.stored_lengths, self.checksums = [0] * len(self.keys), [0] * len(self.keys)
        return [(self.length + PAGE_BYTES - 1) & -PAGE_BYTES] * len(self.keys)

    def take_forms(self, codecs: list[int], stored_lengths: list[int], checksums: list[int]) -> None:
        """Another process has written the blocks, in these forms."""
        self.codecs, self.stored_lengths, self.checksums = codecs, stored_lengths, checksums
        self.sizes = [(stored + PAGE_BYTES - 1) & -PAGE_BYTES for stored in stored_lengths]


@dataclass(slots=True, eq=False, kw_only=True)
class TaskOp(Op):
    """Anything else that blocks on this disk (making and removing segments). OSError is IO_ERROR."""

    call: Callable[[], object]
    outcome: DiskOutcome = DiskOutcome.PENDING
    errno: int = 0

    count = 1
    moved_bytes = 0

    @property
    def is_well(self) -> bool:
        """True if its outcome is OK."""
        return self.outcome is DiskOutcome.OK

    def end(self, first: int, end: int, outcome: DiskOutcome) -> None:
        """Its outcome."""
        self.outcome = outcome


BlockOp = ReadOp | WriteOp
AnyOp = BlockOp | TaskOp
Piece = tuple[int, int]
"""Memory of this process: address and bytes."""


@dataclass(slots=True, eq=False)
class DiskTransfer:
    """Bytes of a part of an operation on their way, all of which move before it ends, in as many system calls as that
    takes."""

    op: BlockOp
    first: int
    end: int
    """Which of its blocks: `first ..< end`."""
    fd: int
    offset: int
    """Of the next byte, in the segment."""
    pieces: Sequence[Piece]
    """What is left."""
    left: int
    """Bytes in them."""
    stuck: int = 0

    @property
    def writes(self) -> bool:
        """True if it moves bytes to the disk."""
        return isinstance(self.op, WriteOp)

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


def part_end(op: BlockOp, first: int, most: int, most_bytes: int) -> int:
    """Where a part of an operation ends that begins at block `first` and is one transfer: raw blocks that adjoin.

    At most so many blocks and bytes, but one block at least.
    """
    end = first + 1
    if needs_bounce(op, first):
        return end
    slots, sizes = op.slots, op.sizes
    size, limit = sizes[first], min(first + most, len(slots))
    while end < limit and slots[end] == slots[end - 1] + sizes[end - 1]:
        size += sizes[end]
        if size > most_bytes or needs_bounce(op, end):
            break
        end += 1
    return end


def is_one_part(op: BlockOp) -> bool:
    """True if all of an operation may be one transfer, as far as the first and last block tell."""
    return not needs_bounce(op, 0) and op.slots[-1] - op.slots[0] == sum(op.sizes[:-1])


def needs_bounce(op: BlockOp, place: int) -> bool:
    """True if a block does not move straight between its frame and the disk; it is a part of its own then."""
    return op.codecs[place] != codecs.RAW or op.addresses[place] == NOWHERE


def bounce_bytes(op: BlockOp, place: int) -> int:
    """The most bytes of a bounce buffer that a block can take."""
    if isinstance(op, ReadOp):
        plausible = plausible_length(op.codecs[place], op.stored_lengths[place], op.length)
        return op.sizes[place] if plausible else 0
    return round_up(op.length + OVERHEAD_BYTES, PAGE_BYTES)


class BlockForms:
    """What is done to blocks before and after their transfer. For one thread; takes what the CPU takes."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._scratch = bytearray()  # where blocks that are only verified are decoded

    def begin(self, op: BlockOp, first: int, end: int, bounce: Callable[[int], int]) -> DiskTransfer | None:
        """The transfer of blocks `first ..< end`, which adjoin; None when the outcome is known without. Raises OSError.

        bounce: the address of as many bytes, at a page, which stay until the transfer has ended.
        """
        if isinstance(op, WriteOp):
            pieces = [self._to_store(op, place, bounce) for place in range(first, end)]
        elif not all(_plausible(op, place) for place in range(first, end)):
            if end - first > 1:
                raise OSError(errno.EINVAL, "a row that cannot be true")
            op.outcomes[first] = DiskOutcome.CORRUPT
            return None
        elif needs_bounce(op, first):
            pieces = [(bounce(op.sizes[first]), op.sizes[first])]
        else:
            pieces = list(zip(op.addresses[first:end], op.sizes[first:end], strict=True))
        slot, total = op.slots[first], sum(size for _, size in pieces)
        offset = slot & OFFSET_MASK
        if slot < 0 or offset % PAGE_BYTES or offset + total > self._directory.segment_bytes:
            raise OSError(errno.EINVAL, "a slot that is not in its segment")
        return DiskTransfer(op, first, end, self._directory.fd(slot >> REGION_SHIFT), offset, pieces, total)

    def end(self, transfer: DiskTransfer, address: int) -> None:
        """Give blocks their outcome, all of whose bytes have moved. address: of the bounce buffer, if they had one.

        Does the rest of what `begin` began: verifies and decodes what was read.
        """
        op, first, end = transfer.op, transfer.first, transfer.end
        if isinstance(op, WriteOp):
            op.end(first, end, DiskOutcome.OK)
            return
        for place in range(first, end):
            op.outcomes[place] = self._verified(op, place, address or op.addresses[place])

    def _verified(self, op: ReadOp, place: int, address: int) -> DiskOutcome:
        key, codec, kind = op.keys[place], op.codecs[place], op.kinds[place]
        stored = view_of(address, op.stored_lengths[place])
        seed = block_seed(key, op.fingerprint, op.length, codec, kind)
        if _checksum(stored, seed, kind) != op.checksums[place]:
            return DiskOutcome.CORRUPT
        try:
            if codec & codecs.SEALED:
                self._open(op, place, stored)
            elif codec != codecs.RAW:
                codecs.decode(codec, stored, self._frame(op, place))
        except CipherError:
            return DiskOutcome.OTHER_KEY
        except codecs.CodecError as error:
            log.error("a block with a good checksum could not be decoded: %s", error)
            return DiskOutcome.CORRUPT
        return DiskOutcome.OK

    def _open(self, op: ReadOp, place: int, stored: memoryview) -> None:
        codec, cipher, frame = op.codecs[place], self._directory.cipher, self._frame(op, place)
        if cipher is None:
            raise CipherError("it is encrypted, and this daemon has no nvme_key")
        owner, plain_codec = whose(op.keys[place], op.fingerprint, op.length, codec), codecs.unsealed(codec)
        if plain_codec == codecs.RAW:
            cipher.open(stored, owner, frame)
            return
        encoded = memoryview(bytearray(len(stored) - OVERHEAD_BYTES))
        cipher.open(stored, owner, encoded)
        codecs.decode(plain_codec, encoded, frame)

    def _to_store(self, op: WriteOp, place: int, bounce: Callable[[int], int]) -> Piece:
        """The bytes for the disk, whole pages with zeroed padding; sets codec, stored length and checksum."""
        address, stored_length = op.addresses[place], op.length
        if op.codecs[place] != codecs.RAW:
            address, stored_length = self._to_encode(op, place, bounce)
        moved_bytes = op.sizes[place] = (stored_length + PAGE_BYTES - 1) & -PAGE_BYTES
        op.stored_lengths[place] = stored_length
        if moved_bytes > stored_length:
            view_of(address + stored_length, moved_bytes - stored_length)[:] = bytes(moved_bytes - stored_length)
        kind = op.kinds[place]
        seed = block_seed(op.keys[place], op.fingerprint, op.length, op.codecs[place], kind)
        op.checksums[place] = _checksum(view_of(address, stored_length), seed, kind)
        return address, moved_bytes

    def _to_encode(self, op: WriteOp, place: int, bounce: Callable[[int], int]) -> Piece:
        """Encode and seal a block as its codec asks; returns where the result is, and its bytes."""
        codec = op.codecs[place]
        sealed, plain_codec = codec & codecs.SEALED, codecs.unsealed(codec)
        frame = view_of(op.addresses[place], op.length)
        encoded = codecs.encode(plain_codec, frame) if plain_codec != codecs.RAW else None
        if sealed:
            assert self._directory.cipher is not None
            if encoded is None:
                op.codecs[place] = codec = codecs.SEALED
            plain = frame if encoded is None else encoded
            stored_length = len(plain) + OVERHEAD_BYTES
            address = bounce(round_up(stored_length, PAGE_BYTES))
            owner = whose(op.keys[place], op.fingerprint, op.length, codec)
            self._directory.cipher.seal(plain, owner, view_of(address, stored_length))
            return address, stored_length
        if encoded is None:
            op.codecs[place] = codecs.RAW
            return op.addresses[place], op.length
        address = bounce(round_up(len(encoded), PAGE_BYTES))
        ctypes.memmove(address, encoded, len(encoded))  # a slice assignment holds the GIL
        return address, len(encoded)

    def _frame(self, op: ReadOp, place: int) -> memoryview:
        if op.addresses[place] == NOWHERE:
            if len(self._scratch) < op.length:
                self._scratch = bytearray(op.length)
            return memoryview(self._scratch)[: op.length]
        return view_of(op.addresses[place], op.length)


def view_of(address: int, length: int) -> memoryview:
    """Memory of this process as bytes."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def settle(op: AnyOp, first: int, end: int) -> None:
    """Give each of these blocks that has none an outcome: something unforeseen came up."""
    for place in range(first, end):
        if (op.outcome if isinstance(op, TaskOp) else op.outcomes[place]) is DiskOutcome.PENDING:
            fail(op, place, OSError(errno.EIO, ""))


def fail(op: AnyOp, place: int, error: OSError) -> None:
    """The outcome of a block is this error."""
    op.end(place, place + 1, DiskOutcome.IO_ERROR)
    if isinstance(op, TaskOp):
        op.errno = error.errno or errno.EIO
    else:
        op.errnos[place] = error.errno or errno.EIO


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


def _plausible(op: ReadOp, place: int) -> bool:
    """True if a row may be acted on: a stored length beyond the block's would write past its frame."""
    if op.kinds[place] not in KINDS or not codecs.known(op.codecs[place]):
        return False
    return plausible_length(op.codecs[place], op.stored_lengths[place], op.length)


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
