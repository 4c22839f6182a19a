"""Tests that run on an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

Scenario = Callable[[], Coroutine[Any, Any, None]]


class Clock:
    """A clock that the test sets, or a `ClockLoop` that has nothing else to do."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class _Ahead(selectors.DefaultSelector):
    """Waits for nothing: where nothing is ready, the clock is set ahead to the next timer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the loop waits for something that never comes"
            self._clock.now_s += timeout
        return ready


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of the test's, for what has no threads: no timer takes time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Ahead(clock))
        self._test_clock = clock

    def time(self) -> float:
        return self._test_clock.now_s

    def end(self) -> None:
        """Cancel what is left, as `asyncio.run` does, and close."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()


def play(scenario: Scenario, clock: Clock | None = None) -> None:
    """Run it on a loop of its own; an error in a callback of the loop fails the test too. `clock`: on a `ClockLoop`."""
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        await scenario()

    if clock is None:
        asyncio.run(run())
    else:
        loop = ClockLoop(clock)
        try:
            loop.run_until_complete(run())
        finally:
            loop.end()
    assert not errors, errors


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test is a scenario, and is played."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        play(lambda: test(*args, **options))

    return run


def on_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test is a scenario whose first argument is a `Clock`, and is played on that."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        clock = Clock()
        play(lambda: test(clock, *args, **options), clock)

    its = inspect.signature(test)
    run.__signature__ = its.replace(parameters=list(its.parameters.values())[1:])  # type: ignore[attr-defined]
    return run
