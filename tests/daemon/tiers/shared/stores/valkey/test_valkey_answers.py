"""What a server may answer, and when: errors, wrong lengths and other nonsense; late, slow and torn answers."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_valkey import ENOUGH_S, GOOD, SIZE, VALUE, FakeServer, Peer, bulk, failing, names, replies
from store_calls import soon, value_of
from valkey_rig import connect

from tiercache.daemon.tiers.shared.stores.store import (
    Connection,
    Fate,
    Get,
    NotReplicated,
    Put,
    StoreError,
    StoreProblem,
)
from tiercache.daemon.tiers.shared.stores.valkey.commands import ShortCommand
from tiercache.daemon.tiers.shared.stores.valkey.exchange import Exchange, PipelineWindow
from tiercache.daemon.tiers.shared.stores.valkey.line import MOST_LOOKUPS

MIB = 1 << 20


# --- errors as answers ---


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.", StoreProblem.FULL),
        (b"-LOADING Valkey is loading the dataset in memory", StoreProblem.BUSY),
        (b"-BUSY Valkey is busy running a script.", StoreProblem.BUSY),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot", StoreProblem.BUSY),
        (b"-CLUSTERDOWN Hash slot not served", StoreProblem.BUSY),
        (b"-MASTERDOWN Link with MASTER is down", StoreProblem.BUSY),
        (b"-ERR max number of clients reached", StoreProblem.BUSY),
        (b"-READONLY You can't write against a read only replica.", StoreProblem.READ_ONLY),
        (b"-MISCONF Errors writing to the AOF file", StoreProblem.READ_ONLY),
        (b"-NOAUTH Authentication required.", StoreProblem.DENIED),
        (b"-NOPERM this user has no permissions", StoreProblem.DENIED),
        (b"-WRONGPASS invalid username-password pair", StoreProblem.DENIED),
        (b"-MOVED 866 127.0.0.1:7001", StoreProblem.PROTOCOL),
        (b"-ERR unknown command 'UNLINK'", StoreProblem.PROTOCOL),
    ],
)
def test_errors_of_the_whole_store(error: bytes, problem: StoreProblem) -> None:
    """In the middle of a pipeline: the rest is read and told, and the call fails."""
    with FakeServer(replies(GOOD, error + b"\r\n", GOOD, b"$-1\r\n", b":1\r\n")) as server:
        connection = server.connect()
        wanted = names(4)
        told = failing(lambda: connection.get(wanted, [], soon()))
        assert told.problem is problem
        assert ("valkey+cluster://" in told.text) == (b"MOVED" in error)
        assert [get.fate for get in wanted] == [Fate.DONE, Fate.UNKNOWN, Fate.DONE, Fate.MISSING]
        if problem in (StoreProblem.DENIED, StoreProblem.READ_ONLY):  # another connection may do better
            connection.get(wanted[:1], [], soon())
            assert len(server.peers) == 2
        else:
            assert connection.exists([b"x"], [], soon()).there == [True]
            assert len(server.peers) == 1


def test_errors_of_one_value() -> None:
    ok = b"+OK\r\n"
    error = b"-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n"
    with FakeServer(replies(ok, error, ok, GOOD, b"-WRONGTYPE Operation\r\n", GOOD)) as server:
        connection = server.connect()
        puts = [Put(b"v%d" % number, [VALUE]) for number in range(3)]
        connection.put(puts, [], soon())
        assert [put.fate for put in puts] == [Fate.DONE, Fate.REFUSED, Fate.DONE]
        wanted = names(3)
        connection.get(wanted, [], soon())
        assert [get.fate for get in wanted] == [Fate.DONE, Fate.REFUSED, Fate.DONE]


def test_nothing_is_sent_behind_an_error() -> None:
    """Not hundreds of megabytes to a server that is full."""

    def script(peer: Peer) -> None:
        while peer.command():
            peer.send(b"-OOM\r\n")

    with FakeServer(script) as server:
        connection = server.connect()
        puts = [Put(b"v%d" % number, [bytes(MIB)]) for number in range(100)]
        assert failing(lambda: connection.put(puts, [], soon())).problem is StoreProblem.FULL
    assert server.peers[0].received_bytes < 20 * MIB


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR unknown command 'AUTH', with args beginning with: 'me' 'hunter2'\r\n",
        b"-WRONGPASS hunter2 is not it\r\n",
        b"+hunter2\r\n",
    ],
)
def test_a_server_that_repeats_the_password(reply: bytes) -> None:
    with FakeServer(replies(reply)) as server:
        connection = server.connect(server.url.replace("//", "//me:hunter2@"))
        error = failing(lambda: connection.exists([b"x"], [], soon()))
        assert "hunter2" not in error.text


# --- lengths, and other nonsense ---


@pytest.mark.parametrize(
    ("reply", "fate"),
    [
        (b"$1073741824\r\nabc", Fate.MISFIT),
        (b"$999999999999\r\nabc", Fate.MISFIT),
        (b"$99999999999999999999999999\r\nabc", Fate.UNKNOWN),
        (b"$2097152\r\nabc", Fate.MISFIT),
    ],
)
def test_lengths_that_are_much_too_long(reply: bytes, fate: Fate) -> None:
    """No memory is made for them, and what is behind them is not waited for."""
    with FakeServer(replies(GOOD, reply)) as server:
        connection = server.connect()
        wanted = names(3)
        tracemalloc.start()
        try:
            assert failing(lambda: connection.get(wanted, [], soon())).problem is StoreProblem.PROTOCOL
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()
        assert [get.fate for get in wanted] == [Fate.DONE, fate, Fate.UNKNOWN]
        connection.get(wanted[:1], [], soon())
        assert len(server.peers) == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"hello\r\n",
        b"\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"_\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+5\r\nabcde\r\n",
        b"$ 5\r\nabcde\r\n",
        b"$1_0\r\nabcdeabcde\r\n",
        b"$0x5\r\nabcde\r\n",
        b"$100000\r\n" + VALUE + b"ab",
        b"$99999\r\n" + VALUE + b"\r\n",
        b"x" * 20_000,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_what_is_no_answer_to_get(reply: bytes) -> None:
    """The connection is given up: where the next answer begins cannot be known."""

    def script(peer: Peer) -> None:
        assert peer.command()
        peer.send(reply if peer.number == 0 else GOOD)
        peer.swallow()

    with FakeServer(script) as server:
        connection = server.connect()
        wanted = names(2)
        assert failing(lambda: connection.get(wanted, [], soon())).problem is StoreProblem.PROTOCOL
        assert Fate.DONE not in [get.fate for get in wanted]
        connection.get(wanted[:1], [], soon())
        assert value_of(wanted[0]) == VALUE


@pytest.mark.parametrize("reply", [b":2\r\n", b"+OK\r\n", b"$1\r\n1\r\n", b"$-1\r\n"])
def test_what_is_no_answer_to_others(reply: bytes) -> None:
    with FakeServer(replies(reply, reply)) as server:
        connection = server.connect()
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.PROTOCOL
        assert failing(lambda: connection.delete([b"x"], soon())).problem is StoreProblem.PROTOCOL
        if reply != b"+OK\r\n":
            put = Put(b"x", [VALUE])
            assert failing(lambda: connection.put([put], [], soon())).problem is StoreProblem.PROTOCOL
            assert put.fate is Fate.UNKNOWN


# --- flushes, and the replicas of the server ---


def replication(*replicas: bytes) -> bytes:
    """The answer to INFO of a server that tells this of its replicas."""
    lines = [b"slave%d:ip=10.0.0.%d,port=6379,%b" % (number, number, told) for number, told in enumerate(replicas)]
    return bulk(b"\r\n".join([b"role:master", b"connected_slaves:%d" % len(replicas), *lines, b""]))


ONLINE = b"state=online,offset=14,lag=1"
INFO, WAIT = [b"INFO", b"replication"], b"WAIT"


def primary(seen: list[list[bytes]], info: bytes, wait: bytes = b":1\r\n") -> Callable[[Peer], None]:
    """Answers INFO and WAIT with these, and notes what it is asked."""

    def script(peer: Peer) -> None:
        while words := peer.command():
            seen.append(words)
            own = b"+OK\r\n" if words[0] == b"SET" else b":1\r\n"
            peer.send({b"INFO": info, WAIT: wait}.get(words[0], own))

    return script


@pytest.mark.parametrize(
    ("replicas", "awaited"),
    [
        ([], b""),
        ([ONLINE, ONLINE], b"2"),
        ([b"state=online,offset=14,lag=10,type=replica"], b"1"),
        ([b"state=online,offset=0,lag=11"], b""),
        ([b"state=wait_bgsave,offset=0,lag=0", b"state=send_bulk,offset=0,lag=0", ONLINE], b"1"),
        ([b"state=online", b"lag=0", b"state=online,lag=-1", b""], b""),
    ],
)
def test_a_flush_waits_for_the_replicas_that_keep_up(replicas: list[bytes], awaited: bytes) -> None:
    seen: list[list[bytes]] = []
    with FakeServer(primary(seen, replication(*replicas), b":2\r\n")) as server:
        connection = server.connect()
        for _ in range(3):
            assert connection.set_note(b"n", b"v", soon()) == b"v"
        connection.delete([b"n"], soon())
    waits = [[WAIT, awaited, b"1000"]] if awaited else []
    changes = [*[[b"SET", b"n", b"v"]] * 3, [b"UNLINK", b"n"]]
    assert seen == [INFO, *[words for change in changes for words in (change, *waits)]], "they are counted once"


def test_a_note_that_replicas_have_is_read_with_a_change_that_changes_nothing() -> None:
    """WAIT is about what this line has written; to set the note again might undo another host's flush."""
    seen: list[list[bytes]] = []

    def script(peer: Peer) -> None:
        answers = {b"INFO": replication(ONLINE), WAIT: b":0\r\n" if peer.number else b":1\r\n", b"GETEX": bulk(b"v")}
        while words := peer.command():
            seen.append(words)
            peer.send(answers[words[0]])

    with FakeServer(script) as server:
        connection, late = server.connect(), server.connect()
        assert connection.replicated_note(b"n", soon()) == b"v"
        assert seen == [INFO, [b"GETEX", b"n", b"PX", b"3600000"], [b"GETEX", b"n", b"PERSIST"], [WAIT, b"1", b"1000"]]
        assert isinstance(failing(lambda: late.replicated_note(b"n", soon())), NotReplicated)
        for one in (connection, late):
            one.close()


