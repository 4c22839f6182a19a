"""Opens a listening TCP socket, or explains in one line why it cannot; and what addresses tell."""

from __future__ import annotations

import socket
import threading

from tiercache.errors import ConfigError

RESOLVE_S = 1.0
"""How long a name may take to be resolved."""
_lookups: dict[str, _Lookup] = {}


def is_ipv6(endpoint: str) -> bool:
    """True for `tcp://[ADDRESS]:PORT`: a ZeroMQ socket serves it and connects to it only with the option IPV6."""
    return endpoint.startswith("tcp://[")


def wants_ipv6(endpoint: str, timeout_s: float = RESOLVE_S) -> bool:
    """True if a ZeroMQ socket should have the option IPV6 to connect to `endpoint`, which may name a host.

    With the option, ZeroMQ takes the first IPv6 address of a host that has some, otherwise the IPv4 one; without it,
    only an IPv4 address. Servers that listen on IPv4 alone are common, so a host with an IPv4 address is reached by
    that. Any other host has the option, also one whose name is unknown yet: ZeroMQ resolves it again and again.

    Blocks for at most `timeout_s`, and only for a name.
    """
    if is_ipv6(endpoint) or not endpoint.startswith("tcp://"):
        return is_ipv6(endpoint)
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return not (_has_ipv4(host, socket.AI_NUMERICHOST) or _resolves_to_ipv4(host, timeout_s))


def _resolves_to_ipv4(host: str, timeout_s: float) -> bool:
    lookup = _lookups.get(host)
    if lookup is None or not lookup.is_alive():  # one at a time, since it may hang for long
        lookup = _lookups[host] = _Lookup(host)
        try:
            lookup.start()
        except RuntimeError:  # no more threads
            return False
    lookup.join(timeout_s)
    return lookup.found


class _Lookup(threading.Thread):
    """Resolves a name. `getaddrinfo` cannot be told to end, so the thread may be left behind."""

    def __init__(self, host: str) -> None:
        super().__init__(name="tiercache-resolve", daemon=True)
        self._host = host
        self.found = False

    def run(self) -> None:
        self.found = _has_ipv4(self._host)


def _has_ipv4(host: str, flags: int = 0) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM, flags=flags))
    except (OSError, UnicodeError):
        return False


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
