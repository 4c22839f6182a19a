"""In the worker process: its two lines. One has blocks moved by a `DiskQueue`, the other has rows written."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import WAITING_BATCHES, Loading, RowBatch, pack_placed
from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, BlockOp, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue

from . import messages, records
from .packets import receive_message, receive_now, send_message
from .records import OpRecord, Tag
from .regions import MappedRegions

# --- blocks ------------------------------------------------------------------------------------------

PACKETS_AT_ONCE = 8
"""Taken before those that are done are told."""


class _Queue(DiskQueue):
    """The daemon counts, so that nothing is lost with the process."""

    def _count(self, ops: Sequence[AnyOp]) -> None:
        """Nothing is counted here."""


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
                self._submit(records.op_records(data))
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

    def _submit(self, asked: Iterator[OpRecord]) -> None:
        for priority, some in groupby(asked, key=lambda record: record.priority):
            ops = [self._op(record) for record in some]
            taken = self._queue.submit_many(ops, DiskPriority(priority))
            assert taken == len(ops), "the daemon's credit is below the queue's limits"

    def _op(self, asked: OpRecord) -> AnyOp:
        address_of = self._regions.address_of
        fields: dict[str, Any] = {
            "done": partial(self._end, asked.number),
            "slots": asked.slots,
            "addresses": [NOWHERE if frame < 0 else address_of(frame) for frame in asked.frames],
            "length": asked.length,
            "keys": asked.keys,
            "fingerprint": self._names[asked.name],
            "codecs": asked.codecs,
            "kinds": asked.kinds,
        }
        if asked.write:
            return WriteOp(**fields)
        return ReadOp(**fields, stored_lengths=asked.stored_lengths, checksums=asked.checksums)

    # --- what goes back --------------------------------------------------------------------------

    def _end(self, number: int, op: BlockOp) -> None:
        self._ended.append(records.pack_end(number, op))

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
