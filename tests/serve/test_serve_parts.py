"""The guards of the engine's server, one by one: settings, keys, bodies, idle connections, and its own daemon."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from starlette.requests import Request
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol
from waiting import wait_until

from tiercache.engine.async_engine import EngineDied, QueueFull, Stalled, Stopping, StreamUnread
from tiercache.errors import ConfigError
from tiercache.http.hosts import allowed_hosts
from tiercache.serve import app, private_daemon
from tiercache.serve.app import Bodies, ModelService, build_app
from tiercache.serve.failures import ApiError, api_error
from tiercache.serve.private_daemon import PrivateDaemon
from tiercache.serve.server import Sweeper, cut_unsent
from tiercache.serve.settings import ServeSettings

DEADLINE_S = 60.0
JSON = "application/json"


def service(**changed: Any) -> ModelService:
    """One without an engine behind it."""
    parts = {
        "engine": SimpleNamespace(max_model_len=100, death=None, stall=None),
        "prompts": SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0})),
        "model": "m",
        "metrics": SimpleNamespace(text=lambda: b""),
        "defaults": {},
    }
    return ModelService(**{**parts, **changed})


def ask(asked: ModelService, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body of one request with the body `{}`; underscores stand for hyphens in headers."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(cast("Any", build_app(asked))(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer guessed", "Bearer secre", "Bearer secret ", "Basic secret"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")],
)
def test_nothing_is_served_without_the_key(given: str, method: str, path: str) -> None:
    keyed = service(api_key="secret")
    status, body = ask(keyed, method, path, host="localhost", content_type=JSON, authorization=given)
    assert status == 401
    assert b"invalid_api_key" in body


def test_with_the_key_and_for_probes_all_is_served() -> None:
    keyed = service(api_key="secret")
    for path in ("/v1/models", "/v1/models/m"):
        assert ask(keyed, "GET", path, host="localhost", authorization="Bearer secret")[0] == 200
    for path in ("/health", "/metrics"):
        assert ask(keyed, "GET", path, host="localhost")[0] == 200


def test_pages_of_others_reach_no_route() -> None:
    """`http/hosts.py` decides. The stand-in for an engine has no `submit`: a request that reaches it gets a 500."""
    for path in ("/v1/models", "/metrics", "/health", "/v1/completions", "/nothing"):
        status, body = ask(service(), "GET", path, host="evil.example")
        assert (status, b"--allowed-hosts" in body) == (421, True)
    post = "POST", "/v1/completions"
    assert ask(service(), *post, host="localhost", origin="https://evil.example", content_type=JSON)[0] == 403
    assert ask(service(), *post, host="localhost", content_type="text/plain")[0] == 415
    assert ask(service(), *post, host="localhost", content_type=JSON)[0] == 400
    everywhere = service(hosts=allowed_hosts("0.0.0.0", ""))
    assert ask(everywhere, "GET", "/v1/models", host="node7")[0] == 200


@pytest.mark.parametrize("trouble", ["death", "stall"])
def test_health_says_what_is_wrong_with_the_engine(trouble: str) -> None:
    states = {"death": None, "stall": None, trouble: (EngineDied if trouble == "death" else Stalled)("it is over")}
    engine = SimpleNamespace(max_model_len=100, **states)
    status, body = ask(service(engine=engine), "GET", "/health", host="localhost")
    assert (status, b"it is over" in body) == (503, True)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFull("x"), 429, "queue_full", "1"),
        (StreamUnread("x"), 408, "nobody_reads", None),
        (EngineDied("x"), 503, "engine_died", "10"),
        (Stalled("x"), 503, "engine_stalled", "10"),
        (Stopping("x"), 503, "stopping", "10"),
        (ConfigError("n is 0: at least 1"), 400, None, None),
    ],
)
def test_each_failure_says_whether_to_come_again(error: Exception, status: int, code: str, retry: str) -> None:
    made = api_error(error, ("n",))
    assert (made.status, made.code, made.response().headers.get("retry-after")) == (status, code, retry)
    assert made.param == ("n" if isinstance(error, ConfigError) else None)


# --- bodies --------------------------------------------------------------------------------------


def request(*parts: bytes, hangs: bool = False) -> Request:
    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if hangs:
            await asyncio.Event().wait()

    return cast("Request", SimpleNamespace(stream=stream))


def refused(held: Bodies, its: Request) -> int:
    async def read() -> None:
        async with held.read(its):
            raise AssertionError("it was read")

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(read(), DEADLINE_S))
    return caught.value.status


def test_bodies_are_bounded_each_and_all_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 250)
    held = Bodies(100)
    held._max_bytes = 200
    assert refused(held, request(b"x" * 150, b"x" * 51)) == 413

    async def two_at_once() -> None:
        async with held.read(request(b"x" * 100, b"x" * 100)) as first:
            assert len(first) == 200
            with pytest.raises(ApiError, match="requests of 250 bytes are being read") as caught:
                async with held.read(request(b"x" * 51)):
                    raise AssertionError("it was read")
            assert caught.value.status == 503
            async with held.read(request(b"x" * 50)) as second:
                assert len(second) == 50
        async with held.read(request(b"x" * 200)):
            pass

    asyncio.run(two_at_once())
    assert held._held_bytes == 0


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.01)
    held = Bodies(100)
    assert refused(held, request(b"half", hangs=True)) == 408
    assert held._held_bytes == 0


# --- connections ---------------------------------------------------------------------------------


class Cycle:
    """One request; each is itself alone."""

    def __init__(self, response_complete: bool) -> None:
        self.response_complete = response_complete


class Connection(H11Protocol):
    """One of uvicorn's, as far as it is looked at."""

    def __init__(self, cycle: Any = None, paused: bool = False, state: Any = h11.IDLE) -> None:
        self.cycle = cycle
        self.flow = cast("Any", SimpleNamespace(write_paused=paused))
        self.conn = cast("Any", SimpleNamespace(their_state=state))
        self.waiting = 0
        self.aborted = False
        self.transport = cast("Any", SimpleNamespace(abort=self._abort, get_write_buffer_size=lambda: self.waiting))

    def _abort(self) -> None:
        self.aborted = True


