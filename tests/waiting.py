"""Waiting for what other processes and threads do, in all tests alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
