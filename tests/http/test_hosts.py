"""Requests for another host, such as those of a page whose host name was rebound to this address."""

from __future__ import annotations

from typing import Any

import pytest

from tiercache.http.hosts import MAX_SHOWN_CHARS, HostCheck, allowed_hosts, refusal


def complaint(host: str = "", method: str = "GET", named: str = "", **headers: str) -> Any:
    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    check = HostCheck(nothing, allowed_hosts("127.0.0.1", named), refusal, "--http-hosts")
    given = [("host", host), *((name.replace("_", "-"), value) for name, value in headers.items())]
    encoded = [(name.encode(), value.encode()) for name, value in given if value]
    return check._complaint({"type": "http", "method": method, "headers": encoded})


OURS = "localhost LocalHost.:81 127.0.0.1 127.0.0.1: 127.0.0.1:81 ::1 [::1]:81 [0:0:0:0:0:0:0:1] cache.x cache.x:1"
THEIRS = "evil.example localhost.evil.example:80 127.0.0.1.evil.example 192.0.2.1 localhost:80:90 ::1:80 null"


def test_names_of_this_host_are_served() -> None:
    for host in OURS.split():
        assert complaint(host, named="cache.x, proxy") is None, host
        assert complaint(host, named="cache.x, proxy", origin=f"http://{host}") is None, host


def test_another_name_and_pages_of_others_get_nothing() -> None:
    for host in THEIRS.split():
        found = complaint(host)
        assert (found.status, found.code) == (421, "wrong_host"), host
        assert repr(host) in found.text
        assert "--http-hosts" in found.text
        for origin in (f"http://{host}", "null", "file://"):
            found = complaint("localhost", origin=origin)
            assert (found.status, found.code) == (403, "wrong_origin"), origin
        assert len(complaint(host + "x" * 5000).text) < MAX_SHOWN_CHARS + 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; b=1", 415),
        ("", 415),
        ("Application/JSON; charset=utf-8", None),
    ],
)
def test_forms_of_a_page_are_no_queries(kind: str, status: int | None) -> None:
    found = complaint("localhost", "POST", content_type=kind)
    assert (found and found.status) == status


def test_where_other_hosts_connect_any_name_will_do_unless_some_are_given() -> None:
    assert allowed_hosts("0.0.0.0", "") == frozenset()
    assert allowed_hosts("0.0.0.0", "cache.internal") >= {"cache.internal", "localhost"}
    assert allowed_hosts("127.0.0.2", "") >= {"127.0.0.2", "localhost", "127.0.0.1", "::1"}
