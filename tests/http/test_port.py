"""The routes over a real port, and malformed requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_helpers import TIMEOUT_S, affinity, connect, request, spec, tokens_of, url_in
from waiting import wait_until

import tiercache
from tiercache.ground.extras import install_extra
from tiercache.http.__main__ import main
from tiercache.http.app import HttpError
from tiercache.http.limits import MAX_CONNECTIONS
from tiercache.http.page import FOLDER
from tiercache.http.probe import FULL, Probe
from tiercache.http.trees import Trees

HEAD = b"POST /v1/affinity HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(daemon: tiercache.LaunchedDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A port of its own where a request may take a second."""
    log = tmp_path_factory.mktemp("hasty") / "log"
    command = [sys.executable, "-m", "tiercache.cli.main", "http", daemon.address, "--listen", "127.0.0.1:0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--request-timeout", "1s"], stderr=file)
    yield url_in(log)
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0, log.read_text()


@pytest.fixture
def connected() -> Iterator[Callable[[str], socket.socket]]:
    with ExitStack() as stack:

        def make(url: str) -> socket.socket:
            where = urlsplit(url)
            assert where.port is not None
            return stack.enter_context(closing(socket.create_connection((where.hostname, where.port), TIMEOUT_S)))

        yield make


def read_all(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer, after which the connection is closed. 0 where it is cut without one."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass  # what was on its way to it is not read any more
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if head else (0, {})


def test_health(url: str) -> None:
    assert request(f"{url}/healthz").tree["status"] == "ok"
    assert request(f"{url}/v1/stats").tree["daemon"]["version"]


def test_ready_means_a_block_stored_and_loaded(url: str, client: tiercache.Client) -> None:
    with connect(client.address, spec()) as connector:  # its frames are those that a probe uses
        connector.store(bytes(range(16)), [0])
        before = client.stats()
        wait_until(lambda: request(f"{url}/readyz").tree == {"status": "ready"}, "the port is ready")
        wait_until(lambda: Probe(client).ask() == ("", ""), "the probe succeeds again, without HTTP")
        after = client.stats()
    assert after["counters"]["stored_blocks"] > before["counters"]["stored_blocks"]
    assert after["counters"]["loads_good"] > before["counters"]["loads_good"]
    assert after["tiers"]["dram"]["blocks"] == before["tiers"]["dram"]["blocks"] == 1
    assert [one["blocks"] for one in after["namespaces"] if one["engine"] == "tiercache/probe"] == [0]
    classes = before["arena"]["classes"]
    wait_until(lambda: client.stats()["arena"]["classes"] == classes, "its frames are free again")


def test_a_full_cache_is_ready() -> None:
    with tiercache.launch("2MiB", region="2MiB") as daemon, connect(daemon.address, spec()) as connector:
        keys = tiercache.KeyChain(bytes(16), 4, tokens_of("full", 32)).packed()
        assert connector.store(keys, range(32)).stored == 32
        match = connector.match(keys)
        assert match.blocks == 32  # the whole arena, and the frames are leased
        assert Probe(connector.client).ask() == ("", FULL)
        connector.release(match)


def test_the_page_is_of_this_port_alone(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        page, headers = answer.read().decode(), answer.headers
    assert request(f"{url}/dashboard").text == page
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert len(named) >= 4
    assert {request(url + path).status for path in named} == {200}
    assert request(f"{url}/static/../app.py").status == request(f"{url}/static/dashboard.html").status == 404


def test_files_have_what_the_policy_allows() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
        assert "innerHTML" not in text, path
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text), path


def test_many_clients_share_few_requests_to_the_daemon() -> None:
    """Each client gets an answer that is newer than its question, and few questions reach the daemon."""
    asked = []

    async def ask() -> dict[str, Any]:
        asked.append(time.monotonic())
        await asyncio.sleep(0)
        return {"number": len(asked)}

    async def many() -> tuple[float, list[int]]:
        trees = Trees(ask)
        first = await trees.get()
        came_s = time.monotonic()
        answers = await asyncio.gather(*(trees.get() for _ in range(100)))
        return came_s, [first["number"], *(answer["number"] for answer in answers)]

    came_s, numbers = asyncio.run(many())
    assert numbers == [1] + [2] * 100
    assert len(asked) == 2
    assert asked[1] >= came_s


def test_a_question_that_failed_is_no_answer_to_the_next() -> None:
    async def ask() -> dict[str, Any]:
        asked.append(1)
        if len(asked) == 1:
            raise HttpError(503, "daemon_unavailable", "gone")
        return {"back": True}

    async def twice() -> list[Any]:
        trees = Trees(ask)
        return [await asyncio.gather(trees.get(), trees.get(), return_exceptions=True), await trees.get()]

    asked: list[int] = []
    failed, answer = asyncio.run(twice())
    assert [isinstance(one, HttpError) for one in failed] == [True, True]
    assert answer == {"back": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "missing required field `model`"),
        ({"model": "m", "tokens": [1]}, "salt is missing"),
        ({"model": "m", "tokens": [1], "salt": None}, "Expected `str`, got `null` - at `$.salt`"),
        ({"model": "m", "tokens": [-1], "salt": ""}, "$.tokens[0]"),
        ({"model": "m", "tokens": [1 << 32], "salt": ""}, "$.tokens[0]"),
        ({"model": "m", "tokens": "text", "salt": ""}, "Expected `array`"),
        ({"model": "m", "tokens": [1], "salt": "", "prompt": "x"}, "unknown field `prompt`"),
    ],
)
def test_a_wrong_query_is_told_what_is_wrong(url: str, fields: dict[str, Any], words: str) -> None:
    answer = affinity(url, **fields)
    assert (answer.status, answer.code) == (400, "bad_query")
    assert words in answer.tree["error"]["message"]