def test_what_stands_still_from_one_sweep_to_the_next_is_closed() -> None:
    done, computing = Cycle(True), Cycle(False)
    silent, idle, unread = Connection(), Connection(done), Connection(computing, paused=True)
    waits, reads, asks = Connection(computing), Connection(computing, paused=True), Connection(done)
    everyone: list[Any] = [silent, idle, unread, waits, reads, asks, object()]
    sweeper = Sweeper()
    sweeper.sweep(everyone)
    assert not any(one.aborted for one in everyone[:-1])
    reads.waiting = 5
    asks.cycle = cast("Any", Cycle(True))
    late = Connection()
    sweeper.sweep([*everyone, late])
    assert [one.aborted for one in everyone[:-1]] == [True, True, True, False, False, False]
    assert not late.aborted


def test_at_the_end_only_those_are_cut_whose_request_has_not_come() -> None:
    half, whole = Connection(state=h11.SEND_BODY), Connection(state=h11.DONE)
    cut_unsent([half, whole, object()])
    assert (half.aborted, whole.aborted) == (True, False)


# --- settings: each wrong one gives one line that says what to set instead ---------------------------


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": Path("/nonexistent")}, "is not a folder"),
    ({"port": -1}, r"port is -1: must be 0 \(any\) to 65535"),
    ({"port": 65536}, "port is 65536"),
    ({"max_queued_requests": 0}, "max_queued_requests is 0: must be at least 1"),
    ({"grace_s": -0.1}, "grace is -0.1: must be 0 or more seconds"),
    ({"grace_s": math.inf}, "grace is inf"),
    ({"grace_s": math.nan}, "grace is nan"),
    ({"stall_timeout_s": 0.0}, "stall_timeout is 0.0: must be above 0 seconds"),
    ({"stall_timeout_s": math.nan}, "stall_timeout is nan"),
    ({"daemon": Path("/run/tiercache"), "cache": False}, "daemon and no-cache contradict each other"),
    ({"daemon": Path("/run/tiercache"), "nvme": "/mnt/a"}, "nvme is for a private daemon"),
    ({"cache": False, "nvme": "/mnt/a"}, "nvme is for a private daemon"),
    ({"nvme_size": "1GiB"}, "there is no nvme directory: give nvme too"),
    ({"arena": "much"}, "arena: .*much"),
    ({"nvme": "/mnt/a", "nvme_size": "much"}, "nvme_size: .*much"),
]


