"""Tests that run on an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

Scenario = Callable[[], Coroutine[Any, Any, None]]


def play(scenario: Scenario) -> None:
    """Run it on a loop of its own; an error in a callback of the loop fails the test too."""
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        await scenario()

    asyncio.run(run())
    assert not errors, errors


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test is a scenario, and is played."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        play(lambda: test(*args, **options))

    return run
