"""The calls of a connection to a real Valkey server, and what it does when that is stopped, killed or full."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from valkey_rig import HEAD_BYTES, ValkeyServer, connect, content, got, new_get, new_put, soon, wait_until

from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Connection,
    Fate,
    Get,
    Put,
    StoreError,
    StoreProblem,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(params=["tcp", "unix", "name"])
def line(request: pytest.FixtureRequest, valkey: ValkeyServer) -> Iterator[Connection]:
    """A connection to an empty server."""
    valkey.ask("FLUSHALL")
    url = {"tcp": valkey.url, "unix": valkey.unix_url, "name": f"valkey://localhost:{valkey.port}"}[request.param]
    connection = connect(url)
    yield connection
    connection.close()


def problem_of(call: object) -> StoreProblem:
    assert callable(call)
    with pytest.raises(StoreError) as caught:
        call()
    assert "\n" not in caught.value.text
    return caught.value.problem


def test_values_come_back(line: Connection) -> None:
    """More of them than may be under way at once, of all sizes, and each in its own memory."""
    sizes = [
        HEAD_BYTES,
        HEAD_BYTES + 1,
        4096,
        8190,
        8192,
        131072 + HEAD_BYTES,
        2 * MIB,
        5 * MIB,
        2 * MIB,
        2 * MIB,
        9 * MIB,
    ]
    values = [content(number, size) for number, size in enumerate(sizes)]
    puts = [new_put(b"v%d" % number, value) for number, value in enumerate(values)]
    assert line.put(puts, [b"epoch"], soon()) == [None]
    assert {put.fate for put in puts} == {Fate.DONE}
    names = [b"v%d" % number for number in range(len(values))]
    assert line.exists([*names, b"other", names[0]], [], soon()).there == [True] * len(values) + [False, True]

    gets = [new_get(name, 9 * MIB) for name in [*names, b"other"]]
    arrived: list[Get] = []
    assert line.get(gets, [b"epoch"], soon(), arrived.append) == [None]
    assert arrived == gets
    assert [get.fate for get in gets] == [Fate.DONE] * len(values) + [Fate.MISSING]
    assert [got(get) for get in gets[:-1]] == values
    line.delete([*names, b"other"], soon())
    assert not any(line.exists(names, [], soon()).there)


def test_many_small_ones(line: Connection) -> None:
    """More requests than may be under way."""
    names = [b"name-%06d-" % number + b"x" * 60 for number in range(6000)]
    puts = [Put(name, [b"", name], 60.0) for name in names[::2]]
    line.put(puts, [], soon())
    assert all(put.fate is Fate.DONE for put in puts)
    assert line.exists(names, [], soon()).there == [True, False] * 3000
    gets = [Get(name, memoryview(bytearray(4)), memoryview(bytearray(100))) for name in names]
    line.get(gets, [], soon())
    assert [get.fate for get in gets] == [Fate.DONE, Fate.MISSING] * 3000
    assert all(got(get) == get.name for get in gets[::2])


def test_values_that_do_not_fit(line: Connection) -> None:
    """They are none of ours; those behind them come all the same, on the same connection."""
    line.put([new_put(b"%d" % size, content(1, size)) for size in (0, HEAD_BYTES - 1, 1000, 1001, MIB)], [], soon())
    sizes = (0, HEAD_BYTES - 1, 1000, 1001, MIB, 1000)
    gets = [new_get(b"%d" % size, 1000 - HEAD_BYTES) for size in sizes]
    line.get(gets, [], soon())
    fates = [Fate.MISFIT, Fate.MISFIT, Fate.DONE, Fate.MISFIT, Fate.MISFIT, Fate.DONE]
    assert [get.fate for get in gets] == fates
    assert got(gets[-1]) == content(1, 1000)


def test_what_is_no_value(line: Connection, valkey: ValkeyServer) -> None:
    """Others have put a list where a value of ours should be: that one is refused."""
    assert valkey.ask("RPUSH", "list", "item") == b":1"
    line.put([new_put(b"value", content(1, 1000))], [], soon())
    gets = [new_get(b"list", 1000), new_get(b"value", 1000)]
    line.get(gets, [], soon())
    assert [get.fate for get in gets] == [Fate.REFUSED, Fate.DONE]
    # As a note it may hide that there was a flush.
    assert problem_of(lambda: line.get([], [b"list"], soon())) is StoreProblem.PROTOCOL
    assert line.exists([b"value"], [], soon()).there == [True]


def test_notes(line: Connection, valkey: ValkeyServer) -> None:
    assert line.set_note(b"note", b"1", soon(), only_if_missing=True) == b"1"
    assert line.set_note(b"note", b"2", soon(), only_if_missing=True) == b"1"
    assert line.set_note(b"note", b"3", soon()) == b"3"
    assert line.set_note(b"empty", b"", soon()) == b""
    assert valkey.ask("PTTL", "note") == b":-1"
    valkey.ask("SET", "long", b"x" * (MAX_NOTE_BYTES + 1))
    valkey.ask("SET", "fits", b"x" * MAX_NOTE_BYTES)
    names = [b"note", b"none", b"long", b"empty", b"fits"]
    expected = [b"3", None, None, b"", b"x" * MAX_NOTE_BYTES]
    assert line.exists([b"note"], names, soon()) == ([True], expected)
    assert line.get([], names, soon()) == expected
    assert line.put([], names, soon()) == expected
    assert problem_of(lambda: line.set_note(b"long", b"1", soon(), only_if_missing=True)) is StoreProblem.PROTOCOL
    line.delete([b"note"], soon())
    assert line.exists([], [b"note"], soon()).notes == [None]


def test_lives(line: Connection, valkey: ValkeyServer) -> None:
    line.put([new_put(b"day", b"x" * 200, 86400.0), new_put(b"ever", b"x" * 200, 0.0)], [], soon())
    line.put([new_put(b"blink", b"x" * 200, 0.0001)], [], soon())
    assert 80_000_000 < int(valkey.ask("PTTL", "day")[1:]) <= 86_400_000
    assert valkey.ask("PTTL", "ever") == b":-1"
    wait_until(lambda: not line.exists([b"blink"], [], soon()).there[0])


def test_two_hosts_put_one_key(line: Connection, valkey: ValkeyServer) -> None:
    """One of the two values is there, whole."""
    values = [content(number, 2 * MIB) for number in (1, 2)]

    def put(value: bytes) -> None:
        other = connect(valkey.url)
        other.put([new_put(b"same", value) for _ in range(8)], [], soon())
        other.close()

    threads = [threading.Thread(target=put, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads) or not seen:
        get = new_get(b"same", 2 * MIB)
        line.get([get], [], soon())
        if get.fate is Fate.DONE:
            seen.append(got(get))
    for thread in threads:
        thread.join()
    assert all(value in values for value in seen)


def test_databases(valkey: ValkeyServer) -> None:
    valkey.ask("FLUSHALL")
    for url in (f"{valkey.url}/3", f"{valkey.unix_url}?db=3"):
        connection = connect(url)
        assert connection.set_note(b"note", b"there", soon(), only_if_missing=True) == b"there"
        connection.close()
    here, far = connect(valkey.url), connect(f"{valkey.url}/999")
    assert here.exists([b"note"], [], soon()).there == [False]
    assert problem_of(lambda: far.exists([b"note"], [], soon())) is StoreProblem.PROTOCOL
    here.close()
    far.close()


def test_passwords() -> None:
    with ValkeyServer("--requirepass", "s3cret:/@") as server:
        login = "s3cret%3A%2F%40"
        for good in (f":{login}", f"default:{login}"):
            connection = connect(server.url.replace("//", f"//{good}@"))
            assert connection.exists([b"x"], [], soon()).there == [False]
            connection.close()
        for wrong in ("", ":other@", f"nemo:{login}@"):
            connection = connect(server.url.replace("//", f"//{wrong}"))
            with pytest.raises(StoreError, match="user") as caught:
                connection.exists([b"x"], [], soon())
            assert caught.value.problem is StoreProblem.DENIED
            assert "s3cret" not in caught.value.text
            assert "other" not in caught.value.text
            connection.close()
        # It is changed while we are connected, and those who have the old one are sent away.
        connection = connect(server.unix_url.replace("//", f"//:{login}@"))
        connection.exists([], [], soon())
        killer = connect(server.url.replace("//", f"//:{login}@"))
        killer.exists([], [], soon())
        assert b"NOAUTH" in server.ask("CONFIG", "GET", "port")
        connection.close()
        killer.close()
    with ValkeyServer() as server:
        connection = connect(server.url.replace("//", "//:s3cret@"))
        assert problem_of(lambda: connection.exists([], [], soon())) is StoreProblem.DENIED
        connection.close()


def test_full() -> None:
    """The call fails, what is there stays, and the connection too."""
    with ValkeyServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        connection = connect(server.url)
        puts = [new_put(b"v%d" % number, content(number, MIB)) for number in range(40)]
        assert problem_of(lambda: connection.put(puts, [], soon())) is StoreProblem.FULL
        fates = [put.fate for put in puts]
        assert fates[0] is Fate.DONE
        assert fates[-1] is Fate.UNKNOWN  # those behind are not even sent
        before = server.info("total_connections_received")
        get = new_get(b"v0", MIB)
        connection.get([get], [], soon())
        assert got(get) == content(0, MIB)
        assert server.info("total_connections_received") == before + 1  # that of the second question
        connection.close()


def test_replica() -> None:
    with ValkeyServer("--replicaof", "127.0.0.1 1", "--replica-serve-stale-data", "yes") as server:
        connection = connect(server.url)
        assert problem_of(lambda: connection.put([new_put(b"v", b"x" * 200)], [], soon())) is StoreProblem.READ_ONLY
        assert connection.exists([b"v"], [], soon()).there == [False]
        connection.close()


def test_stopped_and_going_on(valkey: ValkeyServer) -> None:
    """Every call ends at its deadline; no late answer reaches a later call."""
    connection = connect(valkey.url)
    fresh = connect(valkey.url)
    value, other = content(1, 2 * MIB), content(2, 2 * MIB)
    connection.put([new_put(b"one", value), new_put(b"two", other)], [], soon())
    valkey.stop()
    try:
        for waiting in (connection, fresh):
            for call in (
                lambda line: line.get([new_get(b"one", 2 * MIB)], [b"note"], soon(0.2)),
                lambda line: line.exists([b"one"], [b"note"], soon(0.2)),
                lambda line: line.put([new_put(b"new", value) for _ in range(40)], [], soon(0.2)),
                lambda line: line.delete([b"nothing"], soon(0.2)),
                lambda line: line.set_note(b"nothing", b"", soon(0.2)),
            ):
                begun_s = soon(0)
                assert problem_of(lambda call=call, line=waiting: call(line)) is StoreProblem.TIMEOUT
                assert soon(0) - begun_s < 10.0
    finally:
        valkey.go_on()
    for waiting in (connection, fresh):
        get = new_get(b"two", 2 * MIB)
        waiting.get([get], [], soon())
        assert got(get) == other
        waiting.close()


def test_down_and_back() -> None:
    """A store that is down at the start, and goes and comes while we are connected."""
    with ValkeyServer() as server:
        server.kill()
        connection = connect(server.url)
        assert problem_of(lambda: connection.exists([b"x"], [], soon())) is StoreProblem.UNREACHABLE
        server.start()
        assert connection.exists([b"x"], [], soon()).there == [False]
        server.kill()
        assert problem_of(lambda: connection.exists([b"x"], [], soon())) is StoreProblem.UNREACHABLE
        server.start()
        connection.exists([b"x"], [], soon())
        server.kill()
        server.start()
        # The connection died while nothing was asked of it: that costs no call.
        assert connection.exists([b"x"], [], soon()).there == [False]
        connection.close()
        assert problem_of(lambda: connection.exists([b"x"], [], soon())) is StoreProblem.UNREACHABLE


def test_a_kill_in_the_middle() -> None:
    """Some values are there; the call says so, and which."""
    with ValkeyServer() as server:
        connection = connect(server.url)
        connection.put([new_put(b"%d" % number, content(number, MIB)) for number in range(20)], [], soon())
        gets = [new_get(b"%d" % (number % 20), MIB) for number in range(60)]

        def arrived(get: Get) -> None:
            if get is gets[3]:
                server.kill()

        assert problem_of(lambda: connection.get(gets, [], soon(), arrived)) is StoreProblem.UNREACHABLE
        done = [get.fate is Fate.DONE for get in gets]
        assert sum(done) >= 4
        assert done == sorted(done, reverse=True)
        assert not done[-1]
        assert all(got(get) == content(number, MIB) for number, get in enumerate(gets[:4]))
        connection.close()
