"""A signal handler raises while a transfer is submitted: the caller gets no transfer, and reuses the blocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import BLOCK_BYTES, spec

import tiercache
from tiercache.connector import connector as connecting
from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.copies.pool import Limit
from tiercache.errors import DaemonUnavailable, LayoutError

Open = Callable[..., tiercache.Connector]


class Interrupting(deque[Any]):
    """A queue's jobs; Ctrl-C comes just after the next one is in it, before its thread is woken."""

    def append(self, job: Any) -> None:
        super().append(job)
        raise KeyboardInterrupt


def interrupted(queue: JobQueue, hand_over: Callable[[], object]) -> None:
    queue._jobs = Interrupting(queue._jobs)
    with pytest.raises(KeyboardInterrupt):
        hand_over()
    queue._jobs = deque(queue._jobs)


def test_a_store_that_was_interrupted_stores_nothing_that_came_later(open_connector: Open) -> None:
    pool = np.zeros((8, BLOCK_BYTES), np.uint8)
    connector = open_connector(pool=tiercache.Pool.from_blocks(pool))
    assert connector.store_async(chain_of("before", 1), [7]).result().stored == 1
    chain = chain_of("interrupted store", 1)
    pool[0] = 1
    interrupted(connector._stores, lambda: connector.store_async(chain, [0]))
    pool[0] = 99  # the block is used for something else
    assert connector.store_async(chain_of("after", 1), [0]).result().stored == 1
    match = connector.match(chain)
    assert match.blocks == 0 or (connector.load(match, [5]), pool[5, 0]) == (1, 1)


def test_what_has_begun_is_over_when_the_exception_arrives() -> None:
    """The handler raises after the thread was woken: the copy in progress ends first."""
    queue, begun, ended = JobQueue("test", 4), threading.Event(), threading.Event()

    def copy() -> int:
        begun.set()
        time.sleep(0.05)
        ended.set()
        return 1

    transfer = Transfer(copy, lambda: 0, 0, Limit())
    wake = queue._wakeups.put

    class Wakeups:
        get = queue._wakeups.get

        def put(self, item: None) -> None:
            wake(item)
            if not begun.is_set():
                assert begun.wait(30)
                raise KeyboardInterrupt

    queue._wakeups = Wakeups()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        queue.submit(transfer)
    transfer.abandon()
    assert ended.is_set()
    assert transfer.done()
    queue.close()


def test_a_connector_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pool: tiercache.Pool) -> None:
        raise LayoutError("this GPU cannot be used")

    made, pool = [], tiercache.Pool.from_blocks(np.zeros((2, BLOCK_BYTES), np.uint8))
    monkeypatch.setattr(connecting, "make_copier", broken)
    monkeypatch.setattr(connecting, "DirectPath", lambda *_: made.append(1))
    with pytest.raises(LayoutError):
        tiercache.connect("/nonexistent", namespace=spec(), pool=pool)
    assert not made


def test_a_connector_that_finds_no_daemon_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    closed, close = [], tiercache.Connector.close
    monkeypatch.setattr(tiercache.Connector, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(DaemonUnavailable):
        tiercache.connect(tmp_path, namespace=spec(), required=True, connect_timeout_s=0.05)
    assert len(closed) == 1
