"""The port of a real daemon: hostile requests as a table, floods, slow clients; and which process outlives which."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from http_helpers import TIMEOUT_S, affinity, connect, connect_socket, read_all, request, spec, url_in
from prometheus_client.parser import text_string_to_metric_families
from waiting import state_of, wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.http.__main__ import main
from tiercache.http.app import FOLDER
from tiercache.http.limits import MAX_CONNECTIONS
from tiercache.http.probe import Probe
from tiercache.http.query import MAX_SEGMENTS
from tiercache.http.server import ACCEPTED_AT_ONCE

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/affinity HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
GET = b"GET /healthz HTTP/1.1\r\n"
CUT = 0
"""The connection may be closed without an answer: the client has hung up before its body was there."""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n", 400),
        (GET + HOST + b"X: a\r\n" * 20_000 + b"\r\n", 400),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (GET + HOST + b"Host: evil.example\r\n\r\n", 400),
        (GET + b"Host: evil.example\r\n\r\n", 421),
        (b"GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (GET + HOST + b"Origin: https://evil.example\r\n\r\n", 403),
        (POST.replace(b"application/json", b"text/plain") + b"\r\n", 415),
        (b"GET /static/../limits.py HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"GET /static/%2e%2e/limits.py HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"GET /static//etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", CUT),
        (POST + b"Content-Length: -5\r\n\r\n", 400),
        (POST + b"Content-Length: x\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999999999\r\n\r\n", CUT),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", CUT),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 33, 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        (b"HELO\r\n\r\n", 400),
        (b"GET / HTTP/9\r\n\r\n", 400),
        (b"\x00" * 70_000, 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
    ],
    ids=lambda one: one[:60] if isinstance(one, bytes) else None,
)
def test_a_hostile_request_is_refused_and_the_next_one_answered(url: str, data: bytes, status: int) -> None:
    with connect_socket(url) as sock:
        with suppress(OSError):  # it has hung up, and does not read the rest
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    was_cut = answer.status == CUT and (status == CUT or len(data) > 16_000)  # what is too large is not read whole
    assert was_cut or answer.status == (status or 400), answer
    assert was_cut or '{"error":{"code":"' in answer.text
    assert "Traceback" not in answer.text
    assert request(f"{url}/healthz").status == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[1", ""),
        (b"[" * 100_000, ""),
        (b"\xff\x00", ""),
        ({}, "missing required field `model`"),
        ({"tokens": [1]}, "salt is missing"),
        ({"tokens": [1], "salt": None}, "Expected `str`, got `null` - at `$.salt`"),
        ({"tokens": [-1], "salt": ""}, "$.tokens[0]"),
        ({"tokens": [1 << 32], "salt": ""}, "$.tokens[0]"),
        ({"tokens": "text", "salt": ""}, "Expected `array`"),
        ({"tokens": [1], "salt": "", "prompt": "x"}, "unknown field `prompt`"),
        ({"salt": ""}, "either as tokens or as segments"),
        ({"salt": "", "tokens": [1], "segments": []}, "either as tokens or as segments"),
        ({"salt": "", "segments": "x"}, "Expected `array`"),
        ({"salt": "", "segments": [5]}, "Expected `object | array`, got `int` - at `$.segments[0]`"),
        ({"salt": "", "segments": [[1], {"unordered": [[1], ["a"]]}]}, "$.segments[1].unordered[1][0]"),
        ({"salt": "", "segments": [[-1]]}, ">= 0"),
        ({"salt": "", "segments": [{}]}, "missing required field `unordered`"),
        ({"salt": "", "segments": [{"unordered": [], "order": 1}]}, "unknown field `order`"),
        ({"salt": "", "segments": [{"unordered": [[1]] * MAX_SEGMENTS}, [1]]}, f"{MAX_SEGMENTS + 1} segments: at most"),
        ({"salt": "", "segments": [{"unordered": []}] * 100_000}, "100000 segments: at most"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_a_wrong_query_is_told_what_is_wrong(url: str, body: Any, words: str) -> None:
    sent = body if isinstance(body, bytes) else json.dumps({"model": "m", **body} if body else {}).encode()
    answer = request(f"{url}/v1/affinity", sent)
    assert (answer.status, answer.code) == (400, "bad_query")
    message = answer.tree["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_wrong_paths_and_methods(url: str) -> None:
    wrong = [("/v1/affinity", None, 405), ("/healthz", b"{}", 405), ("/etc/passwd", None, 404)]
    wrong += [("/v1/history?after=x", None, 400), (f"/v1/history?after={'9' * 5000}", None, 400)]
    assert [request(url + path, body).status for path, body, _ in wrong] == [status for *_, status in wrong]
    unknown = affinity(url, model="unknown", tokens=[1], salt="")
    assert (unknown.status, unknown.code) == (404, "unknown_model")


EVIL = 'x"} 1\ntiercache_up 0\n# HELP tiercache_up \\"'


def test_names_stay_names(url: str, daemon: tiercache.LaunchedDaemon) -> None:
    """In metrics, where a label could end early, and in JSON."""
    with connect(daemon.address, spec(engine=EVIL, layout=EVIL, dtype=EVIL[:8])) as connector:
        connector.store(tiercache.KeyChain(tiercache.root_key("evil"), 4, range(4)).packed(), [0])
        families = {one.name: one for one in text_string_to_metric_families(request(f"{url}/metrics").text)}
        assert [sample.value for sample in families["tiercache_up"].samples] == [1.0]
        assert EVIL in {sample.labels["engine"] for sample in families["tiercache_namespace_blocks"].samples}
        assert EVIL in {row["engine"] for row in request(f"{url}/v1/stats").tree["namespaces"]}


def test_the_page_is_of_this_port_alone(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert request(f"{url}/dashboard").text == page
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert len(named) >= 4
    assert {request(url + path).status for path in named} == {200}


def test_files_have_what_the_policy_allows() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
        assert "innerHTML" not in text, path
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text), path


def test_ready_means_a_block_stored_and_loaded(url: str, client: tiercache.Client) -> None:
    with connect(client.address, spec()) as connector:  # its frames are those that a probe uses
        connector.store(bytes(range(16)), [0])
        before = client.stats()
        wait_until(lambda: request(f"{url}/readyz").tree == {"status": "ready"}, "the port is ready")
        wait_until(lambda: Probe(client).ask() == ("", ""), "the probe succeeds again, without HTTP")
        after = client.stats()
    assert after["counters"]["stored_blocks"] > before["counters"]["stored_blocks"]
    assert after["counters"]["loads_good"] > before["counters"]["loads_good"]
    assert after["traffic"] == before["traffic"], "health checks are not traffic"
    assert [one["blocks"] for one in after["namespaces"] if one["engine"] == "tiercache/probe"] == [0]
    assert "tiercache/probe" not in request(f"{url}/metrics").text
    classes = before["arena"]["classes"]
    wait_until(lambda: client.stats()["arena"]["classes"] == classes, "its frames are free again")


@pytest.mark.stress
def test_a_flood_of_connections_disables_nothing(url: str, client: tiercache.Client) -> None:
    """Silent connections: health requests are answered meanwhile, and no more connections stay than the limit."""
    pid = next(one["pid"] for one in client.stats()["sessions"] if one["name"] == "http")
    files = Path(f"/proc/{pid}/fd")
    before = len(list(files.iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4000), hard), hard))
    with ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1500):
            closing.enter_context(connect_socket(url))
        assert request(f"{url}/healthz").status == 200
        assert len(list(files.iterdir())) - before < MAX_CONNECTIONS + 4 * ACCEPTED_AT_ONCE
    assert request(f"{url}/healthz").status == 200
    wait_until(lambda: len(list(files.iterdir())) <= before + 1, "all silent connections are closed")


def test_silent_connections_make_room_for_one_that_asks(url: str) -> None:
    """The longest silent one goes first."""
    with ExitStack() as stack:
        opened = [stack.enter_context(connect_socket(url)) for _ in range(MAX_CONNECTIONS)]
        for sock in opened[::2]:
            sock.sendall(GET + b"Host: loc")
        for number in range(5):
            assert request(f"{url}/healthz").status == 200, number
        with suppress(ConnectionResetError):
            assert opened[0].recv(1) == b"", "the oldest connection was closed"


@pytest.fixture
def hasty(daemon: tiercache.LaunchedDaemon, tmp_path: Path) -> Iterator[str]:
    """A port of its own where a request may take a second."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tiercache.cli.main", "http", daemon.address, "--listen", "127.0.0.1:0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--request-timeout", "1s"], stderr=file)
    yield url_in(log)
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0, log.read_text()


