"""What a server may do to us with time, and by breaking off: late, slow and torn answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_valkey import ENOUGH_S, GOOD, SIZE, VALUE, FakeServer, Peer, failing, names
from valkey_rig import connect, got, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey.line import MOST_LOOKUPS

MIB = 1 << 20


# --- time ---


@pytest.mark.stress
@pytest.mark.parametrize("start", [b"$100000\r\nabc", b"$10", b"-ERR a long story", b""])
def test_a_drip(start: bytes) -> None:
    """A byte now and then makes no call longer."""

    def script(peer: Peer) -> None:
        peer.command()
        peer.send(start)
        peer.drip(b"1")

    with FakeServer(script) as server:
        connection = connect(server.url)
        wanted = names(1)
        assert failing(lambda: connection.get(wanted, [], soon(0.3))).problem is StoreProblem.TIMEOUT
        assert wanted[0].fate is Fate.UNKNOWN
        connection.close()


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
        connection = connect(server.url)
        assert connection.exists([b"x"], [], soon()).there == [True]
        assert sent.wait(ENOUGH_S)
        assert connection.exists([b"y"], [], soon()).there == [True]
        assert len(server.peers) == 2
        connection.close()


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


# --- torn ---


def test_a_reset_within_a_value() -> None:
    def script(peer: Peer) -> None:
        peer.command()
        peer.send(GOOD + GOOD[: SIZE // 2])
        peer.reset()

    with FakeServer(script) as server:
        connection = connect(server.url)
        wanted = names(3)
        arrived: list[Get] = []
        assert failing(lambda: connection.get(wanted, [], soon(), arrived.append)).problem is StoreProblem.UNREACHABLE
        assert wanted[1].fate is wanted[2].fate is Fate.UNKNOWN
        assert all(get.fate is Fate.DONE and got(get) == VALUE for get in arrived)
        server.refuse()
        assert failing(lambda: connection.get(wanted, [], soon())).problem is StoreProblem.UNREACHABLE
        connection.close()


@pytest.mark.stress
def test_closed_by_another_thread() -> None:
    """In the middle of a value, and of a put that the server does not read."""
    for call in (
        lambda line: line.get(names(1), [], soon()),
        lambda line: line.put([new_put(b"v", b"x" * (64 * MIB))], [], soon()),
    ):
        reached = threading.Event()

        def script(peer: Peer, reached: threading.Event = reached) -> None:
            assert peer.more()
            peer.send(b"$100000\r\nabc")
            reached.set()
            peer.ending.wait(60)

        with FakeServer(script) as server:
            connection = connect(server.url)

            def close(connection: Connection = connection, reached: threading.Event = reached) -> None:
                reached.wait(ENOUGH_S)
                connection.close()

            closing = threading.Thread(target=close)
            closing.start()
            assert failing(lambda call=call, line=connection: call(line)).problem is StoreProblem.UNREACHABLE
            closing.join()
            assert failing(lambda call=call, line=connection: call(line)).problem is StoreProblem.UNREACHABLE
            assert len(server.peers) == 1
