"""What a server may do to us with time, and by breaking off: late, slow and torn answers; and how far it goes ahead."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from fake_valkey import ENOUGH_S, GOOD, SIZE, VALUE, FakeServer, Peer, failing, names
from store_calls import soon, value_of
from valkey_rig import connect

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey.commands import ShortCommand
from tiercache.daemon.tiers.shared.stores.valkey.exchange import Exchange, PipelineWindow
from tiercache.daemon.tiers.shared.stores.valkey.line import MOST_LOOKUPS

MIB = 1 << 20


@pytest.mark.stress
@pytest.mark.parametrize("start", [b"$100000\r\nabc", b"$10", b"-ERR a long story", b""])
def test_a_drip(start: bytes) -> None:
    """A byte now and then makes no call longer."""

    def script(peer: Peer) -> None:
        peer.command()
        peer.send(start)
        peer.drip(b"1")

    with FakeServer(script) as server:
        connection = server.connect()
        wanted = names(1)
        assert failing(lambda: connection.get(wanted, [], soon(0.3))).problem is StoreProblem.TIMEOUT
        assert wanted[0].fate is Fate.UNKNOWN


@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_to_no_question(at_once: bool) -> None:
    """What comes between two calls is an answer to none: the connection is of no use any more."""
    sent = threading.Event()

    def script(peer: Peer) -> None:
        assert peer.command()
        if at_once and peer.number == 0:
            peer.send(b":1\r\n:0\r\n")
        else:
            peer.send(b":1\r\n")
            if peer.number == 0:
                peer.send(b":0\r\n")
        sent.set()
        peer.swallow()

    with FakeServer(script) as server:
        connection = server.connect()
        assert connection.exists([b"x"], [], soon()).there == [True]
        assert sent.wait(ENOUGH_S)
        assert connection.exists([b"y"], [], soon()).there == [True]
        assert len(server.peers) == 2


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Name servers hang; the names that were asked for."""
    back = threading.Event()
    asked: list[str] = []
    real = socket.getaddrinfo

    def hang(host: str, port: int, *rest: Any, flags: int = 0, **more: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, *rest, flags=flags, **more)
        asked.append(host)
        back.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield asked
    back.set()
    for thread in threading.enumerate():
        if thread.name == "tiercache-resolve":
            thread.join(ENOUGH_S)


@pytest.mark.stress
def test_names_that_hang(no_names: list[str]) -> None:
    """Each call ends in time, and the threads that are left behind are few."""
    for _ in range(3):
        connection = connect("valkey://one.test")
        assert failing(lambda line=connection: line.exists([b"x"], [], soon(0.1))).problem is StoreProblem.TIMEOUT
    assert no_names == ["one.test"]
    for number in range(MOST_LOOKUPS + 3):
        connection = connect(f"valkey://host{number}.test")
        failing(lambda line=connection: line.exists([b"x"], [], soon(0.02)))
    assert len(no_names) == MOST_LOOKUPS
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE
    connection = connect("valkey://one.test")
    threading.Timer(0.1, connection.close).start()
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE


def test_a_reset_within_a_value() -> None:
    def script(peer: Peer) -> None:
        peer.command()
        peer.send(GOOD + GOOD[: SIZE // 2])
        peer.reset()

    with FakeServer(script) as server:
        connection = server.connect()
        wanted = names(3)
        arrived: list[Get] = []
        assert failing(lambda: connection.get(wanted, [], soon(), arrived.append)).problem is StoreProblem.UNREACHABLE
        assert wanted[1].fate is wanted[2].fate is Fate.UNKNOWN
        assert all(get.fate is Fate.DONE and value_of(get) == VALUE for get in arrived)
        server.refuse()
        assert failing(lambda: connection.get(wanted, [], soon())).problem is StoreProblem.UNREACHABLE


@pytest.mark.stress
def test_closed_by_another_thread() -> None:
    """In the middle of a value, and of a put that the server does not read."""
    for call in (
        lambda line: line.get(names(1), [], soon()),
        lambda line: line.put([Put(b"v", [b"x" * (64 * MIB)])], [], soon()),
    ):
        reached = threading.Event()

        def script(peer: Peer, reached: threading.Event = reached) -> None:
            assert peer.more()
            peer.send(b"$100000\r\nabc")
            reached.set()
            peer.ending.wait(60)

        with FakeServer(script) as server:
            connection = server.connect()

            def close(connection: Connection = connection, reached: threading.Event = reached) -> None:
                reached.wait(ENOUGH_S)
                connection.close()

            closing = threading.Thread(target=close)
            closing.start()
            assert failing(lambda call=call, line=connection: call(line)).problem is StoreProblem.UNREACHABLE
            closing.join()
            assert failing(lambda call=call, line=connection: call(line)).problem is StoreProblem.UNREACHABLE
            assert len(server.peers) == 1


class Asked(ShortCommand):
    def read(self, first: bytes, line: Any) -> None:
        assert first == b"+OK"


class Line:
    """A server that answers when it is asked for a reply."""

    def __init__(self) -> None:
        self.requests: deque[bytes] = deque()
        self.most_under_way = self.answered = 0

    def send(self, parts: list[bytes]) -> None:
        self.requests += parts
        self.most_under_way = max(self.most_under_way, len(self.requests))

    def read_line(self) -> bytes:
        self.answered += 1
        self.requests.popleft()
        return b"+OK"


@pytest.mark.parametrize(
    ("request_bytes", "reply_bytes", "most"), [(30, 1, 3), (25, 1, 4), (1, 20, 2), (1, 25, 2), (150, 1, 1), (1, 60, 1)]
)
def test_no_more_is_under_way_than_the_window_or_one_command(request_bytes: int, reply_bytes: int, most: int) -> None:
    line: Any = Line()
    commands = [Asked(b"", bytes(request_bytes), reply_bytes) for _ in range(20)]
    Exchange(line, commands, PipelineWindow(request_bytes=100, reply_bytes=50)).run()
    assert (line.most_under_way, line.answered) == (most, 20)
