"""A server that does what a script says, such as a real one does not do on command."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from store_calls import content, room, soon

from tiercache.daemon.tiers.shared.stores.store import Connection, Get, StoreError
from tiercache.daemon.tiers.shared.stores.valkey import open_valkey

PATIENCE_S = 60.0
ENOUGH_S = 10.0
"""A call with a deadline of parts of a second must have ended by then, on the slowest machine."""
SIZE = 100_000
VALUE = content(7, SIZE)


class Peer:
    """One connection, as the server sees it."""

    def __init__(self, link: socket.socket, number: int, ending: threading.Event) -> None:
        self.number = number
        """Of the connection: 0 for the first."""
        self.ending = ending
        """Set when the test is over."""
        self.received_bytes = 0
        self._link = link
        self._ahead = b""

    def command(self) -> list[bytes] | None:
        """The next command; None at the end."""
        first = self._line()
        if first is None:
            return None
        words = []
        for _ in range(int(first[1:])):
            length = self._line()
            assert length is not None
            words.append(self._exactly(int(length[1:]) + 2)[:-2])
        return words

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def value(self, value: bytes) -> None:
        """Send a value as a reply."""
        self.send(b"$%d\r\n%b\r\n" % (len(value), value))

    def drip(self, byte: bytes) -> None:
        """Send a byte now and then, until the other side has enough."""
        while not self.ending.wait(0.01):  # rule: a byte now and then is what it is for
            self.send(byte)

    def reset(self) -> None:
        """Close the connection, rudely."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._link.close()

    def swallow(self) -> None:
        """Read all that comes, and answer nothing."""
        while data := self._link.recv(1 << 16):
            self.received_bytes += len(data)

    def _line(self) -> bytes | None:
        while b"\r\n" not in self._ahead:
            if not self.more():
                return None
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _exactly(self, count: int) -> bytes:
        while len(self._ahead) < count:
            assert self.more()
        data, self._ahead = self._ahead[:count], self._ahead[count:]
        return data

    def more(self) -> bool:
        data = self._link.recv(1 << 16)
        self._ahead += data
        self.received_bytes += len(data)
        return bool(data)


Script = Callable[[Peer], None]


class FakeServer:
    """Runs the script for each connection. Its assertions fail the test, at the end of the `with`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self.peers: list[Peer] = []
        self.failures: list[BaseException] = []
        self.ending = threading.Event()
        self._links: list[socket.socket] = []
        self._clients: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                peer = Peer(link, len(self.peers), self.ending)
                self.peers.append(peer)
                self._links.append(link)
                self._threads.append(threading.Thread(target=self._serve, args=(peer, link), daemon=True))
                self._threads[-1].start()

    def _serve(self, peer: Peer, link: socket.socket) -> None:
        try:
            self._script(peer)
        except OSError:
            pass  # the client has closed it
        except BaseException as failure:  # noqa: BLE001
            self.failures.append(failure)
        finally:
            with contextlib.suppress(OSError):
                link.close()

    def connect(self, url: str = "") -> Connection:
        """A client, which is closed at the end of the `with`."""
        self._clients.append(open_valkey(url or self.url).connect())
        return self._clients[-1]

    def refuse(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for client in self._clients:
            client.close()
        self.ending.set()
        self.refuse()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if error is None and self.failures:
            raise self.failures[0]


def failing(call: Callable[[], Any]) -> StoreError:
    """The error that it raises, soon."""
    begun_s = soon(0)
    with pytest.raises(StoreError) as caught:
        call()
    assert soon(0) - begun_s < ENOUGH_S
    assert "\n" not in caught.value.text
    return caught.value


def names(count: int) -> list[Get]:
    return [room(b"v%d" % number, 5, SIZE) for number in range(count)]


def replies(*of: bytes) -> Callable[[Peer], None]:
    """A server that sends these, one for each command, and then only reads."""

    def script(peer: Peer) -> None:
        for reply in of:
            if not peer.command():
                return
            peer.send(reply)
        peer.swallow()

    return script


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


GOOD = bulk(VALUE)
