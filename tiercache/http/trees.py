"""The daemon's statistics, shared by all readers: its loop is for engines, not for the page that reloads fastest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

EVERY_S = 0.1
"""The daemon is asked no more often than this."""


class Trees:
    """One question at a time. Who asks while it is on its way shares the answer to the next one, which is newer.

    An answer is never older than its request. Of one event loop.
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
        """The tree as it is at some time from now on. Raises what asking raises."""
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
                    self._answer = error  # a daemon that hangs is not asked by each of them in turn
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer
