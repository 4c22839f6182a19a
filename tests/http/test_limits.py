"""The parts that guard the port, one by one: names of hosts, sockets that listen, timers of connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tiercache.errors import ConfigError
from tiercache.ground import listening
from tiercache.http.hosts import MAX_SHOWN_CHARS, HostCheck, allowed_hosts, refusal
from tiercache.http.limits import GRACE_S, LimitedConnection


def complaint(host: str = "", listen: str = "127.0.0.1", **headers: str) -> Any:
    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    check = HostCheck(nothing, allowed_hosts(listen, ""), refusal, "--hosts")
    its = [(b"host", host.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    return check._complaint({"type": "http", "method": "GET", "headers": its})


def test_an_address_without_brackets_is_no_name_with_a_port() -> None:
    assert complaint("::1") is None
    assert complaint("[::1]:80") is None
    assert complaint("::1:80").status == 421, "this is another address"


def test_a_name_is_shown_in_part() -> None:
    for found in (complaint("x" * 5000), complaint("localhost", origin="http://" + "x" * 5000)):
        assert len(found.text) < MAX_SHOWN_CHARS + 200


# --- sockets that listen -------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_address_that_is_taken_is_one_line_and_leaves_no_socket() -> None:
    with listening.bind("127.0.0.1", 0, "here") as first:
        listening.listen(first, 1, "here")
        before = descriptors()
        with pytest.raises(ConfigError, match="http = here cannot be listened on: Address already in use: choose"):
            listening.bind("127.0.0.1", first.getsockname()[1], "http = here")
        assert descriptors() == before
        peer = socket.create_connection(first.getsockname())
        first.accept()[0].close()  # the port is in TIME_WAIT now, which must not stop a new server
        peer.close()
        again = first.getsockname()[1]
    listening.bind("127.0.0.1", again, "here").close()


def test_of_two_that_are_bound_one_listens() -> None:
    """Both may be, as long as none of them listens."""
    first = listening.bind("127.0.0.1", 0, "here")
    with first, listening.bind("127.0.0.1", first.getsockname()[1], "there") as second:
        listening.listen(first, 1, "here")
        with pytest.raises(ConfigError, match="there cannot be listened on: Address already in use: choose"):
            listening.listen(second, 1, "there")


def test_a_host_that_is_none_is_one_line() -> None:
    with pytest.raises(ConfigError, match="http = nowhere cannot be listened on"):
        listening.bind("nowhere.invalid", 80, "http = nowhere")


# --- timers of connections -----------------------------------------------------------------------


class Timer:
    def __init__(self, when_s: float, call: Callable[[], None]) -> None:
        self.when_s, self.call, self.over = when_s, call, False

    def cancel(self) -> None:
        self.over = True


class FakeLoop:
    """A clock, and what is to happen when."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, call))
        return self.timers[-1]

    def armed(self) -> list[float]:
        return [timer.when_s for timer in self.timers if not timer.over]


def connection(loop: FakeLoop) -> LimitedConnection:
    config = uvicorn.Config(app=complaint, lifespan="off", log_config=None)
    config.load()
    made = LimitedConnection(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    transport: Any = SimpleNamespace(
        get_extra_info=lambda name: None, abort=lambda: None, close=lambda: None, is_closing=lambda: True
    )
    made.connection_made(transport)
    return made


def test_each_request_of_a_connection_has_its_time_and_none_is_kept_after_it() -> None:
    loop = FakeLoop()
    made = connection(loop)
    first_s = 100.0 + made.request_s + GRACE_S
    assert loop.armed() == [first_s]
    loop.now_s = 110.0
    made.cycle = SimpleNamespace(response_complete=True, disconnected=False)  # type: ignore[assignment]
    made.on_response_complete()
    assert first_s + 10.0 in loop.armed()
    assert first_s not in loop.armed()
    made.cycle = None  # type: ignore[assignment]
    made.connection_lost(None)
    assert first_s + 10.0 not in loop.armed()
