"""A Valkey cluster: names go to the node that has their slot, wherever that moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_valkey import FakeServer, Peer, Script, failing
from store_calls import content, room, soon, value_of
from valkey_rig import ValkeyServer, connect, valkey_cluster

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Put, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey.cluster import hash_slot_of

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


@pytest.mark.stress
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
        put = Put(name, [content(1, SIZE)])
        line.put([put, Put(NAMES[-1], [content(2, SIZE)])], [], soon())
        assert put.fate is Fate.DONE
        assert old.ask("DBSIZE") == b":0" or new.ask("DBSIZE") != b":0"
        assert line.exists([name, NAMES[-1]], [], soon()).there == [True, True]
        get = room(name, 5, SIZE)
        line.get([get], [name], soon())
        assert value_of(get) == content(1, SIZE)
        line.delete([name], soon())
        line.put([put], [], soon())
        for node in (new, old, nodes[1]):
            assert node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id) == b"+OK"
        get = room(name, 5, SIZE)
        line.get([get], [], soon())
        assert value_of(get) == content(1, SIZE)
    finally:
        line.delete([name], soon())
        for node in (old, new, nodes[1]):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", old_id)
    line.put([put], [], soon())
    assert line.exists([name], [], soon()).there == [True]


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
        connection = server.connect(f"valkey+cluster://127.0.0.1:{server.port}")
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.BUSY
        assert len(asked) < 10


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
def test_a_flush_waits_for_the_replicas_of_the_node_that_takes_it(word: bytes) -> None:
    seen: dict[str, list[bytes]] = {"old": [], "new": []}

    def node(name: str, replicas: int) -> Script:
        def script(peer: Peer) -> None:
            while words := peer.command():
                if words[0] == b"CLUSTER":
                    peer.send(slots((0, 16383, b"", old.port)))
                    continue
                seen[name].append(b" ".join(words))
                if words[0] == b"INFO":
                    peer.value(b"\r\n".join(b"slave%d:state=online,lag=0" % number for number in range(replicas)))
                elif words[0] == b"WAIT":
                    peer.send(b":%d\r\n" % (replicas if name == "new" else 0))
                elif words[0] == b"SET" and name == "old":
                    peer.send(b"-%b %d 127.0.0.1:%d\r\n" % (word, hash_slot_of(words[1]), new.port))
                else:
                    peer.send(b"+OK\r\n")

        return script

    with FakeServer(node("old", 1)) as old, FakeServer(node("new", 3)) as new:
        connection = old.connect(f"valkey+cluster://127.0.0.1:{old.port}")
        assert connection.set_note(b"n", b"v", soon()) == b"v"
    assert seen["old"] == [b"INFO replication", b"SET n v", b"WAIT 1 1000"]
    asking = [b"ASKING"] if word == b"ASK" else []
    assert seen["new"] == [b"INFO replication", *asking, b"SET n v", b"WAIT 3 1000"]


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
        b"*1\r\n*3\r\n$1\r\n0\r\n:1\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n$1\r\n1\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\n/\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n:0\r\n",
        b"*2\r\n" + 2 * b"*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"-ERR This instance has cluster support disabled\r\n",
    ],
)
def test_slots_that_make_no_sense(reply: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.command()
        peer.send(reply)
        peer.swallow()

    with FakeServer(script) as server:
        connection = server.connect(f"valkey+cluster://127.0.0.1:{server.port}")
        problem = failing(lambda: connection.exists([b"x"], [], soon())).problem
        assert problem is StoreProblem.PROTOCOL
