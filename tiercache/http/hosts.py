"""Protects against requests that a foreign web page makes a browser on this host send.

A page's author can make the page's host name resolve to 127.0.0.1 a moment later (DNS rebinding); the browser then lets
the page's script read what is served there. The request's `Host` is still the author's name, which gives it away. Even
without that a page may send classic forms, for which browsers make no preflight request: they come with an `Origin` and
cannot be of type application/json.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response

from tiercache.config.setting_kinds import is_loopback
from tiercache.http.limits import error_body

OF_THIS_HOST = ("localhost", "127.0.0.1", "::1")
MISDIRECTED = 421
JSON = "application/json"
MAX_SHOWN_CHARS = 100


def allowed_hosts(listen_host: str, names: str) -> frozenset[str]:
    """Hosts that requests may name, without ports; empty for any.

    Args:
        listen_host: where the port is bound. The names of a port that other hosts can reach are not known here.
        names: further host names, separated by commas. If given, only they and addresses are allowed.
    """
    named = [name.strip() for name in names.split(",") if name.strip()]
    if not named and not is_loopback(listen_host):
        return frozenset()
    return frozenset(map(_normal, (*OF_THIS_HOST, listen_host, *named)))


def _normal(host: str) -> str:
    """The normal form of a host: lower case, no brackets, no trailing dot, addresses as Python writes them."""
    bare = host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
    try:
        return str(ip_address(bare))
    except ValueError:
        return bare


def _without_port(value: str) -> str:
    name, colon, port = value.rpartition(":")
    return name if colon and (port.isdecimal() or not port) and (":" not in name or name.endswith("]")) else value


class Complaint(NamedTuple):
    """Why a request is refused."""

    status: int
    code: str
    text: str


class HostCheck:
    """An ASGI application in front of another; it stops requests that a foreign page could have sent.

    Requests for other hosts get 421, those from pages of other hosts 403, POSTs of anything but JSON 415. A request
    without `Host` or `Origin` passes the check of that header: no browser sends such a request.

    Args:
        allowed: result of `allowed_hosts`; empty: any `Host` and any `Origin`.
        refuse: makes the answer.
        remedy: how to allow further names.
    """

    def __init__(self, app: Any, allowed: frozenset[str], refuse: Callable[[Complaint], Response], remedy: str) -> None:
        self._app = app
        self._allowed = allowed
        self._refuse = refuse
        self._remedy = remedy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI interface."""
        complaint = self._complaint(scope) if scope["type"] == "http" else None
        await (self._app if complaint is None else self._refuse(complaint))(scope, receive, send)

    def _complaint(self, scope: Any) -> Complaint | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self._allowed and host and not self._is_allowed(host):
            known = f"ask for 127.0.0.1 or localhost, or name it with {self._remedy}"
            return Complaint(MISDIRECTED, "wrong_host", f"{_shown(host)} is not a name of this port: {known}")
        if self._allowed and origin and not self._is_allowed(origin.partition("://")[2]):
            text = f"pages of {_shown(origin)} may not ask here: name its host with {self._remedy}"
            return Complaint(403, "wrong_origin", text)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != JSON:
            return Complaint(415, "wrong_type", f"the body's type is {_shown(kind)}: send it as Content-Type: {JSON}")
        return None

    def _is_allowed(self, host: str) -> bool:
        return _normal(_without_port(host)) in self._allowed


def _shown(text: str) -> str:
    return repr(text[:MAX_SHOWN_CHARS])


def refusal(complaint: Complaint) -> Response:
    """The answer of the daemon's port."""
    return Response(error_body(complaint.code, complaint.text), complaint.status, media_type=JSON)
