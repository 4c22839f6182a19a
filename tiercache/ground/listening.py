"""Opens a listening TCP socket, or explains in one line why it cannot; and what addresses tell."""

from __future__ import annotations

import socket

from tiercache.errors import ConfigError


def is_ipv6(endpoint: str) -> bool:
    """True for `tcp://[ADDRESS]:PORT`: a ZeroMQ socket serves it and connects to it only with the option IPV6."""
    return "[" in endpoint


def remedy(address: str) -> str:
    """What to do about an address that cannot be bound."""
    if address.startswith("ipc://"):
        return "choose another path"
    if "%" in address:
        return "choose another port, and behind the % the name of an interface that has the address (ip address)"
    if "[fe80:" in address.lower():
        return "write the interface of a link-local address, as in [fe80::1%eth0]"
    return "choose another port, or another address of this host"


def bind(host: str, port: int, where: str) -> socket.socket:
    """A socket bound to an address, to which clients cannot connect yet; port 0 is any free port.

    `where` is the user's name for it. Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _refusal(where, error) from None
    return listener


def listen(listener: socket.socket, backlog: int, where: str) -> None:
    """Start listening. Of two processes that start together both may bind: one gets its ConfigError here."""
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _refusal(where, error) from None


def _refusal(where: str, error: OSError) -> ConfigError:
    return ConfigError(f"{where} cannot be listened on: {error.strerror}: {remedy(where)}")
