"""The HTTP process and its daemon: which of them dies or returns, and what is left."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from http_helpers import request, url_in
from waiting import state_of, wait_until

import tiercache
from tiercache.errors import DaemonUnavailable

Launch = Callable[..., tiercache.LaunchedDaemon]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launch]:
    with ExitStack() as stack:

        def start(http: str = "127.0.0.1:0", **settings: str) -> tiercache.LaunchedDaemon:
            log = tmp_path / "log"
            return stack.enter_context(tiercache.launch("8MiB", region="2MiB", http=http, log=log, **settings))

        yield start


def http_pid(daemon: tiercache.LaunchedDaemon) -> int:
    """The pid of the HTTP process that is connected, or 0."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        pids = [session["pid"] for session in client.stats()["sessions"] if session["name"] == "http"]
    return int(pids[0]) if pids else 0


def connected(daemon: tiercache.LaunchedDaemon) -> int:
    return wait_until(lambda: http_pid(daemon), "the HTTP process is connected")


def wait_until_gone(pid: int) -> None:
    """Until a process has ended, be it a zombie that its parent has not reaped."""
    wait_until(lambda: state_of(pid) in ("", "Z", "X"), "the HTTP process has ended")


def test_a_stopped_daemon_ends_it_first(launched: Launch) -> None:
    daemon = launched()
    pid = connected(daemon)
    daemon.close()
    assert daemon.poll() == 0
    wait_until_gone(pid)
    assert "going on without it" not in Path(daemon.log).read_text()  # it never saw the daemon go


def test_a_port_that_is_taken_is_said_at_the_start(launched: Launch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        text = rf"http = 127\.0\.0\.1:{port} cannot be listened on: Address already in use: choose another"
        with pytest.raises(DaemonUnavailable, match=text):
            launched(f"127.0.0.1:{port}")


@pytest.mark.stress
def test_it_is_started_again_at_its_port_when_it_dies(launched: Launch) -> None:
    daemon = launched()
    first, pid = url_in(Path(daemon.log)), connected(daemon)
    os.kill(pid, signal.SIGHUP)
    assert request(f"{first}/healthz").status == 200, "there is nothing to read again"
    assert http_pid(daemon) == pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))).close()
    assert url_in(Path(daemon.log), 2) == first
    wait_until(lambda: http_pid(daemon) not in (0, pid), "another HTTP process is connected")
    wait_until(lambda: request(f"{first}/readyz").status == 200, "the port is ready")
    assert "the HTTP process ended with status -9: it is started again in 1 s" in Path(daemon.log).read_text()


@pytest.mark.stress
@pytest.mark.parametrize("hung", [False, True], ids=["running", "hung"])
def test_a_killed_daemon_leaves_nothing(launched: Launch, hung: bool) -> None:
    daemon = launched()
    pid = connected(daemon)
    if hung:
        os.kill(pid, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGKILL)
    wait_until_gone(pid)


@pytest.mark.stress
def test_a_daemon_that_hangs_is_unhealthy(launched: Launch) -> None:
    daemon = launched()
    url = url_in(Path(daemon.log))
    wait_until(lambda: request(f"{url}/healthz").status == 200, "the port is healthy")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        answers = [request(f"{url}/{path}") for path in ("healthz", "readyz", "v1/stats")]
        assert [one.status for one in answers] == [503] * 3
        assert [one.code for one in answers] == ["daemon_unavailable", "not_ready", "daemon_unavailable"]
        assert "tiercache_up 0\n" in request(f"{url}/metrics").text
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: request(f"{url}/readyz").status == 200, "the port is ready again")
