"""The helper process of a store: `main`, started by `supervisor`."""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable
from functools import partial

from tiercache.daemon.helper_processes.child import ControlSocket, run_child
from tiercache.daemon.tiers.shared.stores.store import Connection, Get, Put, SharedStore, StoreError, StoreProblem

from . import messages

log = logging.getLogger("tiercache.daemon")


def _serve(control: ControlSocket) -> int:
    """Make the store, and serve lines until the daemon closes its socket."""
    start = messages.decode_start(control.start)
    module, _, maker = start.maker.partition(":")
    store: SharedStore = getattr(importlib.import_module(module), maker)(start.url)
    beside = getattr(store, "run_beside", None)
    if beside is not None:
        threading.Thread(
            target=_logged, args=(partial(beside, control.say_trouble),), name="beside", daemon=True
        ).start()
    control.say_ready()
    while line := control.next_line():
        worker = _Worker(store.connect(), line)
        threading.Thread(target=_logged, args=(worker.run,), name="line", daemon=True).start()
    return 0


def _logged(work: Callable[[], object]) -> None:
    """Do a thread's work, and log the error that ends it."""
    try:
        work()
    except Exception:
        log.exception("a thread of the store's helper process ended")


class _Worker:
    """Serves one line, with one connection to the store."""

    def __init__(self, connection: Connection, line: socket.socket) -> None:
        self._connection = connection
        self._line = line
        self._slots: list[memoryview] = []

    def run(self) -> None:
        """Serve calls until the line is closed."""
        try:
            with contextlib.suppress(ConnectionError):  # the daemon has given up this line
                while self._serve_one():
                    pass
        finally:
            self._line.close()
            self._connection.close()

    def _serve_one(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._line, messages.MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return False
        asked = messages.decode_asked(packet)
        if isinstance(asked, messages.Staging):
            self._stage(asked, fds[0])
            return True
        answer: messages.Answered
        try:
            answer = self._answer(asked)
        except StoreError as error:
            answer = messages.Failed(error.problem, error.text)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("a call of the store failed in its helper process")
            answer = messages.Failed(StoreProblem.PROTOCOL, f"{type(error).__name__}: {error}")
        self._say(answer)
        return True

    def _stage(self, staging: messages.Staging, fd: int) -> None:
        try:
            area = memoryview(mmap.mmap(fd, staging.slots * staging.slot_bytes))
        finally:
            os.close(fd)
        starts = range(0, len(area), staging.slot_bytes)
        self._slots = [area[start : start + staging.slot_bytes] for start in starts]

    def _answer(self, asked: messages.Asked) -> messages.Answered:
        store = self._connection
        if isinstance(asked, messages.FindNames):
            found = store.exists(asked.names, asked.notes, asked.deadline_s)
            return messages.FoundNames(found.there, found.notes)
        if isinstance(asked, messages.Read):
            return messages.Done(self._read(asked))
        if isinstance(asked, messages.Write):
            return messages.Done(self._write(asked))
        if isinstance(asked, messages.WriteNote):
            return messages.Done([store.set_note(asked.name, asked.value, asked.deadline_s, asked.only_if_missing)])
        if isinstance(asked, messages.ReadReplicatedNote):
            return messages.Done([store.replicated_note(asked.name, asked.deadline_s)])
        assert isinstance(asked, messages.Delete)
        store.delete(asked.names, asked.deadline_s)
        return messages.Done([])

    def _read(self, asked: messages.Read) -> list[bytes | None]:
        nothing = memoryview(bytearray())
        slots: dict[int, int] = {}
        gets = []
        for item in asked.items:
            get = Get(item.name, nothing, self._slots[item.slot][: item.length], item.offset, item.ranged, item.ttl_s)
            slots[id(get)] = item.slot
            gets.append(get)
        arrived = lambda get: self._say(messages.Settled(slots[id(get)], get.fate, get.body_bytes))  # noqa: E731
        noted = (lambda notes: self._say(messages.Notes(notes))) if asked.notes else None
        self._connection.get(gets, asked.notes, asked.deadline_s, arrived, noted)
        return []

    def _write(self, asked: messages.Write) -> list[bytes | None]:
        puts = [Put(item.name, [self._slots[item.slot][: item.length]], item.ttl_s) for item in asked.items]
        try:
            return self._connection.put(puts, asked.notes, asked.deadline_s)
        finally:
            for item, put in zip(asked.items, puts, strict=True):
                self._say(messages.Settled(item.slot, put.fate, 0))

    def _say(self, answer: messages.Answered) -> None:
        self._line.send(messages.encode(answer))


def main() -> None:
    """The process."""
    run_child(_serve, "the store's helper process")
