"""Calls that a signal must not cut in half.

Handlers of signals run in the main thread, between any two steps of it, and may raise there: Ctrl-C does. A store
that is cut so may have been granted a lease which nobody knows of any more, and whose frames the daemon keeps for
as long as this process lives. So what the main thread asks is done by another thread, for which it waits; what a
handler raises ends the waiting once the work has come to its end.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tiercache import forks

T = TypeVar("T")
LOOK_UP_S = 0.1
"""How often the waiting main thread gives handlers of signals a turn."""


class _Call(Generic[T]):
    """Work for the other thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._turns = [1]  # whoever takes it decides; taking is atomic
        self._error: BaseException | None = None
        self._result: T
        self._is_over = False
        self._over = threading.Lock()
        self._over.acquire()

    def begins(self) -> bool:
        """Whether nobody else has taken it."""
        try:
            self._turns.pop()
        except IndexError:
            return False
        return True

    def perform(self) -> None:
        """Do the work, if nobody has given it up; in the other thread."""
        try:
            if self.begins():
                self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            self._error = error
        finally:
            self._is_over = True
            self._over.release()

    def wait(self) -> None:
        """Wait until it is over; raises what a handler raises."""
        while not self._is_over:
            # A signal that comes just before the wait does not end it: its handler has its turn at the next look.
            self._over.acquire(timeout=LOOK_UP_S)

    def wait_through(self) -> None:
        """Wait until it is over, whatever handlers raise meanwhile, which is raised then."""
        error: BaseException | None = None
        while not self._is_over:
            try:
                self.wait()
            except BaseException as raised:  # noqa: BLE001 - raised below
                error = raised
        if error is not None:
            raise error

    def outcome(self) -> T:
        """The result, or what the work has raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it names this frame, and this frame it
        return self._result


def uninterrupted(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Do `work` where no handler of a signal can raise, and return its result.

    Outside of the main thread that is here, and so it is at the end of the interpreter, when no other thread runs.
    `stop` is called when a handler raises meanwhile: the work should then come to its end soon, which is waited for.
    """
    if sys.is_finalizing() or threading.current_thread() is not threading.main_thread():
        return work()
    call = _Call(work)
    try:
        calls = _thread_of_calls()
        if calls is None:
            return work()
        calls.put(call)
        call.wait()
        return call.outcome()
    except BaseException:
        if not call.begins():
            stop()
            try:
                call.wait_through()
            except BaseException:
                call.wait_through()  # another Ctrl-C, just between two looks
                raise
        raise


# --- the other thread: one for the process ------------------------------------------------------------

_calls: queue.SimpleQueue[_Call[Any]] | None = None


def _thread_of_calls() -> queue.SimpleQueue[_Call[Any]] | None:
    """Its queue; None where no thread can be started (any more). Called in the main thread only."""
    global _calls
    if _calls is None:
        calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        try:
            threading.Thread(target=_perform, args=(calls,), name="tiercache-calls", daemon=True).start()
        except RuntimeError:
            return None
        _calls = calls
    return _calls


def _perform(calls: queue.SimpleQueue[_Call[Any]]) -> None:
    while True:
        calls.get().perform()


@forks.in_child
def _forget_thread() -> None:
    """It does not exist here."""
    global _calls
    _calls = None
