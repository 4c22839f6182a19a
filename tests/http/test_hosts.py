"""Requests for another host, such as those of a page whose host name was rebound to this address."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from http_helpers import TIMEOUT_S, url_in

import tiercache
from tiercache.config.daemon_config import DaemonConfig
from tiercache.errors import ConfigError
from tiercache.http.hosts import allowed_hosts
from tiercache.http.server import HttpSettings


def ask(
    url: str, host: str, method: str = "GET", path: str = "/healthz", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    connection.putrequest(method, path, skip_host=True)
    if host:
        connection.putheader("Host", host)
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


def test_names_of_this_host_are_served(url: str) -> None:
    port = urlsplit(url).port
    names = f"localhost LocalHost.:{port} 127.0.0.1 127.0.0.1: 127.0.0.1:{port} [::1]:{port} [0:0:0:0:0:0:0:1]"
    for host in names.split():
        assert ask(url, host)[0] == 200, host


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/v1/stats", "/v1/affinity", "/", "/nothing"])
def test_another_name_gets_nothing(url: str, path: str) -> None:
    names = "evil.example localhost.evil.example:80 127.0.0.1.evil.example 192.0.2.1 localhost:80:90"
    for host in names.split():
        status, body = ask(url, host, path=path)
        assert status == 421
        error = body["error"]
        assert isinstance(error, dict)
        assert error["code"] == "wrong_host"
        assert repr(host) in error["message"]
        assert "--http-hosts" in error["message"]
    assert ask(url, "evil.example", "POST", "/v1/affinity")[0] == 421


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example:80", "null", "file://"])
def test_pages_of_others_get_nothing(url: str, origin: str) -> None:
    for method, path in (("GET", "/v1/stats"), ("POST", "/v1/affinity"), ("OPTIONS", "/v1/affinity")):
        status, body = ask(url, "localhost", method, path, {"Origin": origin, "Content-Type": "application/json"})
        assert status == 403
        assert body["error"]["code"] == "wrong_origin"  # type: ignore[index]
    assert ask(url, "localhost", headers={"Origin": f"http://127.0.0.1:{urlsplit(url).port}"})[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=1", ""])
def test_forms_of_a_page_are_no_queries(url: str, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    status, body = ask(url, "localhost", "POST", "/v1/affinity", headers)
    assert (status, body["error"]["code"]) == (415, "wrong_type")  # type: ignore[index]
    assert ask(url, "localhost", "POST", "/v1/affinity", {"Content-Type": "Application/JSON; charset=utf-8"})[0] == 400


def test_further_names_are_served_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with tiercache.launch("4MiB", region="2MiB", http="127.0.0.1:0", http_hosts="cache.internal, proxy", log=log):
        url = url_in(log)
        for host in ("cache.internal", "proxy:8181", "localhost"):
            assert ask(url, host)[0] == 200
        assert ask(url, "evil.example")[0] == 421


def test_where_other_hosts_connect_any_name_will_do_unless_some_are_given() -> None:
    assert allowed_hosts("0.0.0.0", "") == frozenset()
    assert allowed_hosts("0.0.0.0", "cache.internal") >= {"cache.internal", "localhost"}
    assert allowed_hosts("127.0.0.2", "") >= {"127.0.0.2", "localhost", "127.0.0.1", "::1"}


@pytest.mark.parametrize("hosts", ["http://cache", "cache:8181", "a,,b", "a b", "::1"])
def test_what_is_no_name_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="is no host: write names without port"):
        DaemonConfig(http_hosts=hosts)
    with pytest.raises(ConfigError, match="is no host: write names without port"):
        HttpSettings(run_dir=Path("/tmp"), hosts=hosts)
