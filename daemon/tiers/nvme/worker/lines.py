"""In the worker process: its two lines. One has blocks moved by a `DiskQueue`, the other has rows written."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import WAITING_BATCHES, Loading, RowBatch, pack_placed
from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority, DiskRun
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue

from . import messages, records
from .packets import receive_message, receive_now, send_message
from .records import BlockRecord, Tag
from .regions import MappedRegions

# --- blocks ------------------------------------------------------------------------------------------

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
        op = (_Write if block.write else _Read)(
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


# --- rows --------------------------------------------------------------------------------------------

LOOK_S = 0.25
"""How often the state of the catalog is looked at while nothing is asked of it."""


class RowsLine:
    """Serves one line until the daemon closes it. `run` is for one thread; the catalog's threads answer."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._catalog: Catalog | None = None
        self._sending = threading.RLock()
        # Guarded by _sending:
        self._answers: list[tuple[int, int, bool]] = []
        self._last: messages.Status | None = None  # that was sent
        self._loading: Loading | None = None
        self._room = WAITING_BATCHES
        self._all_sent = False

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """For the catalog: its callbacks run at once, in its threads, and the answers of a batch go together."""
        with self._sending:
            callback(*args)
            self._send_answers()

    def run(self, catalog: Catalog) -> None:
        """Serve. Blocks; raises OSError where the daemon has gone."""
        self._catalog = catalog
        look = select.poll()
        look.register(self._line, select.POLLIN)
        while True:
            if not look.poll(1000 * LOOK_S):
                self._send_status()
                continue
            message = receive_message(self._line)
            if message is None:
                return
            self._take(catalog, messages.decode_row_order(message))

    def _take(self, catalog: Catalog, order: messages.RowOrder) -> None:
        match order:
            case messages.RowChanges(first, changes):
                for number, (method, arguments) in enumerate(changes, first):
                    getattr(catalog, method)(*arguments, done=partial(self._answered, number))
            case messages.LoadRows(batch_rows):
                loading = catalog.load(self._send_rows, batch_rows)
                with self._sending:
                    self._loading = loading
                self._send_rows()
            case messages.MoreRows():
                with self._sending:
                    self._room += 1
                self._send_rows()
            case messages.StopRows():
                if self._loading is not None:
                    self._loading.cancel()
            case messages.CloseCatalog(timeout_s):
                written = catalog.close(timeout_s)
                self._send(messages.CatalogClosed(written))

    # --- answers ---------------------------------------------------------------------------------

    def _answered(self, number: int, ok: bool) -> None:
        runs = self._answers
        if runs and runs[-1][2] is ok and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, ok)
        else:
            runs.append((number, 1, ok))

    def _send_answers(self) -> None:
        if self._answers:
            self._send(messages.Answers(self._answers))
            self._answers = []
            self._send_status()

    def _send_status(self) -> None:
        catalog = self._catalog
        if catalog is None:
            return
        with self._sending:
            # Looked at in here: once a refusal has been told, an older state without an error must not follow it.
            status = messages.Status(catalog.error, catalog.bytes_on_disk(), catalog.written_bytes)
            if status != self._last:
                self._last = status
                self._send(status)

    # --- rows ------------------------------------------------------------------------------------

    def _send_rows(self) -> None:
        """Send batches that are ready while the daemon has room for them."""
        with self._sending:
            loading = self._loading
            if loading is None or self._all_sent:
                return
            while self._room and (batch := loading.next_batch()) is not None:
                self._room -= 1
                self._send(messages.Rows(_packed(batch)))
            if loading.finished:
                self._all_sent = True
                self._send(messages.RowsEnd(loading.damaged, loading.error))

    def _send(self, report: messages.RowReport) -> None:
        with self._sending:
            send_message(self._line, messages.encode(report))


def _packed(batch: RowBatch) -> bytes:
    return b"".join(map(pack_placed, batch.places, zip(*batch.fields, strict=True)))