def test_other_wrong_requests(url: str) -> None:
    assert request(f"{url}/v1/affinity", b"[1").code == "bad_query"
    assert request(f"{url}/v1/affinity", b"[" * 100_000).code == "bad_query"
    assert request(f"{url}/v1/affinity", b"\xff\x00").status == 400
    assert request(f"{url}/v1/affinity").status == 405
    assert request(f"{url}/healthz", b"{}").status == 405
    assert (request(f"{url}/etc/passwd").status, request(f"{url}/../x").code) == (404, "bad_request")
    unknown = affinity(url, model="unknown", tokens=[1], salt="")
    assert (unknown.status, unknown.code) == (404, "unknown_model")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\xfc",
        b"HELO\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
    ],
    ids=["tls", "smtp", "version", "long", "negative", "length"],
)
def test_garbage_is_answered_and_closed(url: str, connected: Callable[[str], socket.socket], garbage: bytes) -> None:
    sock = connected(url)
    sock.sendall(garbage)
    sock.shutdown(socket.SHUT_WR)
    status, body = read_all(sock)
    assert (status, body["error"]["code"]) == (400, "bad_request")
    assert request(f"{url}/healthz").status == 200


def test_a_body_that_is_too_large(url: str, connected: Callable[[str], socket.socket]) -> None:
    sock = connected(url)
    sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    try:
        for _ in range(33):  # 64 KiB more than is allowed
            sock.sendall(chunk)
    except (BrokenPipeError, ConnectionResetError):
        return  # it is not read to its end
    status, body = read_all(sock)
    assert (status, body["error"]["code"]) == (413, "too_large")


def test_a_slow_client_is_cut(hasty: str, connected: Callable[[str], socket.socket]) -> None:
    """All at once, so that they wait together."""
    silent, head = connected(hasty), connected(hasty)
    head.sendall(HEAD)
    body = connected(hasty)
    body.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
    drip = connected(hasty)
    drip.sendall(HEAD)
    deaf = connected(hasty)
    deaf.sendall(b"GET /static/dashboard.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)  # 30 MB of answers
    assert body.recv(65536).startswith(b"HTTP/1.1 408")
    for slow in (drip, deaf):  # a byte now and then does not extend the deadline

        def is_cut(slow: socket.socket = slow) -> bool:
            try:
                slow.sendall(b"X")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(is_cut, "it is cut")
    assert (read_all(silent), read_all(head)) == ((0, {}), (0, {}))
    wait_until(lambda: request(f"{hasty}/healthz").status == 200, "others are answered")


def test_too_many_connections(url: str, connected: Callable[[str], socket.socket]) -> None:
    """Silent connections make room for one that asks; the longest silent one goes first."""
    opened = [connected(url) for _ in range(MAX_CONNECTIONS)]
    for sock in opened[::2]:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
    for number in range(5):
        assert request(f"{url}/healthz").status == 200, number
    with suppress(ConnectionResetError):
        assert opened[0].recv(1) == b"", "the oldest connection was closed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:8181"], "listen = 0.0.0.0:8181: other hosts could read the statistics there"),
        (["--listen", "8181"], "is no host and port: write for example 127.0.0.1:8181"),
        (["--listen", "127.0.0.1:99999"], "is no host and port"),
        (["--listen", "::1"], "is no host and port"),
        (["--listen", "198.51.100.1:8181", "--allow-remote"], "198.51.100.1:8181 cannot be listened on"),
        (["--request-timeout", "0s"], "must be more than 0"),
        (["--request-timeout", "soon"], "request_timeout: 'soon' is not understood"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["/nowhere", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert words in told


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "tiercache.http.server", raising=False)
    assert main([]) == 2
    assert capsys.readouterr().err == f"tiercache http: needs uvicorn: {install_extra('http')}\n"