@pytest.mark.parametrize(
    "error",
    [
        b"-ERR unknown command 'X', with args beginning with: '1' ",
        b"-NOPERM User x has no permissions to run the 'x' command",
    ],
)
@pytest.mark.parametrize("refused", [b"INFO", WAIT])
def test_a_server_that_tells_nothing_of_its_replicas_is_told_of_flushes(refused: bytes, error: bytes) -> None:
    answers = {b"INFO": replication(ONLINE), WAIT: b":1\r\n", refused: error + b"\r\n"}
    with FakeServer(primary([], answers[b"INFO"], answers[WAIT])) as server:
        connection = server.connect()
        assert connection.set_note(b"n", b"v", soon()) == b"v"
        connection.delete([b"n"], soon())
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "error",
    [
        b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        b"-ERR WAIT cannot be used with replica instances.",
        b"-LOADING it",
    ],
)
def test_a_wait_that_ends_otherwise_has_not_been_waited(error: bytes) -> None:
    """A fail-over in the midst of it: the new primary lacks the flush."""
    with FakeServer(primary([], replication(ONLINE), error + b"\r\n")) as server:
        connection = server.connect()
        assert isinstance(failing(lambda: connection.set_note(b"n", b"v", soon())), NotReplicated)


def test_a_server_that_ends_before_its_replicas_have_a_flush() -> None:
    """What takes its place knows nothing of it: the flush is not done."""

    def script(peer: Peer) -> None:
        while words := peer.command():
            peer.send({b"INFO": replication(ONLINE), WAIT: b":1\r\n"}.get(words[0], b"+OK\r\n"))
            if words[0] == b"SET" and not peer.number:
                peer.reset()
                return

    with FakeServer(script) as server:
        connection = server.connect()
        assert failing(lambda: connection.set_note(b"n", b"v", soon())).problem is StoreProblem.UNREACHABLE
        assert connection.set_note(b"n", b"v", soon()) == b"v"


def test_a_wait_that_the_deadline_cuts_short_says_nothing_about_the_replicas() -> None:
    with FakeServer(primary([], replication(ONLINE), b":0\r\n")) as server:
        connection = server.connect()
        late = failing(lambda: connection.set_note(b"n", b"v", soon()))
        assert isinstance(late, NotReplicated)
        assert late.text.endswith("1 of 1 replicas have not taken a flush in 1.0 s")
        cut = failing(lambda: connection.set_note(b"n", b"v", soon(1.0)))
        assert (type(cut), cut.problem) == (StoreError, StoreProblem.TIMEOUT)


# --- what a server may do to us with time, and by breaking off ---------------------------------------


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
