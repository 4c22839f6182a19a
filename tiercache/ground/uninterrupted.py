"""Calls that a signal must not cut in half.

Python runs signal handlers in the main thread, between any two steps of it, and they may raise there: Ctrl-C does. A
store interrupted so may have been granted a lease that no code knows of any more, whose frames the daemon keeps for as
long as this process lives. So while the main thread is in such a call, signals are only noted. Their handlers run where
the call can be ended (`interrupted`), and after it; what they raise is raised after it.

Only exceptions of signal handlers are deferred: an exception that another thread sets in this one
(`PyThreadState_SetAsyncExc`), or a debugger's, may come anywhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tiercache.ground import forks

T = TypeVar("T")
P = ParamSpec("P")

_signals: Any = importlib.import_module("_signal")
"""What `signal` wraps: its own functions look up names of numbers, which takes ten times as long."""
_NUMBERS = sorted(int(number) for number in signal.valid_signals())
_SIGACTION_BYTES = 256
"""More than the size of a `struct sigaction`."""
_sigaction = ctypes.CDLL(None).sigaction
_sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class _StandIn:
    """Replaces a handler during a call: notes signals, or passes them on to it.

    It keeps its handler itself, for a program may copy it to another signal, which then has that handler.
    """

    __slots__ = ("deferral", "handler")

    def __init__(self, deferral: _Deferral, handler: Callable[[int, Any], Any]) -> None:
        self.deferral = deferral
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        deferral = self.deferral
        deferral.taken.add(number)
        if deferral.active:
            deferral.noted.append((self.handler, number, frame))
            return
        try:
            if deferral.over:
                deferral.restore()
        finally:
            self.handler(number, frame)


class _Deferral:
    """One call of the main thread, and the signals that come meanwhile."""

    def __init__(self) -> None:
        self.active = False
        """True if signals are noted; else they are handled as usual, even by a stand-in that was left behind."""
        self.error: BaseException | None = None
        """What a handler has raised."""
        self.thread = threading.get_ident()
        self.over = False
        self.noted: deque[tuple[Callable[[int, Any], Any], int, Any]] = deque()
        self.taken: set[int] = set()
        """Signals that may have a stand-in of ours."""

    def begin(self) -> None:
        """Replace all handlers in Python. Raises what one of them raises meanwhile."""
        for number in _NUMBERS:
            handler = _signals.getsignal(number)
            if callable(handler):
                while isinstance(handler, _StandIn) and handler.deferral.over:
                    handler = handler.handler
                self.taken.add(number)
                try:
                    _replace(number, _StandIn(self, handler))
                except ValueError as error:
                    if "main thread" not in str(error):
                        raise
                    return  # `threading` takes another thread for the main one, and handlers run there

    def handle(self) -> None:
        """Call the handlers of noted signals, which may themselves be interrupted. The first error is kept."""
        while self.noted:
            try:
                try:
                    self.active = False
                    self._call(*self.noted.popleft())
                finally:
                    self.active = True
            except BaseException as error:  # noqa: BLE001 - raised at the end
                self.error = self.error or error

    def end(self) -> None:
        """Restore all handlers, call those of noted signals, and raise what they raise or have raised.

        Another signal may cut this short anywhere: a stand-in that is left behind then passes its signal on.
        """
        try:
            self.over = True
            self.active = False
            self.restore()
        finally:
            try:
                self._handle_rest()
            finally:
                error, self.error = self.error, None
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # it refers to this frame: a reference back would keep their frames' objects alive

    def _handle_rest(self) -> None:
        try:
            while self.noted:
                self._call(*self.noted.popleft())
        finally:
            if self.noted:
                self._handle_rest()

    def _call(self, handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        """Keeps `frame` out of its callers' frames: it may be one of them, and its objects would live on."""
        handler(number, frame)

    def restore(self) -> None:
        """Restore handlers, except where another one has been set meanwhile."""
        for number in tuple(self.taken):
            handler = _signals.getsignal(number)
            if isinstance(handler, _StandIn) and handler.deferral is self:
                _replace(number, handler.handler)

    def forget(self) -> None:
        """In a forked child: the call is the parent's, and so are the signals and what their handlers have raised."""
        self.noted.clear()
        self.error = None
        self.end()


def _replace(number: int, handler: Callable[[int, Any], Any]) -> None:
    """Have Python call `handler`, and leave the kernel's side as it is.

    What `siginterrupt` or a library in C has set there would be lost with `signal` alone.
    """
    kept = ctypes.create_string_buffer(_SIGACTION_BYTES)
    known = _sigaction(number, None, kept) == 0
    _signals.signal(number, handler)
    if known:
        _sigaction(number, kept, None)


_current: _Deferral | None = None
"""The call that the main thread is in."""
_main_thread = threading.main_thread().ident


def uninterrupted(work: Callable[[], T]) -> T:
    """Run `work`; signal handlers raise nothing before it is over. If they then raise, there is no result.

    Outside of the main thread, where none runs, and at the end of the interpreter this is `work()`.
    """
    global _current
    outer = _current
    if (outer is not None and outer.active) or threading.get_ident() != _main_thread or sys.is_finalizing():
        return work()
    deferral = _Deferral()
    try:
        deferral.begin()
        _current = deferral
        # From here to `end` no handler runs, so each of those steps is executed.
        deferral.active = True
        return work()
    finally:
        _current = outer
        deferral.end()


def whole(method: Callable[P, T]) -> Callable[P, T]:
    """Each call of `method` is `uninterrupted`."""

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        return uninterrupted(lambda: method(*arguments, **options))

    return call


def interrupted() -> bool:
    """Run the handlers of noted signals; returns whether one has raised, so that the call should end soon.

    For places where the call holds no lock: a handler may use, or close, what is in use here.
    """
    deferral = _current
    if deferral is None or deferral.thread != threading.get_ident():
        return False
    deferral.handle()
    return deferral.error is not None


@forks.in_child
def _forget_call() -> None:
    global _current, _main_thread
    _main_thread = threading.get_ident()
    deferral, _current = _current, None
    if deferral is not None:
        deferral.forget()
