"""Whom requests may be for: a port of this host only answers those that name it.

A page in a browser can be given a name of its author's that resolves to 127.0.0.1 a moment later (DNS rebinding);
the browser then lets its script read what is served there. It says the author's name as `Host`, which gives it away.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from tiercache.http.limits import error_body
from tiercache.setting_kinds import is_loopback

OF_THIS_HOST = ("localhost", "127.0.0.1", "::1")
MISDIRECTED = 421
MAX_SHOWN_CHARS = 100


def allowed_hosts(listen_host: str, names: str) -> frozenset[str]:
    """Hosts that requests may name, without ports; empty for any.

    Args:
        listen_host: where the port is bound. A port that other hosts reach has names that nobody here knows.
        names: further ones, with commas between them. If there are some, they and addresses are all.
    """
    named = [name.strip() for name in names.split(",") if name.strip()]
    if not named and not is_loopback(listen_host):
        return frozenset()
    return frozenset(map(_normal, (*OF_THIS_HOST, listen_host, *named)))


def _normal(host: str) -> str:
    """One way to write a host: small letters, no brackets, no dot at its end, addresses as Python writes them."""
    bare = host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
    try:
        return str(ip_address(bare))
    except ValueError:
        return bare


def _without_port(value: str) -> str:
    name, colon, port = value.rpartition(":")
    return name if colon and (port.isdecimal() or not port) and (":" not in name or name.endswith("]")) else value


class HostCheck:
    """An ASGI application in front of another one: requests for other hosts are answered with 421.

    What has no `Host` is let through: no browser sends such a request.
    """

    def __init__(self, app: Any, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI has it."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        app = self._app if not host or _normal(_without_port(host)) in self._allowed else _refusal(host)
        await app(scope, receive, send)


def _refusal(host: str) -> Response:
    known = "ask for 127.0.0.1 or localhost, or name it with --hosts (a daemon: with --http-hosts)"
    body = error_body("wrong_host", f"{host[:MAX_SHOWN_CHARS]!r} is no name of this port: {known}")
    return Response(body, MISDIRECTED, media_type="application/json")
