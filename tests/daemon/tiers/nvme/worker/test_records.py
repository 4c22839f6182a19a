"""What is said about blocks, and messages in parts: each comes back as it was."""

from __future__ import annotations

import os
import socket
from collections import deque

import pytest

from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome
from tiercache.daemon.tiers.nvme.worker import records
from tiercache.daemon.tiers.nvme.worker.packets import give_up_line, receive_now, send_now
from tiercache.daemon.tiers.nvme.worker.records import BlockRecord, Tag

LARGEST = BlockRecord(
    number=(1 << 64) - 1,
    write=1,
    codec=255,
    kind=255,
    priority=2,
    frame=(1 << 63) - 1,
    slot=(1 << 63) - 1,
    key=bytes(range(16)),
    name=(1 << 32) - 1,
    length=(1 << 32) - 1,
    stored_length=(1 << 32) - 1,
    checksum=(1 << 64) - 1,
)


def test_the_largest_records_in_a_full_packet() -> None:
    least = LARGEST._replace(number=0, write=0, frame=-1, slot=0, checksum=0)  # rule: a NamedTuple's own
    blocks = [LARGEST, least] * (records.MAX_RECORDS // 2)
    data = records.packet(Tag.BLOCKS, [records.BLOCK.pack(*block) for block in blocks])
    assert len(data) <= records.MAX_PACKET_BYTES
    assert list(records.block_records(data)) == blocks
    ends = [(number, records.NUMBER_OF[outcome], *[255] * 7) for number, outcome in enumerate(DiskOutcome)]
    data = records.packet(Tag.ENDS, [records.END.pack(*end) for end in ends])
    assert [records.OUTCOMES[end[1]] for end in records.end_records(data)] == list(DiskOutcome)


def test_a_descriptor_comes_with_its_packet_and_a_full_line_blocks_nobody() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open("/proc/self/stat", "rb") as file:
        send_now(ours, b"one", file.fileno())
        data, (fd,) = receive_now(theirs, 10)
        assert data == b"one"
        assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
        assert not os.get_inheritable(fd)
        os.close(fd)
        with pytest.raises(BlockingIOError):
            deque((send_now(ours, bytes(100), -1) for _ in range(100_000)), maxlen=0)
        give_up_line(ours, OSError(109, "too many references"))
        assert ours.recv(10, socket.MSG_DONTWAIT) == b"", "its reader finds its end"
