"""The daemon's statistics, shared by all readers: the daemon's loop is for engines, not for fast-reloading pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

EVERY_S = 0.1
"""Least seconds between two requests to the daemon."""


class Trees:
    """One request at a time. Callers that come while it is under way share the answer to the next one, which is newer.

    An answer is never older than its request. For one event loop.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Mapping[str, Any]]], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock_s = clock_s
        self._lock = asyncio.Lock()
        self._asked_s = float("-inf")
        self._answer: Mapping[str, Any] | Exception = {}

    async def get(self) -> Mapping[str, Any]:
        """The tree as of some time after this call. Raises what the request to the daemon raises."""
        came_s = self._clock_s()
        async with self._lock:
            if self._asked_s < came_s:
                await asyncio.sleep(max(0.0, self._asked_s + EVERY_S - self._clock_s()))
                self._asked_s = self._clock_s()
                try:
                    self._answer = await self._ask()
                except asyncio.CancelledError:
                    self._asked_s = float("-inf")
                    raise
                except Exception as error:  # noqa: BLE001 - given to each caller
                    self._answer = error  # so that callers do not ask a hung daemon one by one
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer
