"""In the worker process: passes changes of rows to the catalog, and its answers and rows to the daemon."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from functools import partial

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import WAITING_BATCHES, Loading, Row, RowBatch, pack_placed

from . import messages
from .packets import receive_message, send_message

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
                    if method == "insert":
                        arguments[1] = Row._make(arguments[1])
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
