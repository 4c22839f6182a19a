"""Addresses of a host's name, until a deadline.

`getaddrinfo` cannot be told to end: it runs on a thread that may be left behind. Connections that ask for the same name
at once share a thread, and the process has at most `MOST_LOOKUPS` such threads: a name server that hangs costs no more.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .url import Place

MOST_LOOKUPS = 16
MOST_ADDRESSES = 8
"""Addresses of one name that are tried: the first ones."""
LOOK_S = 0.05
"""How often a thread that waits for a name checks whether its connection was closed."""


class Address(NamedTuple):
    """What `socket` and `connect` want."""

    family: int
    address: str | tuple[str, int] | tuple[str, int, int, int]


class _Lookup:
    """A name that is being resolved."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.done = threading.Event()
        self.found: list[Address] = []
        self.error = ""

    def run(self) -> None:
        """On the thread."""
        try:
            self.found = _ask(self.place)
        except (OSError, UnicodeError) as error:
            self.error = getattr(error, "strerror", None) or "not a valid name"
        finally:
            with _lock:
                del _running[self.place]
            self.done.set()


_lock = threading.Lock()
_running: dict[Place, _Lookup] = {}


def resolve(place: Place, deadline_s: float, ended: Callable[[], bool]) -> list[Address]:
    """The addresses of a place. Raises StoreError at the deadline, and soon after `ended` says so."""
    if place.path:
        return [Address(socket.AF_UNIX, place.path)]
    literal = _literal(place)
    if literal:
        return literal
    lookup = _begin(place)
    while not lookup.done.wait(min(LOOK_S, max(0.0, deadline_s - time.monotonic()))):
        if ended():
            raise StoreError(StoreProblem.UNREACHABLE, f"{place}: the connection was closed")
        if time.monotonic() >= deadline_s:
            text = f"{place}: its name was not resolved in time: check this host's name servers, or write an address"
            raise StoreError(StoreProblem.TIMEOUT, text)
    if not lookup.found:
        text = f"{place}: its name does not resolve ({lookup.error or 'no address'}): check the store's URL"
        raise StoreError(StoreProblem.UNREACHABLE, text)
    return lookup.found[:MOST_ADDRESSES]


def _begin(place: Place) -> _Lookup:
    with _lock:
        lookup = _running.get(place)
        if lookup is not None:
            return lookup
        if len(_running) >= MOST_LOOKUPS:
            text = f"{place}: {MOST_LOOKUPS} names are being resolved and none is done: check this host's name servers"
            raise StoreError(StoreProblem.UNREACHABLE, text)
        lookup = _running[place] = _Lookup(place)
        try:
            threading.Thread(target=lookup.run, name="tiercache-resolve", daemon=True).start()
        except RuntimeError:  # no more threads
            del _running[place]
            text = f"{place}: there is no thread to resolve its name: raise the limit of processes"
            raise StoreError(StoreProblem.UNREACHABLE, text) from None
        return lookup


def _literal(place: Place) -> list[Address]:
    """The address, where the host already is one."""
    try:
        return _ask(place, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


def _ask(place: Place, flags: int = 0) -> list[Address]:
    answers = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICSERV)
    return [Address(family, address) for family, _, _, _, address in answers]  # type: ignore[arg-type]