@pytest.mark.stress
def test_a_slow_client_is_cut(hasty: str) -> None:
    """All at once, so that they wait together."""
    with ExitStack() as stack:
        silent, head, body, drip, deaf = (stack.enter_context(connect_socket(hasty)) for _ in range(5))
        head.sendall(POST)
        body.sendall(POST + b"Content-Length: 10\r\n\r\n{")
        drip.sendall(POST)
        deaf.sendall(b"GET /static/dashboard.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)  # 30 MB of answers
        assert body.recv(65536).startswith(b"HTTP/1.1 408")

        def is_cut(slow: socket.socket) -> bool:
            try:
                slow.sendall(b"X")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(lambda: is_cut(drip), "a byte now and then does not extend the deadline")
        wait_until(lambda: is_cut(deaf), "the client that reads nothing is cut")
        assert (read_all(silent).status, read_all(head).status) == (0, 0)
    wait_until(lambda: request(f"{hasty}/healthz").status == 200, "others are answered")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:8181"], "listen = 0.0.0.0:8181: other hosts could read the statistics there"),
        (["--listen", "8181"], "is not a host and port: write for example 127.0.0.1:8181"),
        (["--listen", "::1"], "is not a host and port"),
        (["--listen", "198.51.100.1:8181", "--allow-remote"], "198.51.100.1:8181 cannot be listened on"),
        (["--hosts", "cache:8181"], "is not a host: write names without port"),
        (["--request-timeout", "0s"], "must be more than 0"),
        (["--request-timeout", "soon"], "request_timeout: 'soon' is not understood"),
    ],
)
def test_what_cannot_be_served_is_a_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere", *arguments]) == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), words in told) == (1, True)


# --- the HTTP process and its daemon: which of them dies or returns, and what is left ----------------


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
