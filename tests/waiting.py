"""Waiting for what other processes and threads do, in all tests alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tiercache

T = TypeVar("T")
LOOK_EVERY_S = 0.005


def wait_until(condition: Callable[[], T], what: str = "what was waited for", timeout_s: float = 50.0) -> T:
    """Look again and again until `condition()` is true; its value. Fails at the deadline, which only bounds a hang.

    The deadline is below the minute that a fault test has, so that its text is read.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(LOOK_EVERY_S)
    return value


def state_of(pid: int | str) -> str:
    """The kernel's letter for a process, or for `PID/task/THREAD`: T is stopped, Z a zombie, empty is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def hurried(client: tiercache.Client, deadline_s: float = 0.5) -> Iterator[None]:
    """Meanwhile the client's requests have this deadline: for a daemon that does not answer at all."""
    patient_s, client.request_timeout_s = client.request_timeout_s, deadline_s
    try:
        yield
    finally:
        client.request_timeout_s = patient_s