@pytest.mark.parametrize(("given", "text"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        ServeSettings(**{"model": tmp_path, **given})
    assert "\n" not in str(refused.value)


def test_a_chat_template_that_cannot_be_read_is_said_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none", binary, tmp_path):
        with pytest.raises(ConfigError, match=f"chat_template {path} cannot be read"):
            ServeSettings(model=tmp_path, chat_template=path).read_chat_template()


# --- a daemon that keeps dying is restarted a few times, and then no more ----------------------------


@pytest.mark.stress
def test_a_daemon_that_keeps_dying_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_daemon, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(private_daemon, "_MAX_RESTARTS", 2)
    with PrivateDaemon("16MiB") as daemon:
        killed: set[int] = set()

        def gave_up() -> bool:
            with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
                pid = int((Path(daemon.address) / "lock").read_text())
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return "ended 3 times in a row: no cache" in caplog.text

        wait_until(gave_up, "the server gives the daemon up")
        assert len(killed) == 3
    assert not Path(daemon.address).exists()


class _Lives:
    """A daemon and a clock: each life of the daemon has a length and an answer to each ping."""

    def __init__(self, lives_s: list[float], answers: list[bool] | None = None) -> None:
        self.now_s = 0.0
        self.lives_s = lives_s
        self.said = answers
        self.killed_s: list[float] = []
        self.pauses_s: list[float] = []
        self.log = "its log"
        self._end_s = lives_s.pop(0)

    def monotonic(self) -> float:
        return self.now_s

    def poll(self) -> int | None:
        return None if self.now_s < self._end_s else 9

    def answers(self, timeout_s: float) -> bool:
        return self.said.pop(0) if self.said else True

    def kill(self) -> None:
        self.killed_s.append(self.now_s)
        self._end_s = self.now_s

    def restart(self) -> None:
        self._end_s = self.now_s + self.lives_s.pop(0)

    def wait(self, seconds: float) -> bool:
        """Until the server ends, which it does with the last life."""
        self.now_s += seconds
        if self.poll() is not None and seconds != private_daemon._POLL_S:
            self.pauses_s.append(seconds)
        return self.is_set()

    def is_set(self) -> bool:
        return not self.lives_s and self.poll() is not None

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = PrivateDaemon.__new__(PrivateDaemon)
        monkeypatch.setattr(private_daemon, "time", self)
        watched._daemon = watched._ending = self  # type: ignore[assignment]
        watched._watch()


def test_pauses_grow_with_short_lives_in_a_row_and_a_long_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_daemon, "_MAX_RESTARTS", 2)
    lives = _Lives([1, 1, 100, 1, 1, 1, 1])
    lives.watch(monkeypatch)
    assert lives.pauses_s == [0.5, 1, 0.5, 1]
    assert "ended 3 times in a row: no cache" in caplog.text
    assert lives.lives_s == [1, 1], "the daemon was not started again"


def test_only_pings_that_are_missed_in_a_row_and_in_one_life_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False] * 5 + [True] + [False] * 5 + [True] + [False] * 6  # and then begins another life
    lives = _Lives([1000, 1000, 1], [*answers, False, *[True] * 1000])
    lives.watch(monkeypatch)
    assert len(lives.killed_s) == 1
    assert lives.said is not None
    assert len(lives.said) < 1000, "the second life was asked too"
