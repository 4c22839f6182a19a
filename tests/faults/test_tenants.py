"""Tenants that claim anything: none reads another's bytes, takes another's room, or learns of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from fault_processes import Daemon
from fault_tenants import Site, Tenant, free_port
from waiting import wait_until

from tiercache.client.client import Client
from tiercache.daemon.requests.service import FOR_TENANTS
from tiercache.protocol import messages as m

MIB = 1 << 20
VISIBLE, DROPPED = 0, 2
FRAME = 2


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, free_port())


@pytest.fixture
def tenant(site: Site, closing: ExitStack) -> Callable[..., Tenant]:
    return lambda name, **settings: closing.enter_context(Tenant(site, name, **settings))


def stats_of(daemon: Daemon) -> dict[str, Any]:
    with Client.connect(daemon.run_dir, map_arena=False) as client:
        return client.stats()


@pytest.mark.parametrize("claim", [False, True])
def test_frames_never_show_what_they_held_before(
    site: Site, start_daemon: Callable[..., Daemon], tenant: Callable[..., Tenant], claim: bool
) -> None:
    """Whatever a client on another host says of a mapping: it has none, so what it did not send is not its block."""
    start_daemon("--arena", "2MiB", "--region", "2MiB", *site.flags[4:])
    secret = b"another tenant's KV " * (MIB // 20 + 1)
    first, second = tenant("team-a"), tenant("team-b", map_arena=claim)
    theirs, ours = first.namespace(MIB - 4000), second.namespace(MIB - 4000)
    for _ in range(2):  # the whole arena
        assert first.store(theirs, os.urandom(16), secret[: MIB - 4000]) == [VISIBLE]
    for sent in (0, 1, MIB - 4001):
        key = os.urandom(16)
        lease, states = second.reserve(ours, key)  # evicts, and has the other one's frame
        assert states == [FRAME]
        if sent:
            assert second.ask("write", lease, 0, 0, payload=b"x" * sent) == ["done"]
        assert second.commit(lease) == [DROPPED]
        assert second.load(ours, key, 4096) == b""
    # A gap is not filled by what comes after it, and no client may read the rest of the frame behind the block.
    lease, _ = second.reserve(ours, key)
    assert second.ask("write", lease, 0, 1, payload=b"x")[:2] == ["error", "bad_value"]
    assert second.ask("write", lease, 0, 0, payload=b"y" * (MIB - 4000)) == ["done"]
    assert second.commit(lease) == [VISIBLE]
    assert second.load(ours, key, MIB - 4000) == b"y" * (MIB - 4000)
    _, _, _, lease, *_ = second.ask("match", [ours], key, 20_000)
    for offset, length in ((MIB - 4000, 1), (0, MIB - 3999), (-1, 1), (1 << 40, 1)):
        assert second.ask("read", lease, ours, 0, offset, length)[:2] == ["error", "bad_value"]
    assert second.ask("read", lease, ours, 1, 0, 1)[:2] == ["error", "bad_value"]
    assert second.ask("read", lease, theirs, 0, 0, 1)[:2] == ["error", "unknown_namespace"]


def test_what_tells_of_others_is_refused(
    site: Site, start_daemon: Callable[..., Daemon], tenant: Callable[..., Tenant]
) -> None:
    daemon = start_daemon(*site.flags)
    other = tenant("team-b")
    number, key = other.namespace(4096), os.urandom(16)
    fields: dict[type, tuple[Any, ...]] = {
        m.Stats: (),
        m.Check: (),
        m.Inspect: ([], key),
        m.Pins: (),
        m.Specs: ([number],),
        m.Extents: (1, number, 0, 1),
        m.BadExtent: (1, number, 0),
        m.ReserveExtents: (number, b"", key, 1000),
        m.CommitExtents: (1, b""),
        m.Settings: (),
        m.ChangeSetting: ("quota", "team-b=1TiB"),
    }
    # New kinds of requests are refused to tenants until this table allows them.
    assert fields.keys() == set(get_args(m.AnyRequest)) - FOR_TENANTS
    for kind, its in fields.items():
        assert other.ask(kind.__struct_config__.tag, *its)[:2] == ["error", "forbidden"], kind
    assert other.ask("flush", "all", [], b"")[:2] == ["error", "forbidden"]
    assert daemon.run_dir not in str(other.welcome)


def refused_to_the_deaf(session: Tenant, namespace: int, key: bytes) -> str:
    """Ask over a connection that is never drained, as long as there is an answer; what the refusal says."""
    lease, deaf = session.ask("match", [namespace], key, 60_000)[3], session.also(high_water=1)
    for _ in range(16):
        deaf.send(session.header("read", lease, namespace, 0, 0, 2 * MIB))
    while True:
        deaf.send(session.header("read", lease, namespace, 0, 0, 2 * MIB))
        deaf.send(session.header("read", lease, namespace, 0, 0, 1))  # where there is no room for the other one
        answer = session.ask("read", lease, namespace, 0, 0, 1)
        if answer[0] == "error":
            assert answer[1] == "limit"
            return str(answer[2])


def test_a_tenant_that_does_not_read_holds_no_frames_and_little_memory(
    site: Site, start_daemon: Callable[..., Daemon], tenant: Callable[..., Tenant]
) -> None:
    """It asks over connections that it never drains, and begins a new session when one is full."""
    daemon = start_daemon("--arena", "8MiB", "--region", "8MiB", "--quota", "team-a=4MiB", *site.flags[4:])
    other, session = tenant("team-b"), tenant("team-a")
    theirs, ours, key, data = other.namespace(2 * MIB), session.namespace(2 * MIB), os.urandom(16), os.urandom(2 * MIB)
    wait_until(lambda: other.store(theirs, key, data), "the arena is there")
    assert session.store(ours, key, data) == [VISIBLE]
    assert "answers to this session" in refused_to_the_deaf(session, ours, key)
    more = [tenant("team-a") for _ in range(5)]
    assert "answers to tenant team-a wait" in [refused_to_the_deaf(one, ours, key) for one in more][-1]
    for _ in range(4):  # blocks are evicted and stored, and every evicted frame becomes free
        assert session.store(ours, os.urandom(16), data) == [VISIBLE]
    stats = stats_of(daemon)
    assert stats["arena"]["used_bytes"] <= 6 * MIB
    assert [its["used_bytes"] for its in stats["quotas"] if its["name"] == "team-a"] == [4 * MIB]
    assert other.load(theirs, key, 2 * MIB) == data
    for one in (session, *more):
        one.close()
    again = tenant("team-a")
    wait_until(lambda: again.ask("match", [ours], key, 1)[1] or again.store(ours, key, data), "the block is there")
    lease = again.ask("match", [ours], key, 60_000)[3]
    wait_until(lambda: again.ask("read", lease, ours, 0, 0, 4096)[0] == "payload", "the unread answer is dropped")
