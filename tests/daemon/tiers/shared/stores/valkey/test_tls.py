"""Valkey with TLS: the server's certificate is verified, always."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_valkey import failing
from store_calls import content
from valkey_rig import Certificates, TlsFront, ValkeyServer, connect, got, new_get, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreProblem

pytestmark = pytest.mark.stress

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
