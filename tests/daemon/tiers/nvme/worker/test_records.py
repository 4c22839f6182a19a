"""What is said about blocks, and messages in parts: each comes back as it was."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

import pytest

from tiercache.daemon.tiers.nvme.disk.block_io import BlockOp, Call, DiskOutcome, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.worker import records
from tiercache.daemon.tiers.nvme.worker.packets import give_up_line, receive_now, send_now
from tiercache.daemon.tiers.nvme.worker.records import Tag

MOST = 16


def op(largest: bool, count: int, write: bool) -> BlockOp:
    """An operation with the largest or the smallest numbers that fit."""
    fields: dict[str, Any] = {
        "done": print,
        "slots": [(1 << 63) - 1 if largest else 0] * count,
        "addresses": [0] * count,
        "length": (1 << 32) - 1 if largest else 1,
        "keys": [bytes(range(place, place + 16)) for place in range(count)],
        "fingerprint": "",
        "codecs": [255 if largest else 0] * count,
        "kinds": [255 if largest else 0] * count,
    }
    numbers = {
        "stored_lengths": [(1 << 32) - 1 if largest else 0] * count,
        "checksums": [(1 << 64) - 1 if largest else 0] * count,
    }
    made = WriteOp(**fields) if write else ReadOp(**fields, **numbers)
    made.stored_lengths, made.checksums = numbers["stored_lengths"], numbers["checksums"]
    return made


def test_operations_and_their_ends_come_back_as_they_were_from_a_full_packet() -> None:
    ops = [op(bool(number % 2), MOST if number % 3 else 1, bool(number % 2)) for number in range(records.MAX_RECORDS)]
    frames = [[-1 if number % 2 else (1 << 63) - 1] * its.count for number, its in enumerate(ops)]
    packed = [records.pack_op(number, its, 7, frames[number]) for number, its in enumerate(ops)]
    data = records.packet(Tag.BLOCKS, packed)
    assert len(data) <= records.MAX_PACKET_BYTES
    for number, (its, record) in enumerate(zip(ops, records.op_records(data), strict=True)):
        assert record == (
            *(number, isinstance(its, WriteOp), its.priority, 7, its.length, frames[number], its.slots, its.keys),
            *(its.stored_lengths, its.checksums, its.codecs, its.kinds),
        )
    for number, its in enumerate(ops):
        its.outcomes = [records.OUTCOMES[(number + place) % len(records.OUTCOMES)] for place in range(its.count)]
        its.errnos = {place: 5 for place, outcome in enumerate(its.outcomes) if outcome is DiskOutcome.IO_ERROR}
        its.calls = [Call(2000 * place, place, 4096) for place in range(its.count)]
    data = records.packet(Tag.ENDS, [records.pack_end(number, its) for number, its in enumerate(ops)])
    assert len(data) <= records.MAX_PACKET_BYTES
    for number, (its, end) in enumerate(zip(ops, records.end_records(data), strict=True)):
        assert end == (*(number, its.outcomes, its.errnos, its.stored_lengths, its.checksums, its.codecs, its.calls),)


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
