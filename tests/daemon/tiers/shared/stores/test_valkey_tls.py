"""Valkey with TLS: the server's certificate is verified, always."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_valkey import FakeServer, Peer, failing
from valkey_rig import Certificates, TlsFront, ValkeyServer, connect, content, got, new_get, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey import open_valkey
from tiercache.errors import ConfigError

MIB = 1 << 20


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer("--requirepass", "s3cret") as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def front(valkey: ValkeyServer, certificates: Certificates) -> Iterator[TlsFront]:
    with TlsFront(valkey, certificates) as front:
        yield front


def url(front: TlsFront, query: str, host: str = "127.0.0.1") -> str:
    return f"valkeys://:s3cret@{host}:{front.port}?{query}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_values_come_back(front: TlsFront, certificates: Certificates, host: str) -> None:
    before = len(front.links) // 2
    connection = connect(url(front, f"ca={certificates.ca}", host))
    values = [content(number, 128 + number * 250_000) for number in range(8)]
    connection.put([new_put(b"v%d" % number, value) for number, value in enumerate(values)], [], soon())
    gets = [new_get(b"v%d" % number, 2 * MIB) for number in (*range(8), 9)]
    connection.get(gets, [b"note"], soon())
    assert [got(get) for get in gets[:8]] == values
    assert gets[8].fate is Fate.MISSING
    assert connection.exists([b"v1"] * 3000, [], soon()).there == [True] * 3000
    assert len(front.links) == 2 * before + 2  # one connection for all of these calls, from both sides
    connection.close()


def test_a_stranger_s_certificate(
    valkey: ValkeyServer, front: TlsFront, certificates: Certificates, tmp_path: Path
) -> None:
    """Neither that of an unknown CA, nor one for another host; and no URL switches that off."""
    other = Certificates(tmp_path)
    for ca in ("", f"ca={other.ca}"):
        connection = connect(url(front, ca).rstrip("?"))
        error = failing(lambda line=connection: line.exists([b"x"], [], soon()))
        assert error.problem is StoreProblem.DENIED
        assert "?ca=FILE" in error.text
    with TlsFront(valkey, certificates, host="127.0.0.2") as elsewhere:
        connection = connect(url(elsewhere, f"ca={certificates.ca}", "127.0.0.2"))
        assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.DENIED


def test_our_certificate(valkey: ValkeyServer, certificates: Certificates) -> None:
    with TlsFront(valkey, certificates, wants_certificate=True) as strict:
        connection = connect(url(strict, f"ca={certificates.ca}"))
        error = failing(lambda: connection.exists([b"x"], [], soon()))
        assert error.problem in (StoreProblem.DENIED, StoreProblem.UNREACHABLE)  # its reason may not reach us
        assert "cert=FILE" in error.text
        ours = f"ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
        connection = connect(url(strict, ours))
        assert connection.exists([b"x"], [], soon()).there == [False]
        connection.close()


def test_certificates_that_change(front: TlsFront, certificates: Certificates, tmp_path: Path) -> None:
    """They are read again for the next connection; a mistake in them is told then."""
    ca = tmp_path / "ca.pem"
    (tmp_path / "other").mkdir()
    ca.write_bytes(Certificates(tmp_path / "other").ca.read_bytes())
    store = open_valkey(url(front, f"ca={ca}"))
    connection = store.connect()
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem is StoreProblem.DENIED
    new = tmp_path / "new.pem"
    new.write_bytes(certificates.ca.read_bytes())
    os.replace(new, ca)
    assert connection.exists([b"x"], [], soon()).there == [False]
    connection.close()
    ca.unlink()
    connection = store.connect()
    error = failing(lambda: connection.exists([b"x"], [], soon()))
    assert error.problem is StoreProblem.DENIED
    assert "ca.pem" in error.text


def test_a_key_that_does_not_belong(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    with pytest.raises(ConfigError, match="belongs"):
        open_valkey(f"valkeys://localhost?cert={certificates.cert}&key={other.key}")


def test_no_tls_there(valkey: ValkeyServer, front: TlsFront) -> None:
    """And TLS where we speak none."""
    connection = connect(f"valkeys://127.0.0.1:{valkey.port}")  # it waits for the end of a line
    error = failing(lambda: connection.exists([b"x"], [], soon(0.3)))
    assert error.problem is StoreProblem.TIMEOUT
    assert "speak TLS" in error.text
    with FakeServer(lambda peer: peer.send(b"-ERR what is this?\r\n")) as server:
        connection = connect(server.url.replace("valkey", "valkeys", 1))
        error = failing(lambda: connection.exists([b"x"], [], soon()))
        assert error.problem is StoreProblem.PROTOCOL
        assert "speak TLS" in error.text
    connection = connect(f"valkey://127.0.0.1:{front.port}")
    problems = (StoreProblem.PROTOCOL, StoreProblem.UNREACHABLE)
    assert failing(lambda: connection.exists([b"x"], [], soon())).problem in problems


def test_a_server_that_says_nothing(valkey: ValkeyServer, front: TlsFront, certificates: Certificates) -> None:
    """Within the handshake, and behind it."""
    with FakeServer(Peer.swallow) as silent:
        connection = connect(silent.url.replace("valkey", "valkeys", 1))
        assert failing(lambda: connection.exists([b"x"], [], soon(0.3))).problem is StoreProblem.TIMEOUT
    connection = connect(url(front, f"ca={certificates.ca}"))
    connection.put([new_put(b"v", content(1, MIB))], [], soon())
    valkey.stop()
    try:
        get = new_get(b"v", MIB)
        assert failing(lambda: connection.get([get], [], soon(0.3))).problem is StoreProblem.TIMEOUT
        puts = [new_put(b"w", bytes(4 * MIB)) for _ in range(16)]
        assert failing(lambda: connection.put(puts, [], soon(0.3))).problem is StoreProblem.TIMEOUT
    finally:
        valkey.go_on()
    connection.get([get], [], soon())
    assert got(get) == content(1, MIB)
    connection.close()
