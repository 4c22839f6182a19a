"""The number of a client's connections: never more than the daemon allows, however many threads it has."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_daemon import FakeDaemon

import tiercache
from tiercache.client import channel
from tiercache.client.channels import Channels
from tiercache.errors import DeadlineExceeded, RequestRefused
from tiercache.protocol import messages as m

WAIT_S = 60


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path / "fake")
    yield fake
    fake.close()


@pytest.fixture
def client(fake: FakeDaemon) -> Iterator[tiercache.Client]:
    with tiercache.Client.connect(fake.address, map_arena=False) as client:
        yield client


@pytest.fixture
def channels(client: tiercache.Client) -> Iterator[Callable[..., Channels]]:
    """Makes channels of the client's session."""
    made: list[Channels] = []

    def make(most: int, late: list[m.AnyReply] | None = None) -> Channels:
        welcome, found = client.session().welcome, [] if late is None else late
        made.append(Channels(welcome.control, welcome.session, welcome.generation, WAIT_S, found.append, most=most))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The channels that are made from now on."""
    opened: list[Any] = []
    make = channel.Channel.__init__

    def noted(self: channel.Channel, *arguments: Any) -> None:
        opened.append(self)
        make(self, *arguments)

    monkeypatch.setattr(channel.Channel, "__init__", noted)
    return opened


def in_threads(count: int, work: Callable[[], object]) -> list[object]:
    """What `work` returns or raises in `count` threads at once."""
    results: list[object] = []

    def perform() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(type(error))

    threads = [threading.Thread(target=perform) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def test_a_real_daemon_says_how_many_and_refuses_none_of_them(opened: list[Any]) -> None:
    with tiercache.launch("4MiB", region="2MiB", max_sessions=3) as daemon:
        clients = [tiercache.Client.connect(daemon.address, map_arena=False) for _ in range(3)]
        assert {client.session().welcome.connections for client in clients} == {16}

        def ask() -> int:
            for client in clients * 20:
                client.ping()
            return 1

        assert in_threads(24, ask) == [1] * 24
        assert clients[0].stats()["counters"]["connections_refused"] == 0
        assert len(opened) <= 3 * 16
        for client in clients:
            client.close()


def test_threads_share_half_of_the_channels(channels: Callable[..., Channels], opened: list[Any]) -> None:
    ours = channels(6)

    def ask() -> int:
        for _ in range(50):
            ours.call(m.Ping, m.Done)
        return 1

    assert in_threads(12, ask) == [1] * 12
    assert 1 <= len(opened) <= 3


def test_a_thread_that_holds_a_connection_gets_another_at_once(
    fake: FakeDaemon, channels: Callable[..., Channels], opened: list[Any]
) -> None:
    """A store holds one request while it makes another: with too few connections all threads would wait forever."""
    ours, ready = channels(4), threading.Barrier(2)

    def nested() -> int:
        pending = ours.post(m.Ping, m.Done)
        ready.wait(WAIT_S)
        ours.call(m.Stats, m.StatsReply)
        ours.wait(pending)
        return 1

    assert in_threads(2, nested) == [1, 1]
    assert len(opened) <= 4
    assert ours._holders == {}


def test_no_more_are_kept_than_the_daemon_allows(fake: FakeDaemon, channels: Callable[..., Channels]) -> None:
    ours = channels(2)
    for pending in [ours.post(m.Ping, m.Done) for _ in range(5)]:
        ours.wait(pending)
    assert len(ours._idle) == 2
    fake.hold_back(m.Ping)
    for pending in [ours.post(m.Ping, m.Done) for _ in range(5)]:
        ours.abandon(pending)
    assert (len(ours._idle), len(ours._late)) == (0, 2)


def test_a_request_for_too_much_is_refused_and_the_client_stays_up(fake: FakeDaemon, client: tiercache.Client) -> None:
    ours = client.session()._channels
    ours._most = 4
    posted, refused = threading.Barrier(3), threading.Event()

    def hold() -> int:
        pending = ours.post(m.Ping, m.Done)
        posted.wait(WAIT_S)
        assert refused.wait(WAIT_S)
        ours.wait(pending)
        return 1

    holders, results = threading.Thread(target=lambda: results.extend(in_threads(2, hold))), []
    holders.start()
    posted.wait(WAIT_S)
    with pytest.raises(RequestRefused, match="2 threads of this client are under way: ask less at once"):
        client.call(m.Ping, timeout_s=0.05)
    assert client.alive
    refused.set()
    holders.join(WAIT_S)
    assert results == [1, 1]
    assert ours._holders == {}
    assert in_threads(1, lambda: client.ping() < WAIT_S) == [True]


def test_a_channel_whose_reply_is_late_serves_others_and_its_grant_is_given_back(
    fake: FakeDaemon, channels: Callable[..., Channels], opened: list[Any]
) -> None:
    late: list[m.AnyReply] = []
    ours = channels(2, late)
    fake.hold_back(m.Ping)
    with pytest.raises(DeadlineExceeded):
        ours.call(m.Ping, m.Done, 0.05)
    assert isinstance(ours.call(m.Stats, m.StatsReply), m.StatsReply)
    assert (len(opened), late) == (1, [])
    fake.let_go()
    deadline_s = time.monotonic() + WAIT_S
    while not late:
        assert time.monotonic() < deadline_s
        ours.call(m.Stats, m.StatsReply)
    assert [type(reply) for reply in late] == [m.Done]
    assert not ours.collect_late(), "no reply is outstanding any more"
    assert len(opened) == 1


def test_a_broken_connection_frees_its_place(
    channels: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = channels(2)

    def broken(self: channel.Channel, *arguments: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(channel.Channel, "__init__", broken)
        for _ in range(3):
            with pytest.raises(tiercache.DaemonUnavailable, match="no connection"):
                ours.call(m.Ping, m.Done)
    with monkeypatch.context() as patch:
        patch.setattr(channel.Channel, "send", broken)
        for _ in range(3):
            with pytest.raises(tiercache.DaemonUnavailable, match="connection to the daemon failed"):
                ours.call(m.Ping, m.Done)
    assert ours.call(m.Ping, m.Done)
    assert ours._holders == {}


def test_the_keeper_of_the_session_waits_for_no_other_thread(channels: Callable[..., Channels]) -> None:
    """The keeper has a connection of its own: its pings detect a dead daemon, and its renewals keep leases alive."""
    ours = channels(4)
    held: list[Any] = []
    both = threading.Barrier(2, timeout=WAIT_S)  # a thread may have the number of one that has ended

    def hold() -> None:
        held.append(ours.post(m.Ping, m.Done))
        both.wait()

    assert in_threads(2, hold) == [None, None]
    with pytest.raises(RequestRefused):
        ours.call(m.Ping, m.Done, 0.01)
    ours.attendant = threading.get_ident()
    assert isinstance(ours.call(m.Ping, m.Done), m.Done)
    for pending in held:
        ours.wait(pending)
    assert ours._holders == {}
