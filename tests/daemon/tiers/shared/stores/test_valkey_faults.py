"""What a server may do to us with time, and by breaking off: late, slow and torn answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_valkey import ENOUGH_S, GOOD, SIZE, VALUE, FakeServer, Peer, bulk, failing, full_backlog, names, replies
from valkey_rig import connect, content, got, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey import resolve

MIB = 1 << 20


# --- time ---


def test_full_backlog() -> None:
    """A server that accepts nothing, so that no connection is ever made."""
    with full_backlog() as port:
        connection = connect(f"valkey://127.0.0.1:{port}")
        assert failing(lambda: connection.exists([b"x"], [], soon(0.2))).problem is StoreProblem.TIMEOUT
        ending = threading.Timer(0.2, connection.close)
        ending.start()
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE


def test_a_deadline_that_has_passed() -> None:
    """Nothing is sent, and the connection stays."""
    with FakeServer(replies(b":1\r\n", b":1\r\n")) as server:
        connection = connect(server.url)
        connection.exists([b"x"], [], soon())
        assert failing(lambda: connection.exists([b"x"], [], soon(-1.0))).problem is StoreProblem.TIMEOUT
        assert connection.exists([b"x"], [], soon()).there == [True]
        assert len(server.peers) == 1
        connection.close()


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


def test_values_that_drip_in_turn() -> None:
    """Many short waits, each within its deadline, are one long one."""

    def script(peer: Peer) -> None:
        while peer.command() and not peer.ending.wait(0.02):
            peer.send(GOOD)

    with FakeServer(script) as server:
        connection = connect(server.url)
        wanted = names(1000)
        assert failing(lambda: connection.get(wanted, [], soon(0.3))).problem is StoreProblem.TIMEOUT
        assert wanted[0].fate is Fate.DONE
        assert wanted[-1].fate is Fate.UNKNOWN
        connection.close()


@pytest.mark.parametrize("when", ["before the next call", "after its request"])
def test_a_late_reply_reaches_no_later_call(when: str) -> None:
    late = threading.Event()

    def script(peer: Peer) -> None:
        assert peer.command()
        if peer.number == 0:
            if when == "before the next call":
                late.wait(ENOUGH_S)
            else:
                peer.command()  # on this connection no other comes: it is closed
            peer.send(bulk(content(1, SIZE)))
        else:
            peer.send(GOOD)
            peer.swallow()

    with FakeServer(script) as server:
        connection = connect(server.url)
        assert failing(lambda: connection.get(names(1), [], soon(0.2))).problem is StoreProblem.TIMEOUT
        late.set()
        wanted = names(1)
        connection.get(wanted, [], soon())
        assert got(wanted[0]) == VALUE
        assert len(server.peers) == 2
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


def test_names_that_hang(no_names: list[str]) -> None:
    """Each call ends in time, and the threads that are left behind are few."""
    for _ in range(3):
        connection = connect("valkey://one.test")
        assert failing(lambda line=connection: line.exists([b"x"], [], soon(0.1))).problem is StoreProblem.TIMEOUT
    assert no_names == ["one.test"]
    for number in range(resolve.MOST_LOOKUPS + 3):
        connection = connect(f"valkey://host{number}.test")
        failing(lambda line=connection: line.exists([b"x"], [], soon(0.02)))
    assert len(no_names) == resolve.MOST_LOOKUPS
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE
    connection = connect("valkey://one.test")
    threading.Timer(0.1, connection.close).start()
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE


def test_a_name_that_is_none() -> None:
    connection = connect("valkey://nowhere.invalid")
    error = failing(lambda: connection.exists([b"x"], [], soon()))
    assert error.problem is StoreProblem.UNREACHABLE
    assert "nowhere.invalid" in error.text


def test_no_thread_for_a_name(no_threads: pytest.MonkeyPatch) -> None:
    connection = connect("valkey://one.test")
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.UNREACHABLE
    assert not resolve._running


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


def test_closed_by_another_thread() -> None:
    """In the middle of a value, and of a put that the server does not read."""
    for call in (
        lambda line: line.get(names(1), [], soon()),
        lambda line: line.put([new_put(b"v", b"x" * (64 * MIB))], [], soon()),
    ):
        reached = threading.Event()

        def script(peer: Peer, reached: threading.Event = reached) -> None:
            assert peer._more()
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


def test_a_caller_that_fails() -> None:
    """What it leaves unread reaches no later call."""

    def script(peer: Peer) -> None:
        while peer.command():
            peer.send(GOOD)

    def fail(get: Get) -> None:
        raise KeyError("of the caller")

    with FakeServer(script) as server:
        connection = connect(server.url)
        with pytest.raises(KeyError):
            connection.get(names(5), [], soon(), fail)
        wanted = names(1)
        connection.get(wanted, [], soon())
        assert got(wanted[0]) == VALUE
        assert len(server.peers) == 2
        connection.close()


def test_what_is_told_of_two_failures() -> None:
    """A server that is full and then breaks off: that it is full."""

    def script(peer: Peer) -> None:
        peer.command()
        peer.send(b"-OOM command not allowed\r\n")

    with FakeServer(script) as server:
        connection = connect(server.url)
        assert failing(lambda: connection.get(names(3), [], soon())).problem is StoreProblem.FULL
        connection.close()
