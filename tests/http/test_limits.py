"""Timers of connections, on a fake loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tiercache.http.limits import GRACE_S, LimitedConnection


class FakeLoop:
    """A clock, and what is to happen when."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.armed: list[float] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        when_s = self.now_s + delay_s
        self.armed.append(when_s)
        return SimpleNamespace(cancel=lambda: when_s in self.armed and self.armed.remove(when_s))


def test_each_request_of_a_connection_has_its_time_and_none_is_kept_after_it() -> None:
    config = uvicorn.Config(app=lambda: None, lifespan="off", log_config=None)
    config.load()
    loop = FakeLoop()
    made = LimitedConnection(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    transport: Any = SimpleNamespace(
        get_extra_info=lambda name: None, abort=lambda: None, close=lambda: None, is_closing=lambda: True
    )
    made.connection_made(transport)
    first_s = 100.0 + made.request_s + GRACE_S
    assert loop.armed == [first_s]
    loop.now_s = 110.0
    made.cycle = SimpleNamespace(response_complete=True, disconnected=False)  # type: ignore[assignment]
    made.on_response_complete()
    assert first_s + 10.0 in loop.armed
    assert first_s not in loop.armed
    made.cycle = None  # type: ignore[assignment]
    made.connection_lost(None)
    assert first_s + 10.0 not in loop.armed
