"""Work in the background that fails in every way: transfers, and small tasks."""

from __future__ import annotations

import signal
import threading

import pytest
from waiting import wait_until

from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.copies.pool import CopyLost, Limit
from tiercache.errors import DeadlineExceeded


def fail(error: Exception) -> int:
    raise error


def make(run: object, limit: Limit | None = None) -> Transfer[int]:
    return Transfer(run, lambda: -1, 0, limit or Limit())  # type: ignore[arg-type]


def test_a_job_tells_how_long_it_was_worked_on_and_not_how_long_it_waited() -> None:
    queue = JobQueue("test", 10)
    began, go_on = threading.Event(), threading.Event()
    first, second = make(lambda: began.set() or int(go_on.wait(40))), make(lambda: 1)
    queue.submit(first)
    queue.submit(second)
    assert began.wait(40)
    assert first.began_s > 0
    assert first.ended_s == second.began_s == 0
    go_on.set()
    assert second.result() == 1
    assert first.began_s <= first.ended_s <= second.began_s <= second.ended_s
    assert Transfer.finished(3).ended_s == 0
    queue.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_handler_of_a_signal_may_use_the_queue_while_its_thread_starts(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, start, performed = JobQueue("test", 10), threading.Thread.start, list[str]()
    names = ["handler's", "own"]

    def submit(name: str) -> bool:
        return queue.submit(make(lambda: performed.append(name) or 1))

    def handle(number: int, frame: object) -> None:
        if closes:
            queue.close()
        else:
            submit("handler's")

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        signal.raise_signal(signal.SIGUSR1)

    earlier = signal.signal(signal.SIGUSR1, handle)
    threads = threading.active_count()
    try:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        assert submit("own") is not closes
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    if not closes:
        assert threading.active_count() == threads + 1
        queue.submit(last := make(lambda: 7))
        assert last.result() == 7
        queue.close()
    assert performed == ([] if closes else names)


def test_a_job_that_fails_unforeseen_is_a_miss_and_one_that_loses_its_copy_is_never_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = JobQueue("test", 10)
    jobs = [make(lambda: fail(KeyError("a bug"))), make(lambda: fail(CopyLost("the device broke"))), make(lambda: 7)]
    for job in jobs:
        queue.submit(job)
    assert [jobs[0].result(), jobs[2].result(), jobs[1].done()] == [0, 7, False]
    with pytest.raises(DeadlineExceeded):
        jobs[1].result(0)
    assert "a bug" in caplog.text
    assert "the device broke" in caplog.text
    queue.close()


def test_closing_skips_what_has_not_begun_and_waits_for_what_has() -> None:
    queue = JobQueue("test", 10)
    begun, gate = threading.Event(), threading.Event()
    first = make(lambda: begun.set() or gate.wait(60) or 1)
    second = make(lambda: 2)
    queue.submit(first)
    queue.submit(second)
    assert begun.wait(40)
    queue.stop()
    assert not queue.finish(0), "it is at work"
    threading.Timer(0.02, gate.set).start()
    queue.close()
    assert (first.result(), second.result()) == (True, -1)
    wait_until(lambda: queue.finish(0), "all is done")


def test_a_queue_that_gets_no_thread_refuses_transfers_and_keeps_tasks(no_threads: pytest.MonkeyPatch) -> None:
    queue, done = JobQueue("test", 4), list[int]()
    assert not queue.submit(make(lambda: 1))
    assert len(queue) == 0
    queue.later(lambda: done.append(1))
    queue.begin()
    assert not queue.finish(0)
    no_threads.undo()
    later = make(lambda: 1)
    assert queue.submit(later)
    assert later.result() == 1
    queue.begin_with(lambda: done.append(2))
    assert queue.finish(30)
    assert done == [1, 2]
    queue.close()


def test_all_is_done_in_order_though_some_of_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    background, done = JobQueue("test"), list[int]()
    background.later(lambda: done.append(1))
    background.later(lambda: 1 / 0)
    background.later(lambda: done.append(2))
    assert done == []
    assert background.finish(30)
    assert done == [1, 2]
    assert "unexpectedly" in caplog.text
    background.close()
    assert background.finish(0)
    background.later(lambda: done.append(3))
    assert not background.finish(0), "a closed queue does nothing more"
