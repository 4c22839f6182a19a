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
from raw_client import DROPPED, FRAME, VISIBLE, new_spec

from tiercache.daemon.requests.service import FOR_TENANTS
from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

MIB = 1 << 20


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, free_port())


@pytest.fixture
def tenant(site: Site, closing: ExitStack) -> Callable[..., Tenant]:
    return lambda name, **settings: closing.enter_context(Tenant(site, name, **settings))


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
        lease, states, *_ = second.reserve(ours, key)  # evicts, and has the other one's frame
        assert states == [FRAME]
        if sent:
            assert second.ask("write", lease, 0, 0, payload=[b"x" * sent]) == ["done"]
        assert second.commit(lease, [0]) == [DROPPED]
        assert second.load(ours, key, 4096) == b""
    assert second.store(ours, key, b"y" * (MIB - 4000)) == [VISIBLE]
    assert second.load(ours, key, MIB - 4000) == b"y" * (MIB - 4000)
    _, lease, _ = second.match([ours], key)
    assert second.ask("read", lease, ours, 0, MIB - 4000, 1)[:2] == ["error", "bad_value"], "the rest of the frame"
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
    assert fields.keys() == set(get_args(m.ANY_REQUEST)) - FOR_TENANTS
    for kind, its in fields.items():
        assert other.ask(kind.__struct_config__.tag, *its)[:2] == ["error", "forbidden"], kind
    assert other.ask("flush", "all", [], b"")[:2] == ["error", "forbidden"]
    assert daemon.run_dir not in str(other.welcome)
    # Nor does it help to claim that its blocks are another's: the daemon writes its own name over that.
    spec = new_spec(4096)
    own = other.ask("register_namespace", spec)
    assert other.ask("register_namespace", {**spec, "extra": {"tenant": "team-a"}}) == own
