"""Requests that a foreign web page can make a browser send to a server on this host: none reaches a route."""

from __future__ import annotations

from typing import Any

import pytest
from service_alone import JSON, ask, bare_service

from tiercache.errors import ConfigError
from tiercache.http.hosts import allowed_hosts
from tiercache.serve.settings import ServeSettings


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/v1/completions", "/nothing"])
def test_names_that_were_made_to_mean_this_host_get_nothing(path: str) -> None:
    for host in ("evil.example", "localhost.evil.example:8000", "192.0.2.1"):
        status, body = ask(bare_service(), "GET", path, host=host)
        assert status == 421
        assert b"wrong_host" in body
        assert b"--allowed-hosts" in body


def test_this_host_is_served_by_its_names() -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert ask(bare_service(), "GET", "/v1/models", host=host)[0] == 200
    assert ask(bare_service(), "GET", "/v1/models", host="localhost", origin="http://localhost:8000")[0] == 200
    assert ask(bare_service(), "GET", "/v1/models")[0] == 200, "no browser leaves Host out"


def test_pages_of_others_and_their_forms_do_not_come_to_the_engine() -> None:
    """The stand-in for an engine has no `submit`: a request that reaches it gets a 500."""
    post = "POST", "/v1/completions"
    assert ask(bare_service(), *post, host="localhost", origin="https://evil.example", content_type=JSON)[0] == 403
    for kind in ({}, {"content_type": "text/plain"}, {"content_type": "application/x-www-form-urlencoded"}):
        assert ask(bare_service(), *post, host="localhost", **kind)[0] == 415
    assert ask(bare_service(), *post, host="localhost", content_type="application/json; charset=utf-8")[0] == 400
    status, body = ask(bare_service(), "OPTIONS", "/v1/completions", host="localhost", origin="https://evil.example")
    assert status == 403, "a browser's preflight request is refused"
    assert b"wrong_origin" in body


def test_further_names_can_be_allowed() -> None:
    service = bare_service(allowed_hosts("127.0.0.1", "llm.internal"))
    assert ask(service, "GET", "/v1/models", host="llm.internal", origin="https://llm.internal")[0] == 200
    assert ask(service, "GET", "/v1/models", host="evil.example")[0] == 421
    everywhere = bare_service(allowed_hosts("0.0.0.0", ""))
    assert ask(everywhere, "GET", "/v1/models", host="node7")[0] == 200
    assert ask(everywhere, "POST", "/v1/completions", host="node7", content_type="text/plain")[0] == 415


def test_what_is_no_name_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts is http://x: 'http://x' is no host"):
        ServeSettings(model=tmp_path, allowed_hosts="http://x")
