"""Messages of too many parts, and such as never end, over TCP."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
import zmq
from waiting import wait_until

from tiercache.daemon.ground import connections
from tiercache.daemon.ground.connections import Connections
from tiercache.daemon.ground.multipart import SKIPPED_AT_ONCE, Multipart

MOST_BYTES = 50_000


class Server:
    """A ROUTER for messages of an identity and two parts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.connections = Connections(self.socket, 10, MOST_BYTES)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.messages = Multipart(self.socket, self.connections, 3)
        self.gone_on = 0
        self.dealers: list[zmq.Socket[bytes]] = []

    def receive(self) -> list[bytes]:
        """The next message without its identity, if there is one."""
        self.connections.look()
        try:
            message = self.messages.receive()
        except zmq.Again:
            return []
        self.gone_on += not message
        return [part.bytes for part in message[1:]]

    def wait_for_message(self) -> list[bytes]:
        return wait_until(self.receive)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(connections, "WEIGHED_EVERY_S", 0)
    with zmq.Context() as context:
        server = Server(context)
        yield server
        server.connections.close()
        for one in (server.socket, *server.dealers):
            one.close(0)


def dealer(server: Server) -> zmq.Socket[bytes]:
    server.dealers.append(server.socket.context.socket(zmq.DEALER))
    server.dealers[-1].connect(f"tcp://127.0.0.1:{server.port}")
    return server.dealers[-1]


def test_a_message_of_too_many_parts_is_skipped_in_slices_and_ends_its_connection(server: Server) -> None:
    sender, other = dealer(server), dealer(server)
    sender.send_multipart([b"first", b"second"])
    assert server.wait_for_message() == [b"first", b"second"]
    other.send(b"known")
    assert server.wait_for_message() == [b"known"]
    sender.send_multipart([b"x"] * (3 * SKIPPED_AT_ONCE))
    wait_until(lambda: server.receive() == [] and server.gone_on)
    other.send(b"later")
    assert server.wait_for_message() == [b"later"]
    assert server.gone_on == 4, "the last part is not looked at together with the first ones"
    wait_until(lambda: server.receive() == [] and server.connections.count == 2, "the sender to come back")
    assert server.connections.refused == 1
    sender.send(b"again")
    assert server.wait_for_message() == [b"again"]


def shake_hands(port: int) -> socket.socket:
    """A peer that speaks ZMTP 3.0 without encryption."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=60)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    take(peer, 64)
    properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + bytes(4)
    ready = b"\x05READY" + properties
    peer.sendall(bytes([4, len(ready)]) + ready)
    take(peer, take(peer, 2)[1])
    return peer


def take(peer: socket.socket, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        taken += peer.recv(count - len(taken))
    return taken


def part(data: bytes, more: bool) -> bytes:
    return bytes([2 + more]) + struct.pack(">Q", len(data)) + data


def ended(peer: socket.socket) -> bool:
    """Whether the server has closed the connection. Blocks until then, or a minute."""
    try:
        while peer.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_who_sends_one_message_without_end_is_ended(server: Server) -> None:
    with shake_hands(server.port) as endless, shake_hands(server.port) as honest:
        endless.sendall(part(b"x" * (MOST_BYTES // 2), more=True))
        for number in range(10):
            honest.sendall(part(b"%d" % number * (MOST_BYTES // 2), more=False))
            assert server.wait_for_message() == [b"%d" % number * (MOST_BYTES // 2)]
        assert server.connections.refused == 0
        endless.sendall(part(b"x" * MOST_BYTES, more=True))
        wait_until(lambda: server.receive() == [] and server.connections.refused)
        assert ended(endless)
        honest.sendall(part(b"still here", more=False))
        assert server.wait_for_message() == [b"still here"]
        assert server.connections.count == 1
