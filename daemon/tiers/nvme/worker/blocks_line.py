"""In the worker process: takes blocks from the daemon, has them moved by a `DiskQueue`, and says what came of them."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority, DiskRun
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue

from . import records
from .packets import receive_now
from .records import BlockRecord, Tag
from .regions import MappedRegions

PACKETS_AT_ONCE = 8
"""Taken before those that are done are told."""
_MAX_U32 = 0xFFFFFFFF
_NO_RUN = DiskRun((), 0)


class _Read(ReadOp):
    __slots__ = ("number", "run")
    number: int
    run: DiskRun | None


class _Write(WriteOp):
    __slots__ = ("number", "run")
    number: int
    run: DiskRun | None


class _Queue(DiskQueue):
    """The daemon counts, so that nothing is lost with the process: here a run is only noted on its first block."""

    def _count(self, runs: Sequence[DiskRun]) -> None:
        for run in runs:
            run.ops[0].run = run  # type: ignore[union-attr]

    def _count_one(self, run: DiskRun, op: AnyOp) -> None:
        op.run = run  # type: ignore[union-attr]


class BlocksLine:
    """Serves one line until the daemon closes it. `run` is for one thread, which is the queue's event loop."""

    def __init__(self, line: socket.socket, directory: Directory, why_not_aio: str) -> None:
        self._line = line
        self._regions = MappedRegions()
        self._names: dict[int, str] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue = _Queue(directory, self._announce, why_not_aio=why_not_aio)
        self.io, self.io_reason = self._queue.io, self._queue.io_reason
        self._ended: list[bytes] = []
        self._look = select.epoll()
        self._look.register(line, select.EPOLLIN)
        self._look.register(self._wake, select.EPOLLIN)

    def run(self) -> None:
        """Serve. Blocks; raises OSError where the daemon has gone."""
        while self.turn():
            pass

    def turn(self, timeout_s: float | None = None) -> bool:
        """Wait until something comes or has ended, and serve that; False at the end of the line. Raises as `run`."""
        for fd, _ in self._look.poll(timeout_s):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                self._queue.deliver()
            elif not self._take_packets():
                return False
        self._tell_ended()
        return True

    def _announce(self, deliver: Callable[[], None]) -> None:
        # There is one `deliver`, the queue's own.
        os.eventfd_write(self._wake, 1)

    # --- what comes ------------------------------------------------------------------------------

    def _take_packets(self) -> bool:
        """Take what waits on the line; False at its end."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                data, fds = receive_now(self._line, records.MAX_PACKET_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(data, fds)
        return True

    def _take(self, data: bytes, fds: list[int]) -> None:
        match records.tag_of(data):
            case Tag.BLOCKS:
                self._submit(records.block_records(data))
            case Tag.NAME:
                number, fingerprint = records.name_of(data)
                self._names[number] = fingerprint
            case Tag.REGION:
                region_id, size_bytes = records.region_of(data)
                self._regions.add(region_id, fds[0], size_bytes)
            case Tag.CANCEL:
                priority = records.cancelled_priority(data)
                self._queue.cancel_queued(None if priority is None else DiskPriority(priority))
            case Tag.PING:
                self._line.send(records.pong_packet(self._queue.oldest_age_s()))
            case other:
                raise AssertionError(f"the daemon does not send {other.name}")

    def _submit(self, blocks: Iterator[BlockRecord]) -> None:
        for priority, some in groupby(blocks, key=lambda block: block.priority):
            ops = [self._op(block) for block in some]
            taken = self._queue.submit_many(ops, DiskPriority(priority))
            assert taken == len(ops), "the daemon's credit is below the queue's limits"

    def _op(self, block: BlockRecord) -> AnyOp:
        address = NOWHERE if block.frame < 0 else self._regions.address_of(block.frame)
        op: _Read | _Write
        if block.write:
            op = _Write(
                done=self._end,
                slot=block.slot,
                address=address,
                length=block.length,
                key=block.key,
                fingerprint=self._names[block.name],
                codec=block.codec,
                kind=block.kind,
            )
        else:
            op = _Read(
                done=self._end,
                slot=block.slot,
                address=address,
                length=block.length,
                key=block.key,
                fingerprint=self._names[block.name],
                stored_length=block.stored_length,
                checksum=block.checksum,
                codec=block.codec,
                kind=block.kind,
            )
        op.number, op.run = block.number, None
        return op

    # --- what goes back --------------------------------------------------------------------------

    def _end(self, op: _Read | _Write) -> None:
        run = op.run or _NO_RUN
        self._ended.append(
            records.END.pack(
                op.number,
                records.NUMBER_OF[op.outcome],
                op.codec,
                op.errno,
                op.stored_length,
                op.checksum,
                min(run.io_ns // 1000, _MAX_U32),
                run.calls,
                min(run.io_bytes, _MAX_U32),
            )
        )

    def _tell_ended(self) -> None:
        for first in range(0, len(self._ended), records.MAX_RECORDS):
            self._line.send(records.packet(Tag.ENDS, self._ended[first : first + records.MAX_RECORDS]))
        self._ended.clear()
