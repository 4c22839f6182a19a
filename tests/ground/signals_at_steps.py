"""Signals that come at a step of a call that the test names: an opcode or a line of a file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Terminated(Exception):
    """What the test's handler of SIGTERM raises."""


@contextmanager
def injected(events: dict[int, int], files: tuple[str, ...], what: str = "opcode") -> Iterator[list[int]]:
    """Raise signals in this thread: `events` gives the signal for each step (an opcode, or a line) of `files`."""
    seen = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = what == "opcode"
        if event == what:
            seen[0] += 1
            number = events.get(seen[0])
            if number is not None:
                signal.raise_signal(number)
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(earlier)


def steps_of(call: Callable[[], object], files: tuple[str, ...], what: str) -> int:
    with injected({}, files, what) as seen:
        call()
    return seen[0]


def heal() -> None:
    """A handler of ours that was left installed passes the next signal on and removes itself."""
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        with pytest.raises(kind):
            signal.raise_signal(number)


@contextmanager
def handling(number: int, handler: Callable[[int, Any], object]) -> Iterator[None]:
    """`handler` is that of a signal meanwhile."""
    earlier = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, earlier)
