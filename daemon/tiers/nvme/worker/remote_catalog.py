"""The catalog of a directory whose files belong to a worker process. Changes that it has not confirmed are kept.

    insert, delete, ... ─► _unsent ─► (packets) ─► the process's Catalog
                              └► _open: until the answer; sent again, in order, to the next process

A change does the same when it is made twice, so one that the last process has committed without saying so is no harm.
What a failing disk has refused for now and keeps (see `Catalog`) is kept here too, until the catalog works again.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from tiercache.daemon.tiers.nvme.catalog.catalog import CALLBACKS_AT_ONCE, MAX_PENDING
from tiercache.daemon.tiers.nvme.catalog.changes import Done
from tiercache.daemon.tiers.nvme.catalog.rows import RowBatch, RowFields, unpack_placed

from . import messages
from .packets import PART_BYTES, Joiner, give_up_line, parts_of

log = logging.getLogger("tiercache.daemon")

ROWS_AT_ONCE = 512
"""In one message, unless a single change has more."""
_ROWS = frozenset(("insert", "delete"))
_BURIALS = frozenset(("remove_tombstone", "forget_namespaces"))


class _Change(NamedTuple):
    method: str
    arguments: list[Any]
    done: Done | None
    posted_s: float
    rows: int


class RemoteLoading:
    """Rows that the process sends; see `Loading`. Event loop only."""

    def __init__(self, say: Callable[[messages.RowOrder], None]) -> None:
        self.damaged = 0
        self.error = ""
        self.over = False
        """True if the process has sent all of them."""
        self.ready: deque[bytes] = deque()
        self._say = say

    def next_batch(self) -> RowBatch | None:
        """The next batch; None when none is ready now, or ever again (`finished`)."""
        if not self.ready:
            return None
        self._say(messages.MoreRows())
        return unpack_placed(self.ready.popleft())

    @property
    def finished(self) -> bool:
        """Every batch has been taken and no more will come."""
        return self.over and not self.ready

    def cancel(self) -> None:
        """Stop reading; waiting batches are dropped."""
        self.ready.clear()
        self._say(messages.StopRows())


class RemoteCatalog:
    """See `Catalog`. Event loop only, but for `close`.

    `soon(callback)`: calls it on the loop, and not in here: at once, or a little later, when more has come.
    `from_thread(callback)`: `loop.call_soon_threadsafe`.
    """

    def __init__(
        self,
        soon: Callable[[Callable[[], None]], object],
        from_thread: Callable[[Callable[[], None]], object],
        wait_for_room: Callable[[socket.socket, Callable[[], None] | None], None],
    ) -> None:
        self.error = ""
        self.written_bytes = 0
        self.loading: RemoteLoading | None = None
        self.answered = 0
        """Changes that processes have answered, well or not."""
        self._soon = soon
        self._from_thread = from_thread
        self._wait_for_room = wait_for_room
        self._line: socket.socket | None = None
        self._joiner = Joiner()
        self._next = 0
        self._open: dict[int, _Change] = {}  # by number, in order: not answered
        self._open_rows = 0  # of those
        self._unsent: deque[tuple[int, _Change]] = deque()
        self._kept: dict[int, _Change] = {}  # refused for now; the process has them too
        self._answers: deque[tuple[int, int, bool]] = deque()  # runs, as they came: to be passed on
        self._answering = False
        self._packets: deque[bytes] = deque()  # of messages on their way
        self._refused_rows = False
        self._flushing = False
        self._on_rows: Callable[[], None] = lambda: None
        self._disk_bytes = 0
        self._earlier_written_bytes = 0  # by processes that have ended
        self._closed = threading.Event()
        self._written = self._given_up = False
        self._close_by_s = 0.0  # until when the catalog is to be closed; 0: it is not

    # --- changes ---------------------------------------------------------------------------------

    def insert(self, places: Sequence[int], rows: Sequence[RowFields], done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("insert", [places, rows], done, len(places))

    def delete(self, places: Sequence[int], done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("delete", [places], done, len(places))

    def add_namespace(
        self, number: int, fingerprint: str, spec: bytes, epoch: int = 0, done: Done | None = None
    ) -> None:
        """See `Catalog`."""
        self._post("add_namespace", [number, fingerprint, spec, epoch], done)

    def raise_epoch(self, namespace: int, epoch: int, done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("raise_epoch", [namespace, epoch], done)

    def set_segment(self, segment: int, slot_bytes: int, done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("set_segment", [segment, slot_bytes], done)

    def set_key(self, key_id: bytes, since: int, done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("set_key", [key_id, since], done)

    def add_tombstone(self, namespace: int, key: bytes, epoch: int, done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("add_tombstone", [namespace, key, epoch], done)

    def remove_tombstone(self, namespace: int, key: bytes, done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("remove_tombstone", [namespace, key], done)

    def forget_namespaces(self, keep: Collection[int], done: Done | None = None) -> None:
        """See `Catalog`."""
        self._post("forget_namespaces", [list(keep)], done)

    def _post(self, method: str, arguments: list[Any], done: Done | None, rows: int = 1) -> None:
        if method in _BURIALS and self._refused_rows:
            self._soon(lambda: _answer(done, False))
            return
        change = _Change(method, arguments, done, time.monotonic(), rows)
        number = self._next
        self._next += 1
        self._open_rows += rows
        self._open[number] = change
        self._unsent.append((number, change))
        self._send_soon()

    # --- state -----------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """See `Catalog`."""
        return self._open_rows + len(self._kept)

    @property
    def full(self) -> bool:
        """See `Catalog`."""
        return self.pending >= MAX_PENDING

    def age_s(self) -> float:
        """How long the oldest change has waited for its answer."""
        oldest = next(iter(self._open.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.posted_s

    def bytes_on_disk(self) -> int:
        """See `Catalog`."""
        return self._disk_bytes

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in words."""
        rows = sum(change.rows for change in self._open.values())
        findings = [] if self._open_rows == rows else [f"{self._open_rows} open rows counted, {rows} found"]
        unsent = [number for number, _ in self._unsent]
        if unsent != sorted(unsent) or not self._open.keys() >= set(unsent):
            findings.append("changes are to be sent out of order, or after their answer")
        return findings

    # --- the process -----------------------------------------------------------------------------

    def connect(self, line: socket.socket) -> None:
        """A process is there: send it everything that none has confirmed, in order."""
        while self._answers:  # of the one before: long since passed on, as a process takes its time to start
            self._answer_some()
        self._line = line
        self._joiner = Joiner()
        self._packets.clear()
        changes = sorted((self._kept | self._open).items())
        self._kept.clear()
        # This process does not know which rows an earlier one has refused (see `Catalog.remove_tombstone`).
        refused = {number for number, change in changes if change.method in _BURIALS} if self._refused_rows else set()
        self._unsent = deque(change for change in changes if change[0] not in refused)
        self._open = dict(self._unsent)
        self._open_rows = sum(change.rows for change in self._open.values())
        for number, change in changes:
            if number in refused:
                _answer(change.done, False)
        if self._close_by_s:
            self._say_close()
        self._send_soon()

    def lost(self) -> None:
        """The process has ended."""
        self._line = None
        self._packets.clear()
        self._unsent.clear()
        # What it has answered is passed on all the same.
        self._earlier_written_bytes = self.written_bytes
        self._closed_if_lost()

    def give_up(self) -> None:
        """No process follows in which it could be closed in order."""
        self._given_up = True
        self._closed_if_lost()

    def _closed_if_lost(self) -> None:
        """While it is to be closed: without a process that is all, unless another one follows and has to write."""
        if self._close_by_s and self._line is None and (self._given_up or not self.pending):
            self._closed.set()

    def load(self, on_ready: Callable[[], None], batch_rows: int = 512) -> RemoteLoading:
        """See `Catalog`."""
        assert self.loading is None, "rows are loaded once"
        self._on_rows = on_ready
        self.loading = RemoteLoading(self._say)
        self._say(messages.LoadRows(batch_rows))
        return self.loading

    def close(self, timeout_s: float) -> bool:
        """See `Catalog`. Blocks; not for the loop's thread, which serves the line meanwhile.

        If a process has ended with changes that it has not confirmed, the next one is waited for.
        """
        self._from_thread(partial(self._begin_to_close, time.monotonic() + timeout_s))
        self._closed.wait(timeout_s)
        return self._written

    def join(self) -> None:
        """See `Catalog`: what the process writes ends with it, and it ends before the directory is given back."""

    def _begin_to_close(self, by_s: float) -> None:
        self._close_by_s = by_s
        if self._line is not None:
            self._say_close()
        self._closed_if_lost()

    def _say_close(self) -> None:
        self._say(messages.CloseCatalog(max(0.0, self._close_by_s - time.monotonic())))

    # --- sending ---------------------------------------------------------------------------------

    def _send_soon(self) -> None:
        if not self._flushing and self._line is not None:
            self._flushing = True
            self._soon(self._flush)

    def _flush(self) -> None:
        """Send changes that wait; those of one turn of the loop go together."""
        self._flushing = False
        while self._unsent and not self._packets and self._line is not None:
            self._encode_changes()
            self._send_packets()

    def _encode_changes(self) -> None:
        unsent = self._unsent
        some: list[tuple[str, list[Any]]] = []
        first = unsent[0][0]
        rows = 0
        while unsent and rows < ROWS_AT_ONCE and unsent[0][0] == first + len(some):
            change = unsent.popleft()[1]
            rows += change.rows
            some.append((change.method, change.arguments))
        self._packets.extend(parts_of(messages.encode(messages.RowChanges(first, some))))

    def _say(self, order: messages.RowOrder) -> None:
        """Send something else, behind the changes so far."""
        if self._line is None:
            return
        while self._unsent:
            self._encode_changes()
        self._packets.extend(parts_of(messages.encode(order)))
        self._send_packets()

    def _send_packets(self) -> None:
        line = self._line
        while self._packets and line is not None:
            try:
                line.send(self._packets[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_for_room(line, self._go_on)
                return
            except OSError as error:
                give_up_line(line, error)
                return  # `lost` follows
            self._packets.popleft()

    def _go_on(self) -> None:
        if self._line is not None:
            self._wait_for_room(self._line, None)
            self._send_packets()
            self._flush()

    # --- receiving -------------------------------------------------------------------------------

    def readable(self, line: socket.socket) -> bool:
        """Take one message from the line, if there is one; False at its end.

        Nothing is read while answers of the one before are still passed on.
        """
        if self._answers:
            return True
        try:
            packet = line.recv(PART_BYTES + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        message = self._joiner.add(packet)
        if message is not None:
            self._take(messages.decode_row_report(message))
        return True

    def _take(self, report: messages.RowReport) -> None:
        match report:
            case messages.Answers(runs):
                self._answers.extend(runs)
                if not self._answering:
                    self._answer_some()
            case messages.Status(error, disk_bytes, written_bytes):
                self._disk_bytes = disk_bytes
                self.written_bytes = self._earlier_written_bytes + written_bytes
                self.error = error
                if not error:
                    self._kept.clear()
            case messages.Rows(packed):
                if self.loading is not None:
                    self.loading.ready.append(packed)
                    self._on_rows()
            case messages.RowsEnd(damaged, error):
                if self.loading is not None:
                    self.loading.damaged, self.loading.error, self.loading.over = damaged, error, True
                    self._on_rows()
            case messages.CatalogClosed(written):
                self._written = written
                self._closed.set()

    def _answer_some(self) -> None:
        """Pass on answers, a limited number of rows in one turn of the loop."""
        rows = 0
        while self._answers and rows < CALLBACKS_AT_ONCE:
            number, count, ok = self._answers.popleft()
            if count > 1:
                self._answers.appendleft((number + 1, count - 1, ok))
            rows += self._answered(number, ok)
        if self._answers and not self._answering:
            self._answering = True
            self._from_thread(self._go_on_answering)

    def _go_on_answering(self) -> None:
        self._answering = False
        self._answer_some()
        if not self._answers:
            self._closed_if_lost()

    def _answered(self, number: int, ok: bool) -> int:
        """Pass on one answer; returns how many rows it is about."""
        change = self._open.pop(number)
        self.answered += 1
        self._open_rows -= change.rows
        if ok:
            # The process writes what it has kept before anything else. Sent to the next one, a change of old could undo
            # a later one of the same name.
            self._kept.clear()
        else:
            if change.method in _ROWS:
                self._refused_rows = True
            elif change.method not in _BURIALS:
                self._kept[number] = change._replace(done=None)
        _answer(change.done, ok)
        return change.rows


def _answer(done: Done | None, ok: bool) -> None:
    if done is not None:
        try:
            done(ok)
        except Exception:
            log.exception("the owner of a row failed to take an answer")
