"""A process that the demo starts. It ends at the end of its stdin, and so always with the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tiercache.errors import TierCacheError
from tiercache.ground.isolated import python_command

STOP_TIMEOUT_S = 20.0
# One OpenMP thread: two would spin against the daemon on a small machine.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
Self = TypeVar("Self", bound="Child")


class ChildFailed(TierCacheError):
    """A process of the demo ended or did not answer."""


_started: list[subprocess.Popen[str]] = []


@contextmanager
def none_left() -> Iterator[None]:
    """On exit every process started within has ended, so that their files can be removed."""
    try:
        yield
    finally:
        while _started:
            process = _started.pop()
            process.kill()
            process.wait()


@contextmanager
def _uncut() -> Iterator[None]:
    """Delays signals to the end of the block, so that none interrupts the start of a process and orphans it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    earlier = {number: signal.signal(number, lambda number, _: came.append(number)) for number in both}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


class Child:
    """A process for a module of this package; text to its stdin, and from its stdout unless that goes to `log`.

    Use it in a `with`: at the end of the block it may finish its work, after an exception it is killed.
    """

    def __init__(self, module: str, *arguments: str, log: Path | None = None) -> None:
        output = subprocess.PIPE if log is None else log.open("wb")
        try:
            with _uncut():
                self.process = subprocess.Popen(
                    python_command(module, *arguments),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=None if log is None else output,
                    text=True,
                    env={**os.environ, **_ENVIRONMENT},
                    # Control-C at a terminal is for the demo, which then ends this process without a traceback.
                    start_new_session=True,
                )
                _started.append(self.process)
        finally:
            if not isinstance(output, int):
                output.close()

    def close(self) -> None:
        """Close its stdin, then send SIGKILL after a while."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process now, if it still runs. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
