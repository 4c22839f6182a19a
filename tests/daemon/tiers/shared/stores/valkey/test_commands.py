"""What a server may answer: errors, lengths that are wrong, and other nonsense."""

from __future__ import annotations

import tracemalloc

import pytest
from fake_valkey import GOOD, VALUE, FakeServer, Peer, failing, names, replies
from valkey_rig import connect, got, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreProblem

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
        connection = connect(server.url)
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
        connection.close()


def test_errors_of_one_value() -> None:
    ok = b"+OK\r\n"
    error = b"-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n"
    with FakeServer(replies(ok, error, ok, GOOD, b"-WRONGTYPE Operation\r\n", GOOD)) as server:
        connection = connect(server.url)
        puts = [new_put(b"v%d" % number, VALUE) for number in range(3)]
        connection.put(puts, [], soon())
        assert [put.fate for put in puts] == [Fate.DONE, Fate.REFUSED, Fate.DONE]
        wanted = names(3)
        connection.get(wanted, [], soon())
        assert [get.fate for get in wanted] == [Fate.DONE, Fate.REFUSED, Fate.DONE]
        connection.close()


def test_nothing_is_sent_behind_an_error() -> None:
    """Not hundreds of megabytes to a server that is full."""

    def script(peer: Peer) -> None:
        while peer.command():
            peer.send(b"-OOM\r\n")

    with FakeServer(script) as server:
        connection = connect(server.url)
        puts = [new_put(b"v%d" % number, bytes(MIB)) for number in range(100)]
        assert failing(lambda: connection.put(puts, [], soon())).problem is StoreProblem.FULL
        connection.close()
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
        connection = connect(server.url.replace("//", "//me:hunter2@"))
        error = failing(lambda: connection.exists([b"x"], [], soon()))
        assert "hunter2" not in error.text
        connection.close()


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
        connection = connect(server.url)
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
        connection.close()


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
        connection = connect(server.url)
        wanted = names(2)
        assert failing(lambda: connection.get(wanted, [], soon())).problem is StoreProblem.PROTOCOL
        assert Fate.DONE not in [get.fate for get in wanted]
        connection.get(wanted[:1], [], soon())
        assert got(wanted[0]) == VALUE
        connection.close()


@pytest.mark.parametrize("reply", [b":2\r\n", b"+OK\r\n", b"$1\r\n1\r\n", b"$-1\r\n"])
def test_what_is_no_answer_to_others(reply: bytes) -> None:
    with FakeServer(replies(reply)) as server:
        connection = connect(server.url)
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.PROTOCOL
        assert failing(lambda: connection.delete([b"x"], soon())).problem is StoreProblem.PROTOCOL
        if reply != b"+OK\r\n":
            put = new_put(b"x", VALUE)
            assert failing(lambda: connection.put([put], [], soon())).problem is StoreProblem.PROTOCOL
            assert put.fate is Fate.UNKNOWN
        connection.close()


# --- how much is under way ---
