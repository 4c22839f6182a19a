"""Blocks on their way to a worker process and back: fixed records, many in one packet.

    packet    tag u8 | 0 u8 | count u16 | records                      little endian
    block     64 bytes: what is read or written                        daemon to process
    end       36 bytes: what came of it                                process to daemon

A record names the block by the number that the daemon gave it; the same number comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome

HEADER = struct.Struct("<BxH")
MAX_RECORDS = 64
"""In one packet: a packet costs 5 us, a record in a full one half a microsecond."""
MAX_PACKET_BYTES = 8192


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


class BlockRecord(NamedTuple):
    """One block: `write` or read, into or from `frame` (`region << 48 | offset`; NO_FRAME: only verify it)."""

    number: int
    write: int
    codec: int
    kind: int
    priority: int
    frame: int
    slot: int
    key: bytes
    name: int
    length: int
    stored_length: int
    checksum: int


EndRecord = tuple[int, int, int, int, int, int, int, int, int]
"""What came of a block: its number, outcome, codec, errno, stored length and checksum. The last three are of the run
that it was in, on its first block, else 0: microseconds in system calls, how many, bytes moved."""
BLOCK = struct.Struct("<QBBBBqq16sIIIQ")
END = struct.Struct("<QBBHIQIII")
OUTCOMES = tuple(DiskOutcome)
NUMBER_OF = {outcome: number for number, outcome in enumerate(OUTCOMES)}
_NAME = struct.Struct("<I")
_REGION = struct.Struct("<IQ")
_AGE = struct.Struct("<d")
assert BLOCK.size == 64


def packet(tag: Tag, records: Sequence[bytes]) -> bytes:
    """At most `MAX_RECORDS` packed records as one packet."""
    return HEADER.pack(tag, len(records)) + b"".join(records)


def tag_of(data: bytes) -> Tag:
    """Raises ValueError for a packet of another release."""
    return Tag(data[0])


def count_of(data: bytes) -> int:
    """The number in the header."""
    return int.from_bytes(data[2:4], "little")


def block_records(data: bytes) -> Iterator[BlockRecord]:
    """The records of a packet of blocks."""
    return map(BlockRecord._make, BLOCK.iter_unpack(memoryview(data)[HEADER.size :]))


def end_records(data: bytes) -> Iterator[EndRecord]:
    """The records of a packet of ends."""
    return END.iter_unpack(memoryview(data)[HEADER.size :])


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
