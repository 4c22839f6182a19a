"""Work that signals do not cut: a handler raises when it is done, and never in between."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from signals_at_steps import Terminated, handling, heal, injected, steps_of

from tiercache.ground import forks
from tiercache.ground import uninterrupted as module
from tiercache.ground.uninterrupted import interrupted, uninterrupted

WAIT_S = 60
OWN = ("tiercache/ground/uninterrupted.py",)
pytestmark = pytest.mark.usefixtures("handlers")


def logged(log: list[str]) -> Callable[[], str]:
    """Work that says when it begins and ends, and takes note of signals in between."""

    def work() -> str:
        log.append("begun")
        interrupted()
        log.append("ended")
        return "result"

    return work


def test_a_signal_at_any_step_of_it_raises_once_and_cuts_no_work() -> None:
    log: list[str] = []
    count = steps_of(lambda: uninterrupted(logged(log)), OWN, "opcode")
    assert count > 100
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        for step in range(1, count):
            log.clear()
            with pytest.raises(kind), injected({step: number}, OWN):
                uninterrupted(logged(log))
            assert log in ([], ["begun", "ended"])
            assert module._current is None
            heal()


def test_a_handler_that_was_left_behind_is_known_as_such(handlers: dict[int, Any]) -> None:
    left = 0
    count = steps_of(lambda: uninterrupted(lambda: None), OWN, "opcode")
    for step in range(1, count):
        with pytest.raises(KeyboardInterrupt), injected({step: signal.SIGINT}, OWN):
            uninterrupted(lambda: None)
        left += signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
        uninterrupted(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is handlers[signal.SIGTERM]
    assert left > 0


def test_a_handler_that_raises_nothing_has_its_turn_and_the_call_goes_on(handlers: dict[int, Any]) -> None:
    calls: list[tuple[int, bool]] = []
    with handling(signal.SIGUSR1, lambda number, frame: calls.append((number, frame is not None))):

        def work() -> str:
            signal.raise_signal(signal.SIGUSR1)
            assert calls == []
            assert not interrupted()
            assert calls == [(signal.SIGUSR1, True)]
            signal.raise_signal(signal.SIGUSR1)
            return "result"

        assert uninterrupted(work) == "result"
        assert len(calls) == 2


def test_what_the_call_was_given_goes_with_the_error() -> None:
    """And not only with the next garbage collection: a match that is not loaded ends with its last reference."""

    class Given:
        pass

    def call(given: object) -> None:
        uninterrupted(lambda: (given, signal.raise_signal(signal.SIGINT), interrupted()))

    given = Given()
    alive = weakref.ref(given)
    gc.disable()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call(given)
        del given
        assert alive() is None
    finally:
        gc.enable()


def test_a_handler_may_call_and_be_interrupted_itself() -> None:
    def nested(number: int, frame: Any) -> None:
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))
        pytest.fail("the inner call's signal is raised when that is over")

    ended: list[bool] = []
    with handling(signal.SIGUSR1, nested):

        def work() -> None:
            signal.raise_signal(signal.SIGUSR1)
            ended.append(interrupted())

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work)
        assert ended == [True]


def test_a_handler_that_is_set_meanwhile_stays_and_the_works_own_error_is_raised(handlers: dict[int, Any]) -> None:
    def other(number: int, frame: Any) -> None:
        raise AssertionError

    def work() -> None:
        signal.signal(signal.SIGTERM, other)
        raise MemoryError

    with pytest.raises(MemoryError):
        uninterrupted(work)
    assert signal.signal(signal.SIGTERM, handlers[signal.SIGTERM]) is other


def test_only_the_calls_own_thread_handles_signals() -> None:
    def work() -> list[bool]:
        signal.raise_signal(signal.SIGINT)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(interrupted()))
        thread.start()
        thread.join()
        return [*seen, interrupted()]

    seen: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: seen.extend(work()))
    assert seen == [False, True]
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(uninterrupted(lambda: 1)))
    thread.start()
    thread.join()
    assert results == [1]
    assert not interrupted()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_after_a_handler_has_raised_forgets_all() -> None:
    """The error belongs to the parent. Raised in the child it would stop the child from dropping the rest."""

    class Owner:
        forgotten = False

        def forget_in_child(self) -> None:
            self.forgotten = True

    owner = Owner()
    forks.watch(owner)
    statuses: list[int] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if owner.forgotten and not interrupted() else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    assert statuses == [0]


def test_at_the_very_end_and_where_handlers_cannot_be_set_it_is_only_done(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from tiercache.ground.uninterrupted import uninterrupted
assert uninterrupted(lambda: 1) == 1
class Last:
    def __del__(self):
        print(uninterrupted(lambda: "done"), flush=True)
last = Last()
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "done\n"
    # The interpreter's own main thread is another than `threading` believes where a program embeds Python.
    monkeypatch.setattr(module, "_is_main", lambda: True)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(uninterrupted(lambda: 1)))
    thread.start()
    thread.join()
    assert results == [1]
