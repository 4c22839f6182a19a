"""What a session may ask for beyond what its requests say: leases, and what the daemon keeps for them."""

from __future__ import annotations

from typing import cast

import pytest
from context_rig import MIB, context_of

from tiercache.daemon.requests.context import MAX_LEASED_KEYS_BYTES
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.tiers.dram.leases import ReadLease, StoreLease
from tiercache.errors import RequestRefused
from tiercache.protocol.messages import Hello
from tiercache.protocol.namespaces import NamespaceSpec


def lease_keys(session: Session, count: int) -> None:
    """Leases with a mebibyte of keys each."""
    for number in range(count):
        session.owner.reads[number] = ReadLease(number, [], bytes(MIB), MIB // 16, [], 0.0, 60.0)


def test_what_leases_of_a_tenant_make_the_daemon_keep_is_limited() -> None:
    context, session = context_of("a")
    lease_keys(session, MAX_LEASED_KEYS_BYTES // MIB - 1)
    assert context.lease_ttl_s(session, 1000) == 1.0
    lease_keys(session, MAX_LEASED_KEYS_BYTES // MIB)
    with pytest.raises(RequestRefused, match="hold too many blocks: release some"):
        context.lease_ttl_s(session, 1000)
    del session.owner.reads[0]
    assert context.lease_ttl_s(session, 1000) == 1.0


def test_a_session_has_so_many_leases_of_all_kinds() -> None:
    context, session = context_of("", max_leases=3)
    lease_keys(session, 1)
    session.owner.writes |= {number: cast(StoreLease, None) for number in (7, 8)}
    with pytest.raises(RequestRefused, match="3 leases are open in this session"):
        context.lease_ttl_s(session, 1000)
    session.owner.writes.clear()
    assert context.lease_ttl_s(session, 1 << 40) == 60.0


def test_a_tenant_names_its_own_namespaces_only() -> None:
    context, _ = context_of("a")
    spec = NamespaceSpec(engine="e", layout="x", dtype="uint8", block_size=1, block_bytes=4096)
    own, other = (context.cache.space.open_namespace(spec.of_tenant(name)) for name in ("a", "b"))
    assert context.namespaces([own.number]) == [own]
    for numbers in ([other.number], [own.number, other.number], [99]):
        with pytest.raises(RequestRefused, match="is not registered: register its spec"):
            context.namespaces(numbers)


@pytest.mark.parametrize(
    ("said", "pid", "name"),
    [("engine\n", 7, "engine?"), ("", 7, "pid 7"), (" ", 7, "pid 7"), ("", 0, "unnamed"), ("x" * 65, 7, "x" * 64)],
)
def test_a_client_is_called_something_short_and_printable_in_the_log(said: str, pid: int, name: str) -> None:
    assert Session(Hello(1, 1, bytes(16), said, 0, False), "p", pid=pid).name == name
