"""One socket: connects, sends and receives, until the deadline of the call.

The socket blocks, and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO: for one system call as a whole, however
the bytes drip). So a value of megabytes takes two system calls: one for the line before it, which goes to a small
buffer with the value's first bytes, and one that waits for the rest, straight into the caller's memory. TLS has its
own lines (`TlsLine`): there each record is a call, and Python keeps the time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .url import Place

Part = bytes | memoryview

READ_AHEAD_BYTES = 8192
"""What is read with a reply's first line. The value in it is copied once more, so it is small."""
MOST_PARTS = 512
"""Buffers of one system call; Linux takes 1,024."""
LATE_S = 0.02
"""The kernel is told how long to wait again once that differs by this much: a call may end as much too late."""
SKIP_BYTES = 1 << 16
_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    # So that a connection that has died unnoticed is found while it is idle, and not by the next call.
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)
SEND_BUFFER_BYTES: dict[int, int] = {socket.AF_UNIX: 1 << 19, socket.AF_INET: 1 << 20, socket.AF_INET6: 1 << 20}
"""What waits in the kernel to be sent. Left alone, TCP lets it grow to what the CPU's caches do not hold, and a Unix
socket has too little: puts to a server on this machine were slower by a tenth."""


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


class ValkeyLine:
    """A connection to one server. One thread uses it; `shutdown` may come from others."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.deadline_s = 0.0
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()  # so that `shutdown` never meets a socket that `close` has ended
        self._ended = False
        self._ahead = bytearray(READ_AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0  # what of it was not read yet
        self._crlf = bytearray(2)
        self._heard = False
        """True if it has ever answered."""
        self._timeouts_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # 0: forever

    # --- opening and closing ---

    def open(self) -> None:
        """Connect, before the deadline. Raises StoreError."""
        addresses = resolve(self.place, self.deadline_s, lambda: self._ended)
        for number, address in enumerate(addresses):
            left_s = self._left_s("no connection in time")
            try:
                self._connect(address, left_s / (len(addresses) - number))
                break
            except OSError as error:
                self.close()
                if number + 1 == len(addresses):
                    raise self._lost(error) from None
        self._secure()

    def _connect(self, address: Address, timeout_s: float) -> None:
        link = socket.socket(address.family, socket.SOCK_STREAM)
        with self._lock:
            self._socket = link
        if self._ended:
            raise ConnectionAbortedError
        if address.family == socket.AF_UNIX or _grants_send_buffer(socket.AddressFamily(address.family)):
            link.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES[socket.AddressFamily(address.family)]
            )
        link.settimeout(timeout_s)
        link.connect(address.address)
        link.settimeout(None)
        if self._ended:
            raise ConnectionAbortedError
        if address.family != socket.AF_UNIX:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _TCP_OPTIONS:
                link.setsockopt(socket.IPPROTO_TCP, option, value)

    def _secure(self) -> None:
        """Here TLS begins."""

    @property
    def quiet(self) -> bool:
        """True if it is open and nothing has come: a reply that is too late, or its end, makes it unusable."""
        if self._socket is None or self._ended or self._start != self._end:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    @property
    def has_more(self) -> bool:
        """True if bytes were read ahead, which no poll sees."""
        return self._start != self._end

    @property
    def _unheard(self) -> str:
        """What may be wrong with a server that breaks off before it has answered anything."""
        if self.place.path:
            return "is the store up, its URL right, and may the daemon open the socket?"
        return "is the store up, and its URL right? If it wants TLS, write valkeys://"

    def fileno(self) -> int:
        """For poll."""
        assert self._socket is not None
        return self._socket.fileno()

    def shutdown(self) -> None:
        """End the call under way, from any thread. The line is of no use any more."""
        self._ended = True
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only by the thread that uses the line."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.close()
                self._socket = None

    # --- errors ---

    def breach(self, text: str) -> StoreError:
        """The error for an answer that breaks the protocol."""
        return StoreError(StoreProblem.PROTOCOL, f"{self.place}: {text}: is this a Valkey or Redis server?")

    def _left_s(self, text: str = "no answer in time") -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise StoreError(StoreProblem.TIMEOUT, f"{self.place}: {text}")
        return left_s

    def _lost(self, error: OSError | None) -> StoreError:
        """The error for a connection that failed, or that the server closed."""
        if self._ended:
            return StoreError(StoreProblem.UNREACHABLE, f"{self.place}: the connection was closed")
        if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
            return StoreError(StoreProblem.TIMEOUT, f"{self.place}: no connection in time")
        reason = os.strerror(error.errno) if error is not None and error.errno else "it closed the connection"
        remedy = "is the store up, and its URL right?" if self._heard else self._unheard
        return StoreError(StoreProblem.UNREACHABLE, f"{self.place}: {reason}: {remedy}")

    # --- sending ---

    def send(self, parts: Sequence[Part]) -> None:
        """Send all of these, one after another. Raises StoreError."""
        for first in range(0, len(parts), MOST_PARTS):
            views = [memoryview(part).cast("B") for part in parts[first : first + MOST_PARTS]]
            while views:
                views = _behind(views, self._send(views))

    def _send(self, views: list[memoryview]) -> int:
        assert self._socket is not None
        self._tell_kernel(socket.SO_SNDTIMEO)
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:  # the time that the kernel was told has passed
            self._timeouts_s[socket.SO_SNDTIMEO] = 0.0
            return 0
        except OSError as error:
            raise self._lost(error) from None

    # --- receiving ---

    def read_line(self) -> bytes:
        """The next line, without its end. Raises StoreError."""
        looked = self._start
        while True:
            end = self._ahead.find(b"\r\n", looked, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            looked = self._fill()

    def _fill(self) -> int:
        """Read more ahead. Where to look for the end of a line that began before."""
        held = self._end - self._start
        if held == READ_AHEAD_BYTES:
            raise self.breach("its answer has a line without an end")
        if self._start:
            self._ahead[:held] = self._ahead[self._start : self._end]
            self._start, self._end = 0, held
        self._end += self._receive([self._view[self._end :]], 0)
        return max(0, held - 1)

    def peek(self, most_bytes: int) -> bytes:
        """What was read ahead, up to that length."""
        return bytes(self._view[self._start : min(self._end, self._start + most_bytes)])

    def pass_over(self, count: int) -> None:
        """Count that number of the bytes that were peeked at as read."""
        assert count <= self._end - self._start
        self._start += count

    def read_value(self, views: Sequence[memoryview]) -> None:
        """Fill these with a value, and read the line's end behind it. Raises StoreError."""
        rest = self._from_ahead([*views, memoryview(self._crlf)])
        while rest:
            rest = _behind(rest, self._receive(rest, socket.MSG_WAITALL))
        if self._crlf != b"\r\n":
            raise self.breach("a value does not end where its length says")

    def skip_value(self, length: int) -> None:
        """Read a value into nowhere. Raises StoreError."""
        scratch = memoryview(bytearray(min(length, SKIP_BYTES)))
        while length > SKIP_BYTES:
            rest = self._from_ahead([scratch])
            while rest:
                rest = _behind(rest, self._receive(rest, socket.MSG_WAITALL))
            length -= SKIP_BYTES
        self.read_value([scratch[:length]])

    def _from_ahead(self, views: list[memoryview]) -> list[memoryview]:
        """Fill what is there with what was read ahead; the rest of it."""
        while views and self._start != self._end:
            taken = min(len(views[0]), self._end - self._start)
            views[0][:taken] = self._view[self._start : self._start + taken]
            self._start += taken
            views = _behind(views, taken)
        return views

    def _receive(self, views: list[memoryview], flags: int) -> int:
        assert self._socket is not None
        self._tell_kernel(socket.SO_RCVTIMEO)
        try:
            received: int = self._socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            self._timeouts_s[socket.SO_RCVTIMEO] = 0.0
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not received:
            raise self._lost(None)
        self._heard = True
        return received

    def _tell_kernel(self, option: int) -> None:
        """Have the next call of a kind end at the deadline. It may end earlier: then it is made again."""
        assert self._socket is not None
        left_s = self._left_s()
        if not 0 < self._timeouts_s[option] <= left_s + LATE_S:
            micros = int(left_s * 1e6) + 1
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
            )
            self._timeouts_s[option] = left_s


@cache
def _grants_send_buffer(family: socket.AddressFamily) -> bool:
    """True if the kernel would give as much; its limit may be less than what it takes by itself."""
    with socket.socket(family, socket.SOCK_STREAM) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES[family])
        return link.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * SEND_BUFFER_BYTES[family]


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What follows the first `count` bytes."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []
