"""A connection to a real Valkey server that is stopped and goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_calls import content
from valkey_rig import ValkeyServer, connect, got, new_get, new_put, soon
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.store import NotReplicated, StoreError, StoreProblem

pytestmark = pytest.mark.stress

MIB = 1 << 20


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def problem_of(call: object) -> StoreProblem:
    assert callable(call)
    with pytest.raises(StoreError) as caught:
        call()
    assert "\n" not in caught.value.text
    return caught.value.problem


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


def test_a_flush_waits_for_the_replicas(valkey: ValkeyServer) -> None:
    """A replica that becomes the primary has it."""
    with ValkeyServer("--replicaof", f"127.0.0.1 {valkey.port}") as replica:
        replicates = b"state=online"
        wait_until(lambda: replicates in valkey.ask("INFO", "replication"), "the replica copies the primary")
        connection = connect(valkey.url)
        assert connection.set_note(b"flushed", b"1", soon()) == b"1"
        assert replica.ask("GET", "flushed") == b"1"
        fresh = connect(valkey.url)  # it has written nothing itself
        assert fresh.replicated_note(b"flushed", soon()) == b"1"
        assert [one.ask("TTL", "flushed") for one in (valkey, replica)] == [b":-1", b":-1"]
        replica.stop()
        try:
            for call in (
                lambda: fresh.replicated_note(b"flushed", soon()),
                lambda: connection.set_note(b"flushed", b"2", soon()),
                lambda: connection.delete([b"flushed"], soon()),
            ):
                with pytest.raises(NotReplicated, match="1 of 1 replicas have not taken a flush"):
                    call()
            assert connection.set_note(b"made", b"3", soon(), only_if_missing=True) == b"3", "that is not a flush"
        finally:
            replica.go_on()
        assert connection.set_note(b"flushed", b"4", soon()) == b"4"
        assert replica.ask("GET", "flushed") == b"4"
        connection.close()
        fresh.close()


def test_a_user_who_may_not_ask_for_replicas_flushes_all_the_same(valkey: ValkeyServer) -> None:
    valkey.ask("ACL", "SETUSER", "few", "on", ">secret", "~*", "+set", "+get", "+unlink")
    connection = connect(f"valkey://few:secret@127.0.0.1:{valkey.port}")
    assert connection.set_note(b"note", b"1", soon()) == b"1"
    connection.delete([b"note"], soon())
    connection.close()
