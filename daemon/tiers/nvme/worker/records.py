"""Blocks on their way to a worker process and back: records of operations, several in one packet.

    packet      tag u8 | 0 u8 | count u16 | records                    little endian
    operation   what is read or written: a head, then a column for each field of its blocks      daemon to process
    end         what came of it, likewise                                                        process to daemon

A record names the operation by the number that the daemon gave it; the same number comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache
from itertools import chain
from typing import NamedTuple

from tiercache.daemon.tiers.nvme.disk.block_io import BlockOp, Call, DiskOutcome, WriteOp
from tiercache.protocol.frames import KEY_BYTES

HEADER = struct.Struct("<BxH")
MAX_RECORDS = 16
"""In one packet: of operations that are as large as they come, with room to spare."""
MAX_PACKET_BYTES = 16384


class Tag(IntEnum):
    """What a packet on the line of blocks contains."""

    BLOCKS = 1
    NAME = 2
    """The fingerprint of a namespace, under the number that records use."""
    REGION = 3
    """A region of the arena; its file comes with the packet."""
    CANCEL = 4
    """End what has not started, of the priority in `count`."""
    PING = 5
    PONG = 6
    ENDS = 7


class OpRecord(NamedTuple):
    """One operation: `write` or read, into or from `frames` (`region << 48 | offset`; NO_FRAME: only verify it)."""

    number: int
    write: int
    priority: int
    name: int
    length: int
    frames: list[int]
    slots: list[int]
    keys: list[bytes]
    stored_lengths: list[int]
    checksums: list[int]
    codecs: list[int]
    kinds: list[int]


class EndRecord(NamedTuple):
    """What came of an operation."""

    number: int
    outcomes: list[DiskOutcome]
    errnos: dict[int, int]
    stored_lengths: list[int]
    checksums: list[int]
    codecs: list[int]
    calls: list[Call]


OUTCOMES = tuple(DiskOutcome)
_NUMBER_OF = {outcome: number for number, outcome in enumerate(OUTCOMES)}
_OP = struct.Struct("<QBBHII")
_END = struct.Struct("<QHHH")
_ERRNO = struct.Struct("<HH")
_NAME = struct.Struct("<I")
_REGION = struct.Struct("<IQ")
_AGE = struct.Struct("<d")
_MAX_U32 = 0xFFFFFFFF


@cache
def _op_columns(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q{count}q{count}I{count}Q{count * KEY_BYTES}s{count}s{count}s")


@cache
def _end_columns(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I{count}Q{count}s{count}s")


@cache
def _calls(count: int) -> struct.Struct:
    return struct.Struct(f"<{3 * count}I")


def pack_op(number: int, op: BlockOp, name: int, frames: Sequence[int]) -> bytes:
    """An operation, with the places of its frames and the number of its fingerprint."""
    count = len(frames)
    return _OP.pack(number, isinstance(op, WriteOp), op.priority, count, name, op.length) + _op_columns(count).pack(
        *frames,
        *op.slots,
        *op.stored_lengths,
        *op.checksums,
        b"".join(op.keys),
        bytes(op.codecs),
        bytes(op.kinds),
    )


def op_records(data: bytes) -> Iterator[OpRecord]:
    """The operations of a packet."""
    at = HEADER.size
    for _ in range(count_of(data)):
        number, write, priority, count, name, length = _OP.unpack_from(data, at)
        columns = _op_columns(count)
        *numbers, keys, codecs, kinds = columns.unpack_from(data, at + _OP.size)
        frames, slots, stored, checksums = (numbers[first : first + count] for first in range(0, 4 * count, count))
        split = [keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES)]
        yield OpRecord(
            number, write, priority, name, length, frames, slots, split, stored, checksums, [*codecs], [*kinds]
        )
        at += _OP.size + columns.size


def pack_end(number: int, op: BlockOp) -> bytes:
    """What came of an operation."""
    count, number_of = op.count, _NUMBER_OF
    calls = [(min(call.io_ns // 1000, _MAX_U32), call.calls, min(call.io_bytes, _MAX_U32)) for call in op.calls]
    return b"".join(
        [
            _END.pack(number, count, len(op.errnos), len(calls)),
            _end_columns(count).pack(
                *op.stored_lengths,
                *op.checksums,
                bytes(op.codecs),
                bytes([number_of[outcome] for outcome in op.outcomes]),
            ),
            *map(_ERRNO.pack, op.errnos, op.errnos.values()),
            _calls(len(calls)).pack(*chain.from_iterable(calls)),
        ]
    )


def end_records(data: bytes) -> Iterator[EndRecord]:
    """The ends of a packet."""
    at = HEADER.size
    for _ in range(count_of(data)):
        number, count, failed, calls = _END.unpack_from(data, at)
        at += _END.size
        columns = _end_columns(count)
        *numbers, codecs, outcomes = columns.unpack_from(data, at)
        at += columns.size
        errnos = dict(_ERRNO.unpack_from(data, at + _ERRNO.size * place) for place in range(failed))
        at += _ERRNO.size * failed
        values = _calls(calls).unpack_from(data, at)
        at += 4 * len(values)
        yield EndRecord(
            number,
            [OUTCOMES[outcome] for outcome in outcomes],
            errnos,
            numbers[:count],
            numbers[count:],
            [*codecs],
            [Call(1000 * us, some, io_bytes) for us, some, io_bytes in zip(*[iter(values)] * 3, strict=True)],
        )


def packet(tag: Tag, records: Sequence[bytes]) -> bytes:
    """At most `MAX_RECORDS` packed records as one packet."""
    return HEADER.pack(tag, len(records)) + b"".join(records)


def tag_of(data: bytes) -> Tag:
    """Raises ValueError for a packet of another release."""
    return Tag(data[0])


def count_of(data: bytes) -> int:
    """The number in the header."""
    return int.from_bytes(data[2:4], "little")


def name_packet(number: int, fingerprint: str) -> bytes:
    """Tells the process a fingerprint."""
    return HEADER.pack(Tag.NAME, 0) + _NAME.pack(number) + fingerprint.encode()


def name_of(data: bytes) -> tuple[int, str]:
    """Inverse of `name_packet`."""
    return _NAME.unpack_from(data, HEADER.size)[0], data[HEADER.size + _NAME.size :].decode()


def region_packet(region_id: int, size_bytes: int) -> bytes:
    """Tells the process of a region, whose file is sent with it."""
    return HEADER.pack(Tag.REGION, 0) + _REGION.pack(region_id, size_bytes)


def region_of(data: bytes) -> tuple[int, int]:
    """Inverse of `region_packet`: id and bytes."""
    region_id, size_bytes = _REGION.unpack_from(data, HEADER.size)
    return region_id, size_bytes


def cancel_packet(priority: int | None) -> bytes:
    """Cancels what has not started, of one priority or of all."""
    return HEADER.pack(Tag.CANCEL, 0xFFFF if priority is None else priority)


def cancelled_priority(data: bytes) -> int | None:
    """Inverse of `cancel_packet`."""
    count = count_of(data)
    return None if count == 0xFFFF else count


def pong_packet(oldest_age_s: float) -> bytes:
    """Says that the process is alive, and how long the longest-running operation has been with the disk."""
    return HEADER.pack(Tag.PONG, 0) + _AGE.pack(oldest_age_s)


def pong_age_s(data: bytes) -> float:
    """Inverse of `pong_packet`."""
    age_s: float = _AGE.unpack_from(data, HEADER.size)[0]
    return age_s


PING = HEADER.pack(Tag.PING, 0)
