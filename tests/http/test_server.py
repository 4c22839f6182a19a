"""Hostile requests, and names crafted to be more than names."""

from __future__ import annotations

import json
import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from http_helpers import TIMEOUT_S, connect, request, spec
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

import tiercache
from tiercache.http.limits import MAX_CONNECTIONS
from tiercache.http.server import ACCEPTED_AT_ONCE

EVIL = 'x"} 1\ntiercache_up 0\n# HELP tiercache_up \\"'


def answer_to(url: str, data: bytes) -> bytes:
    """Everything that comes back on a connection of its own, until it is closed."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=TIMEOUT_S) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))
        except OSError:  # it has hung up, or reset what it did not read
            return b""


HOST = b"Host: localhost\r\n"
POST = b"POST /v1/affinity HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n", (b"400", b"")),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 20_000 + b"\r\n", (b"400", b"")),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", (b"400", b"")),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", (b"400", b"")),
        (b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", (b"421",)),
        (b"GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", (b"421",)),
        (b"GET /static/../limits.py HTTP/1.1\r\n" + HOST + b"\r\n", (b"404",)),
        (b"GET /static/%2e%2e/limits.py HTTP/1.1\r\n" + HOST + b"\r\n", (b"404",)),
        (b"GET /static//etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", (b"404",)),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (b"400", b"")),
        (POST + b"Content-Length: -5\r\n\r\n", (b"400", b"")),
        (POST + b"Content-Length: 99999999999999999999\r\n\r\n", (b"400", b"")),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", (b"400", b"")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), (b"400", b"")),
        (b"\x00" * 70_000, (b"400", b"")),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (b"400", b"505", b"404", b"")),
    ],
    ids=[
        "a huge header",
        "a header a thousand times",
        "a huge path",
        "two hosts",
        "another host",
        "an absolute path",
        "up the tree",
        "up the tree, encoded",
        "an absolute file",
        "two lengths",
        "a negative length",
        "a huge length",
        "a huge chunk",
        "TLS",
        "zeros",
        "HTTP/2",
    ],
)
def test_the_request_is_refused_and_the_next_one_answered(url: str, data: bytes, status: tuple[bytes, ...]) -> None:
    said = answer_to(url, data)
    assert (said.split(b" ", 2)[1] if said else b"") in status, said[:200]
    assert b"Traceback" not in said
    assert request(f"{url}/healthz").status == 200


def test_a_flood_of_connections_disables_nothing(
    url: str, daemon: tiercache.LaunchedDaemon, client: tiercache.Client
) -> None:
    """Silent connections: health requests are answered meanwhile, and no more connections stay than the limit."""
    pid = next(one["pid"] for one in client.stats()["sessions"] if one["name"] == "http")
    files = Path(f"/proc/{pid}/fd")
    before, address = len(list(files.iterdir())), (urlsplit(url).hostname, urlsplit(url).port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4000), hard), hard))
    with ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1500):
            closing.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
        assert request(f"{url}/healthz").status == 200
        assert len(list(files.iterdir())) - before < MAX_CONNECTIONS + 4 * ACCEPTED_AT_ONCE
    assert request(f"{url}/healthz").status == 200
    wait_until(lambda: len(list(files.iterdir())) <= before + 1, "all silent connections are closed")


def test_names_stay_names(url: str, daemon: tiercache.LaunchedDaemon) -> None:
    """In metrics, where a label could end early, and in JSON."""
    form = spec(engine=EVIL, layout=EVIL, dtype=EVIL[:8])
    with connect(daemon.address, form) as connector:
        connector.store(tiercache.KeyChain(tiercache.root_key("evil"), 4, range(4)).packed(), [0])
        text = request(f"{url}/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert [sample.value for sample in families["tiercache_up"].samples] == [1.0]
        engines = {sample.labels["engine"] for sample in families["tiercache_namespace_blocks"].samples}
        assert EVIL in engines
        rows = json.loads(request(f"{url}/v1/stats").text)["namespaces"]
        assert EVIL in {row["engine"] for row in rows}
