"""A client goes DOWN when the daemon answers late, wrongly or not at all, and comes UP with the daemon."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_daemon import FakeDaemon
from waiting import hurried, wait_until

import tiercache
from tiercache.connector.write_lease import abort_lease
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError, RequestRefused
from tiercache.protocol import messages as m

BLOCK = 4096
SPEC = tiercache.NamespaceSpec(engine="t/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK)
KEYS = tiercache.KeyChain(tiercache.root_key("t"), 4, range(12)).packed()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tc-") as directory:
        yield Path(directory)


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(run_dir) as daemon:
        yield daemon


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose daemon withholds an answer do not wait for it when they close."""
    monkeypatch.setattr(tiercache.client.keeper, "CLOSE_S", 0.1)


@pytest.fixture
def client(brief_end: None, daemon: FakeDaemon) -> Iterator[tiercache.Client]:
    with tiercache.Client.connect(daemon.address, name="t") as client:
        yield client


@pytest.fixture
def connector(brief_end: None, daemon: FakeDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.zeros((8, BLOCK), np.uint8))
    with tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True) as connector:
        yield connector


def mapped_regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fake")


def test_a_refusal_at_hello_is_told_at_once(daemon: FakeDaemon) -> None:
    daemon.refusal = m.Refused("version", "speak another")
    with pytest.raises(RequestRefused, match="version: speak another"):
        tiercache.Client.connect(daemon.address)


def test_a_missed_deadline_is_down_and_good_pings_are_up(daemon: FakeDaemon, client: tiercache.Client) -> None:
    daemon.rules[m.Ping] = lambda request, reply: []
    daemon.rules[m.Stats] = lambda request, reply: []
    session = client.session()
    with hurried(client, 0.2):
        with pytest.raises(DeadlineExceeded):
            client.stats()
        assert not client.alive
        with pytest.raises(DaemonUnavailable, match="unavailable: no answer"):
            client.stats()
        with pytest.raises(DaemonUnavailable, match="is being probed"):  # a match that is held costs no deadline
            session.call(m.Stats)
        wait_until(lambda: daemon.seen(m.Stats))
        assert len(daemon.seen(m.Stats)) == 1  # the second call did not even ask
        pings = len(daemon.seen(m.Ping))
        wait_until(lambda: len(daemon.seen(m.Ping)) > pings)
        assert not client.alive
        daemon.rules.clear()
        wait_until(lambda: client.alive)
    assert client.stats() == {"fake": 1}
    assert len(daemon.hellos) == 1  # a daemon that was only slow keeps its session


def test_a_late_grant_of_a_read_lease_is_given_back(daemon: FakeDaemon, connector: tiercache.Connector) -> None:
    assert connector.store(KEYS, [0, 1, 2]).stored == 3
    daemon.hold_back(m.Match)
    with hurried(connector.client, 0.2):
        assert connector.match(KEYS).blocks == 0
    assert connector.counters["times_down"] == 1
    ((_, held),) = wait_until(lambda: daemon.held)
    lease = msgspec.msgpack.decode(held)[5]
    daemon.let_go()
    wait_until(lambda: any(r.lease == lease for r in daemon.seen(m.Release)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("request_id", "generation"), [(0, 1), (10_000, 0)], ids=["life", "request"])
def test_replies_of_another_life_or_to_another_request_are_dropped(
    daemon: FakeDaemon, client: tiercache.Client, request_id: int, generation: int
) -> None:
    def stranger_first(request: m.AnyRequest, reply: m.Reply) -> None:
        daemon.send(m.StatsReply(request.request_id + request_id, daemon.generation + generation, {"other": 1}))

    daemon.rules[m.Stats] = stranger_first
    assert client.stats() == {"fake": 1}


@pytest.mark.parametrize("garbage", [b"", b"\xc1", msgspec.msgpack.encode(["no such", 1])])
def test_garbage_ends_the_session_and_another_begins(
    daemon: FakeDaemon, client: tiercache.Client, garbage: bytes
) -> None:
    daemon.rules[m.Stats] = lambda request, reply: [garbage] if garbage else [b"", b""]
    with pytest.raises(ProtocolError):
        client.stats()
    daemon.rules.clear()
    wait_until(lambda: client.times_up == 2)
    assert len(daemon.hellos) == 2


def test_a_region_that_comes_late_is_waited_for(run_dir: Path) -> None:
    with FakeDaemon(run_dir) as daemon:
        daemon.announce_regions = False
        pool = tiercache.Pool.from_blocks(np.ones((8, BLOCK), np.uint8))
        with tiercache.connect(run_dir, namespace=SPEC, pool=pool, required=True) as connector:
            transfer = connector.store_async(KEYS, [0, 1, 2])
            wait_until(lambda: daemon.seen(m.Reserve))
            daemon.send_regions()
            assert transfer.result(40).stored == 3


def test_a_closed_session_is_down_at_once_and_comes_back_with_a_new_mapping(
    daemon: FakeDaemon, connector: tiercache.Connector
) -> None:
    assert connector.store(KEYS, [0, 1, 2]).stored == 3
    before = mapped_regions()
    daemon.drop_sessions()
    wait_until(lambda: connector.counters["times_up"] == 2)
    wait_until(lambda: mapped_regions() == before, "the former mapping is gone")
    assert len(daemon.hellos) == 2
    assert connector.load(connector.match(KEYS), [3, 4, 5]) == 3


@pytest.mark.parametrize("code", [m.ErrorCode.EXPIRED, m.ErrorCode.LIMIT])
def test_a_lease_whose_end_was_lost_is_ended_later(
    daemon: FakeDaemon, client: tiercache.Client, code: m.ErrorCode
) -> None:
    """Else the daemon would keep these frames for us, though we no longer write to them, until this process ends."""

    def unheard(request: m.AnyRequest, reply: m.Reply) -> list[bytes] | None:
        unheard_now = len(daemon.seen(m.Abort)) <= 2
        refusal = m.Error(request.request_id, daemon.generation, code.value, "not now")
        return [msgspec.msgpack.encode(refusal)] if unheard_now else None

    daemon.rules[m.Abort] = unheard
    abort_lease(client.session(), 7, finished=True)
    wait_until(lambda: len(daemon.seen(m.Abort)) > 2)
    wait_until(lambda: not client._keeper.errands)
    assert {request.finished for request in daemon.seen(m.Abort) if isinstance(request, m.Abort)} == {True}
    assert client.alive
