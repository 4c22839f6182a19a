"""Connections to a real Valkey server: one that is stopped, its replicas, and TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_valkey import failing
from store_calls import content, room, soon, value_of
from valkey_rig import Certificates, TlsFront, ValkeyServer, connect
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.store import Fate, NotReplicated, Put, StoreProblem

pytestmark = pytest.mark.stress

MIB = 1 << 20


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def test_stopped_and_going_on(valkey: ValkeyServer) -> None:
    """Every call ends at its deadline; no late answer reaches a later call."""
    connection = connect(valkey.url)
    fresh = connect(valkey.url)
    value, other = content(1, 2 * MIB), content(2, 2 * MIB)
    connection.put([Put(b"one", [value]), Put(b"two", [other])], [], soon())
    valkey.stop()
    try:
        for waiting in (connection, fresh):
            for call in (
                lambda line: line.get([room(b"one", 5, 2 * MIB)], [b"note"], soon(0.2)),
                lambda line: line.exists([b"one"], [b"note"], soon(0.2)),
                lambda line: line.put([Put(b"new", [value]) for _ in range(40)], [], soon(0.2)),
                lambda line: line.delete([b"nothing"], soon(0.2)),
                lambda line: line.set_note(b"nothing", b"", soon(0.2)),
            ):
                late = failing(lambda call=call, line=waiting: call(line))
                assert late.problem is StoreProblem.TIMEOUT
    finally:
        valkey.go_on()
    for waiting in (connection, fresh):
        get = room(b"two", 5, 2 * MIB)
        waiting.get([get], [], soon())
        assert value_of(get) == other
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


# --- TLS: the server's certificate is verified, always -----------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[ValkeyServer]:
    with ValkeyServer("--requirepass", "s3cret") as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def front(locked: ValkeyServer, certificates: Certificates) -> Iterator[TlsFront]:
    with TlsFront(locked, certificates) as front:
        yield front


def url(front: TlsFront, query: str, host: str = "127.0.0.1") -> str:
    return f"valkeys://:s3cret@{host}:{front.port}?{query}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_values_come_back(front: TlsFront, certificates: Certificates, host: str) -> None:
    before = len(front.links) // 2
    connection = connect(url(front, f"ca={certificates.ca}", host))
    values = [content(number, 128 + number * 250_000) for number in range(8)]
    connection.put([Put(b"v%d" % number, [value]) for number, value in enumerate(values)], [], soon())
    gets = [room(b"v%d" % number, 5, 2 * MIB) for number in (*range(8), 9)]
    connection.get(gets, [b"note"], soon())
    assert [value_of(get) for get in gets[:8]] == values
    assert gets[8].fate is Fate.MISSING
    assert connection.exists([b"v1"] * 3000, [], soon()).there == [True] * 3000
    assert len(front.links) == 2 * before + 2  # one connection for all of these calls, from both sides
    connection.close()


def test_a_stranger_s_certificate(
    locked: ValkeyServer, front: TlsFront, certificates: Certificates, tmp_path: Path
) -> None:
    """Neither that of an unknown CA, nor one for another host; and no URL switches that off."""
    other = Certificates(tmp_path)
    for ca in ("", f"ca={other.ca}"):
        connection = connect(url(front, ca).rstrip("?"))
        error = failing(lambda line=connection: line.exists([b"x"], [], soon()))
        assert error.problem is StoreProblem.DENIED
        assert "?ca=FILE" in error.text
    with TlsFront(locked, certificates, host="127.0.0.2") as elsewhere:
        connection = connect(url(elsewhere, f"ca={certificates.ca}", "127.0.0.2"))
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.DENIED


def test_our_certificate(locked: ValkeyServer, certificates: Certificates) -> None:
    with TlsFront(locked, certificates, wants_certificate=True) as strict:
        connection = connect(url(strict, f"ca={certificates.ca}"))
        error = failing(lambda: connection.exists([b"x"], [], soon()))
        assert error.problem in (StoreProblem.DENIED, StoreProblem.UNREACHABLE)  # its reason may not reach us
        assert "cert=FILE" in error.text
        ours = f"ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
        connection = connect(url(strict, ours))
        assert connection.exists([b"x"], [], soon()).there == [False]
        connection.close()
