"""The HTTP process and its daemon: which of them dies or returns, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from http_helpers import request, url_in
from waiting import state_of, wait_until

import tiercache
from tiercache.config.daemon_config import DaemonConfig
from tiercache.errors import ConfigError, DaemonUnavailable

Launch = Callable[..., tiercache.LaunchedDaemon]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launch]:
    with ExitStack() as stack:

        def start(http: str = "127.0.0.1:0") -> tiercache.LaunchedDaemon:
            return stack.enter_context(tiercache.launch("8MiB", region="2MiB", http=http, log=tmp_path / "log"))

        yield start


def stats(daemon: tiercache.LaunchedDaemon) -> dict[str, Any]:
    with tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client:
        return client.stats()


def http_pid(daemon: tiercache.LaunchedDaemon) -> int:
    """The pid of the HTTP process that is connected, or 0."""
    pids = [session["pid"] for session in stats(daemon)["sessions"] if session["name"] == "http"]
    return int(pids[0]) if pids else 0


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it a zombie that its parent has not reaped."""
    return state_of(pid) in ("", "Z", "X")


class Launching(subprocess.Popen[bytes]):
    """A daemon in the background. Its children end with it."""

    def __init__(self, directory: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(directory / "run"), "--arena", "8MiB"]
        super().__init__([*command, "--region", "2MiB", *flags], stderr=subprocess.DEVNULL)

    def __exit__(self, *error: Any) -> None:
        self.kill()
        self.wait(30)


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def test_it_is_started_again_when_it_dies(launched: Launch) -> None:
    daemon = launched()
    first = url_in(Path(daemon.log))
    pid = wait_until(lambda: http_pid(daemon), "the HTTP process is connected")
    os.kill(pid, signal.SIGKILL)
    second = url_in(Path(daemon.log), 2)
    wait_until(lambda: http_pid(daemon) not in (0, pid), "another HTTP process is connected")
    wait_until(lambda: request(f"{second}/readyz").status == 200, "the port is ready")
    assert first == second
    assert "the HTTP process ended with status -9: it is started again in 1 s" in Path(daemon.log).read_text()


@pytest.mark.parametrize("hung", [False, True], ids=["running", "hung"])
def test_a_killed_daemon_leaves_nothing(launched: Launch, hung: bool) -> None:
    daemon = launched()
    url_in(Path(daemon.log))
    pid = wait_until(lambda: http_pid(daemon), "the HTTP process is connected")
    if hung:
        os.kill(pid, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), "the HTTP process has ended")


def test_a_daemon_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with Launching(tmp_path, "--http", "127.0.0.1:0") as daemon:
        wait_until(lambda: children_of(daemon.pid), "the HTTP process is started")
        [pid] = children_of(daemon.pid)
        daemon.kill()  # long before the child has loaded what it needs
    wait_until(lambda: is_gone(pid), "the HTTP process has ended")


@pytest.mark.parametrize("early", [False, True], ids=["running", "starting"])
def test_a_port_alone_ends_with_the_process_that_started_it(launched: Launch, tmp_path: Path, early: bool) -> None:
    log = tmp_path / "alone"
    program = (
        "import sys, time; from pathlib import Path; from http_helpers import http_alone\n"
        "with http_alone(Path(sys.argv[1]), '127.0.0.1:0', Path(sys.argv[2])) as child:\n"
        "    print(child.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, launched().address, str(log)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        if not early:
            url_in(log)
        starter.kill()
    wait_until(lambda: is_gone(pid), "the HTTP process has ended")


def test_a_stopped_daemon_ends_it_first(launched: Launch) -> None:
    daemon = launched()
    url_in(Path(daemon.log))
    pid = wait_until(lambda: http_pid(daemon), "the HTTP process is connected")
    daemon.close()
    assert (daemon.poll(), is_gone(pid)) == (0, True)
    assert "going on without it" not in Path(daemon.log).read_text()  # it never saw the daemon go


def test_a_daemon_that_hangs_is_unhealthy(launched: Launch) -> None:
    daemon = launched()
    url = url_in(Path(daemon.log))
    wait_until(lambda: request(f"{url}/healthz").status == 200, "the port is healthy")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        answers = [request(f"{url}/{path}") for path in ("healthz", "readyz", "v1/stats")]
        assert [one.status for one in answers] == [503, 503, 503]
        assert answers[0].code == "daemon_unavailable"
        assert "tiercache_up 0\n" in request(f"{url}/metrics").text
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: request(f"{url}/readyz").status == 200, "the port is ready again")


def test_a_port_that_is_taken_is_said_at_the_start(launched: Launch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        text = rf"http = 127\.0\.0\.1:{port} cannot be listened on: Address already in use: choose another"
        with pytest.raises(DaemonUnavailable, match=text):
            launched(f"127.0.0.1:{port}")
    launched(f"127.0.0.1:{port}")


def test_it_keeps_its_port_while_it_is_started_again(launched: Launch) -> None:
    daemon = launched()
    url = url_in(Path(daemon.log))
    wait_until(lambda: http_pid(daemon), "the HTTP process is connected")
    os.kill(http_pid(daemon), signal.SIGKILL)
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    assert url_in(Path(daemon.log), 2) == url


def test_a_hangup_is_none_of_its_business(launched: Launch) -> None:
    daemon = launched()
    url = url_in(Path(daemon.log))
    pid = wait_until(lambda: http_pid(daemon), "the HTTP process is connected")
    os.kill(pid, signal.SIGHUP)
    assert request(f"{url}/healthz").status == 200
    assert http_pid(daemon) == pid


def test_other_hosts_are_let_in_only_if_that_is_said(launched: Launch) -> None:
    with pytest.raises(DaemonUnavailable, match=r"http = 0\.0\.0\.0:0: other hosts could read the statistics there"):
        launched("0.0.0.0:0")
    with pytest.raises(ConfigError, match="allow it with --http-allow-remote yes"):
        DaemonConfig(http="192.0.2.1:80")
    with pytest.raises(ConfigError, match=r"write for example 127\.0\.0\.1:8181"):
        DaemonConfig(http="localhost")
    for address in ("127.0.0.2:1", "[::1]:1", "localhost:1"):
        assert DaemonConfig(http=address).http == address
    assert DaemonConfig(http="192.0.2.1:80", http_allow_remote=True).http
