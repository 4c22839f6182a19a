"""A relay before a real server: it passes bytes on until the test wants harm."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

PATIENCE_S = 60.0
DRIP_S = 0.01


class _Valve:
    """What lets bytes of one direction pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None  # bytes that may pass; None: all
        self._cuts = self._drips = False
        self.waiting = 0

    def set(self, left: int | None, *, cuts: bool = False, drips: bool = False) -> None:
        with self._changed:
            self._left, self._cuts, self._drips = left, cuts, drips
            self._changed.notify_all()

    def room(self, count: int) -> int:
        """How many of so many bytes may pass; waits for some. Raises where the connection is to end."""
        with self._changed:
            if self._left == 0:
                self.waiting += 1
                self._changed.wait_for(lambda: self._left != 0 or self._cuts)
                self.waiting -= 1
            if self._left == 0:
                raise ConnectionResetError
            if self._drips:
                self._changed.wait(DRIP_S)
                return 1
            if self._left is not None:
                count = min(count, self._left)
                self._left -= count
            return count


class Relay:
    """Listens on a port of its own, and passes all that comes to `port` of this machine and back.

    Attributes:
        connected: connections that clients have made.
        listens: whether they can.
    """

    def __init__(self, port: int) -> None:
        self._behind = port
        self._replies, self._requests = _Valve(), _Valve()
        self._lock = threading.Lock()
        self._links: list[socket.socket] = []
        self.connected = 0
        self.port = 0
        self.listens = False
        self._listen()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def waiting(self) -> int:
        """Connections on which something is held back."""
        return self._replies.waiting + self._requests.waiting

    # --- harm ---

    def hold(self, after_bytes: int = 0) -> None:
        """Pass so many more bytes of replies, and keep the rest until `go_on`."""
        self._replies.set(after_bytes)

    def hold_requests(self, after_bytes: int) -> None:
        """As `hold`, what clients send."""
        self._requests.set(after_bytes)

    def cut(self, after_bytes: int) -> None:
        """Pass so many more bytes of replies, then reset each connection that has more to say."""
        self._replies.set(after_bytes, cuts=True)

    def drip(self) -> None:
        """Pass replies byte by byte."""
        self._replies.set(None, drips=True)

    def go_on(self) -> None:
        """Pass all again, and what was kept first."""
        self._replies.set(None)
        self._requests.set(None)

    def refuse(self) -> None:
        """End all connections, and take no others."""
        self.listens = False
        self._close_listener()
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            _reset(link)

    def accept(self) -> None:
        """Take connections again, at the same port."""
        self._listen()

    # --- its work ---

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self.listens = True
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _close_listener(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._behind))
                with self._lock:
                    self.connected += 1
                    self._links += [client, server]
                for way in ((client, server, self._requests), (server, client, self._replies)):
                    threading.Thread(target=_pump, args=way, daemon=True).start()

    def close(self) -> None:
        for valve in (self._replies, self._requests):
            valve.set(0, cuts=True)
        self.refuse()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _pump(source: socket.socket, sink: socket.socket, valve: _Valve) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            while data:
                count = valve.room(len(data))
                sink.sendall(data[:count])
                data = data[count:]
    _reset(sink)


def _reset(link: socket.socket) -> None:
    """End a connection rudely, for both who use it."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        link.close()
