"""What vLLM's functions that call us know and do not pass on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any


def locals_of_callers() -> Iterator[dict[str, Any]]:
    """The local variables of each function on the stack, beginning with the one that asks."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
