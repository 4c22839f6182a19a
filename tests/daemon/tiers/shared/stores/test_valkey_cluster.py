"""A Valkey cluster: names go to the node that has their slot, wherever that moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_valkey import FakeServer, Peer, failing, full_backlog
from valkey_rig import ValkeyServer, connect, content, got, new_get, new_put, soon, valkey_cluster, wait_until

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey.slots import hash_slot_of

SIZE = 50_000
NAMES = [b"name-%d" % number for number in range(300)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[ValkeyServer]]:
    with valkey_cluster() as nodes:
        yield nodes


@pytest.fixture
def line(nodes: list[ValkeyServer]) -> Iterator[Connection]:
    for node in nodes:
        node.ask("FLUSHALL")
    connection = connect(f"valkey+cluster://127.0.0.1:1,127.0.0.1:{nodes[1].port}")
    yield connection
    connection.close()


def owner(nodes: list[ValkeyServer], name: bytes) -> int:
    return min(hash_slot_of(name) // (16384 // len(nodes)), len(nodes) - 1)


def test_slots(nodes: list[ValkeyServer]) -> None:
    """As the server counts them."""
    for name in (b"", b"a", b"123456789", b"{a}b", b"x{a}b{c}", b"{}a", b"{a", b"}a{", bytes(range(1, 250))):
        assert nodes[0].ask("CLUSTER", "KEYSLOT", name) == b":%d" % hash_slot_of(name)


def test_calls(nodes: list[ValkeyServer], line: Connection) -> None:
    puts = [new_put(name, content(number, SIZE)) for number, name in enumerate(NAMES)]
    assert line.put(puts, [b"note"], soon()) == [None]
    assert {put.fate for put in puts} == {Fate.DONE}
    assert all(int(node.ask("DBSIZE")[1:]) > 0 for node in nodes)
    assert line.exists([*NAMES, b"other"], [], soon()).there == [True] * len(NAMES) + [False]
    gets = [new_get(name, SIZE) for name in [*NAMES, b"other"]]
    line.get(gets, [], soon())
    assert [got(get) for get in gets[:-1]] == [content(number, SIZE) for number in range(len(NAMES))]
    assert gets[-1].fate is Fate.MISSING
    for name in NAMES[:9]:  # notes anywhere
        assert line.set_note(name + b"note", b"1", soon(), only_if_missing=True) == b"1"
        assert line.set_note(name + b"note", b"2", soon(), only_if_missing=True) == b"1"
    assert line.exists([], [name + b"note" for name in NAMES[:9]], soon()).notes == [b"1"] * 9
    line.delete([*NAMES, b"other"], soon())
    assert not any(line.exists(NAMES, [], soon()).there)


def test_slots_that_move(nodes: list[ValkeyServer], line: Connection) -> None:
    """While they move, the old node sends us on (ASK), then for good (MOVED)."""
    assert line.exists([b"x"], [], soon()).there == [False]
    name = next(name for name in NAMES if owner(nodes, name) == 0)
    slot = hash_slot_of(name)
    old, new = nodes[0], nodes[2]
    old_id, new_id = old.ask("CLUSTER", "MYID"), new.ask("CLUSTER", "MYID")
    try:
        assert new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id) == b"+OK"
        assert old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id) == b"+OK"
        put = new_put(name, content(1, SIZE))
        line.put([put, new_put(NAMES[-1], content(2, SIZE))], [], soon())
        assert put.fate is Fate.DONE
        assert old.ask("DBSIZE") == b":0" or new.ask("DBSIZE") != b":0"
        assert line.exists([name, NAMES[-1]], [], soon()).there == [True, True]
        get = new_get(name, SIZE)
        line.get([get], [name], soon())
        assert got(get) == content(1, SIZE)
        line.delete([name], soon())
        line.put([put], [], soon())
        for node in (new, old, nodes[1]):
            assert node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id) == b"+OK"
        get = new_get(name, SIZE)
        line.get([get], [], soon())
        assert got(get) == content(1, SIZE)
    finally:
        line.delete([name], soon())
        for node in (old, new, nodes[1]):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", old_id)
    line.put([put], [], soon())
    assert line.exists([name], [], soon()).there == [True]


def test_a_node_that_stops(nodes: list[ValkeyServer], line: Connection) -> None:
    """The call fails at its deadline; what the other nodes have has come by then."""
    line.put([new_put(name, content(number, SIZE)) for number, name in enumerate(NAMES)], [], soon())
    nodes[0].stop()
    try:
        gets = [new_get(name, SIZE) for name in NAMES]
        assert failing(lambda: line.get(gets, [], soon(1.0))).problem is StoreProblem.TIMEOUT
        for number, get in enumerate(gets):
            if owner(nodes, get.name) == 0:
                assert get.fate is Fate.UNKNOWN
            else:
                assert got(get) == content(number, SIZE)
        # Another connection learns the slots from a node that answers, though it asks the stopped one first.
        other = connect(f"valkey+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}")
        there = [name for name in NAMES if owner(nodes, name)]
        assert other.exists(there, [], soon(2.4)).there == [True] * len(there)
        other.close()
    finally:
        nodes[0].go_on()
    assert line.exists(NAMES, [], soon()).there == [True] * len(NAMES)


def test_closed_by_another_thread(nodes: list[ValkeyServer], line: Connection) -> None:
    line.exists(NAMES, [], soon())
    for node in nodes:
        node.stop()
    try:
        threading.Timer(0.1, line.close).start()
        assert failing(lambda: line.exists(NAMES, [], soon())).problem is StoreProblem.UNREACHABLE
    finally:
        for node in nodes:
            node.go_on()


def test_wrong_kind_of_url(nodes: list[ValkeyServer]) -> None:
    """Each error says which URL to write."""
    single = connect(nodes[0].url)
    assert "valkey+cluster://" in failing(lambda: single.exists(NAMES, [], soon())).text
    single.close()
    with ValkeyServer() as server:
        cluster = connect(server.url.replace("valkey", "valkey+cluster", 1))
        error = failing(lambda: cluster.exists(NAMES, [], soon()))
        assert error.problem is StoreProblem.PROTOCOL
        assert "valkey://" in error.text


CLUSTER_SLOTS = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
GET_NOTE = b"*2\r\n$3\r\nGET\r\n$4\r\nnote\r\n"


def slots(*ranges: tuple[int, int, bytes, int]) -> bytes:
    parts = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (low, high, len(host), host, port)
        for low, high, host, port in ranges
    ]
    return b"*%d\r\n" % len(parts) + b"".join(parts)


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
def test_redirects_without_end(word: bytes) -> None:
    """A node that always sends us on is asked a few times."""
    asked = []

    def script(peer: Peer) -> None:
        while words := peer.command():
            if words[0] == b"CLUSTER":
                peer.send(slots((0, 16383, b"", server.port)))
            elif words[0] == b"ASKING":
                peer.send(b"+OK\r\n")
            else:
                asked.append(words)
                peer.send(b"-%b %d 127.0.0.1:%d\r\n" % (word, hash_slot_of(words[1]), server.port))

    with FakeServer(script) as server:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.BUSY
        assert len(asked) < 10
        connection.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"*1000000000\r\n",
        b"*2\r\n" * 50,
        b"*1\r\n$4097\r\n",
        b"$1073741824\r\nabc",
        b":1\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:5\r\n:1\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\n/\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n:0\r\n",
        b"-ERR This instance has cluster support disabled\r\n",
    ],
)
def test_slots_that_make_no_sense(reply: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.command()
        peer.send(reply)
        peer.swallow()

    with FakeServer(script) as server:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        problem = failing(lambda: connection.exists([b"x"], [], soon())).problem
        assert problem is StoreProblem.PROTOCOL
        connection.close()


def test_a_node_that_takes_no_connection() -> None:
    """It keeps no value of another node from coming."""

    def script(peer: Peer) -> None:
        while words := peer.command():
            if words[0] == b"CLUSTER":
                peer.send(slots((0, 8191, b"", full), (8192, 16383, b"", server.port)))
            else:
                peer.value(content(1, 500))

    with FakeServer(script) as server, full_backlog() as full:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        gets = [new_get(name, 1000) for name in NAMES]
        assert failing(lambda: connection.get(gets, [], soon(0.4))).problem is StoreProblem.TIMEOUT
        assert [get.fate is Fate.DONE for get in gets] == [hash_slot_of(name) > 8191 for name in NAMES]
        connection.close()


def test_notes_come_first() -> None:
    """No value is asked for before the notes are there: another node could be faster."""

    def script(peer: Peer) -> None:
        while words := peer.command():
            if words[0] == b"CLUSTER":
                peer.send(slots((0, 16383, b"", server.port)))
            elif words[1] == b"note":
                assert peer.received_bytes == len(CLUSTER_SLOTS + GET_NOTE)  # both would come with one send
                peer.send(b"$1\r\n7\r\n")
            else:
                peer.value(content(1, 500))

    with FakeServer(script) as server:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        assert connection.get([new_get(b"value", 1000)], [b"note"], soon()) == [b"7"]
        connection.close()


def test_a_slot_that_no_node_serves() -> None:
    def script(peer: Peer) -> None:
        while peer.command():
            peer.send(slots((0, 0, b"", server.port)))

    with FakeServer(script) as server:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.BUSY
        connection.close()


def test_more_nodes_than_there_are() -> None:
    """A map that names hundreds of nodes opens few connections."""
    hosts = [b"127.%b.%b.1" % (b"0" * a, b"0" * b) for a in range(1, 21) for b in range(1, 11)]  # names of one address
    ranges = [(slot, slot, hosts[slot % len(hosts)]) for slot in range(16384)]

    def script(peer: Peer) -> None:
        while words := peer.command():
            if words[0] == b"CLUSTER":
                peer.send(slots(*[(*place, server.port) for place in ranges]))
            else:
                peer.send(b":1\r\n")

    with FakeServer(script) as server:
        connection = connect(f"valkey+cluster://127.0.0.1:{server.port}")
        assert failing(lambda: connection.exists(NAMES, [], soon())).problem is StoreProblem.PROTOCOL
        assert len(server.peers) <= 129
        connection.close()


def test_a_node_that_is_killed(nodes: list[ValkeyServer], line: Connection) -> None:
    """Its values cannot be read, those of others can; when it is back all can be asked."""
    line.put([new_put(name, content(1, 200)) for name in NAMES], [], soon())
    nodes[0].kill()
    assert failing(lambda: line.exists(NAMES, [], soon())).problem is StoreProblem.UNREACHABLE
    there = [owner(nodes, name) > 0 for name in NAMES]
    kept = [name for name in NAMES if owner(nodes, name)]
    assert line.exists(kept, [], soon()).there == [True] * len(kept)
    nodes[0].start()
    wait_until(lambda: b"cluster_state:ok" in nodes[0].ask("CLUSTER", "INFO"))
    assert line.exists(NAMES, [], soon()).there == there
