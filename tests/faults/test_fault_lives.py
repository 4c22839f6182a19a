"""Faults 7, 15, 28: one life of the daemon and another: stale requests, locks, sockets that were left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_peer import NoAnswer, Peer
from fault_processes import Daemon

from tiercache.config.daemon_config import control_endpoint, session_socket_path
from tiercache.protocol import messages as m

SPEC = spec_of(64 << 10)


def test_28_requests_of_a_former_life_are_refused(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """A DEALER keeps what was sent to a dead daemon, and brings it to the next one."""
    old, keys = connect(daemon), chain_of("former", 3)
    old.store(SPEC, keys)
    daemon.kill()
    flush = old.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=60)
    match = old.post(m.Match, namespaces=[1], keys=keys, ttl_ms=60_000, deadline_s=60)
    daemon.start()
    new = connect(daemon)
    new.store(SPEC, keys)
    for request_id in (flush, match):
        reply, _ = old.answer_to(request_id, 15)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.STALE_GENERATION.value
        assert reply.generation == new.welcome.generation != old.welcome.generation
    assert new.load(SPEC, keys) == 3, "the old life's flush did nothing"
    assert daemon.stats()["leases"]["read"] == 0
    stale = new.ask(m.Flush, generation=old.welcome.generation, tier="all", namespaces=[], key=b"")
    assert stale.code == m.ErrorCode.STALE_GENERATION.value
    assert new.load(SPEC, keys) == 3


def test_28_a_session_of_a_former_life_is_unknown(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    old = connect(daemon)
    daemon.restart()
    new = connect(daemon)
    reply = new.ask(m.Ping, session=old.welcome.session)
    assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value


def test_28_leases_of_a_former_life_are_nothing(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    old, keys = connect(daemon), chain_of("former", 3)
    old.store(SPEC, keys)
    read = old.match(SPEC, keys, ttl_ms=60_000).lease
    write = old.reserve(SPEC, chain_of("more", 2)).lease
    daemon.restart()
    new = connect(daemon, instance=old.instance)
    new.register(SPEC)
    assert not new.ask(m.Release, lease=read).good
    assert new.commit(write, [0, 1]) == [m.CommitState.DROPPED] * 2
    assert list(new.ask(m.Renew, leases=[read, write], ttl_ms=1000).alive) == [0, 0]
    assert new.length(SPEC, keys) == 0


def test_7_a_second_daemon_on_the_same_run_dir_is_refused(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    peer, keys = connect(daemon), chain_of("first", 4)
    peer.store(SPEC, keys)
    for _ in range(2):
        second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
        closing.callback(second.close)
        assert second.launch().wait(20) == 2
        lines = second.log().splitlines()
        assert len(lines) == 1, second.log()
        assert f"pid {daemon.pid}" in lines[0]
        assert "--run-dir" in lines[0]
    assert peer.load(SPEC, keys) == 4
    assert connect(daemon).load(SPEC, keys) == 4, "the sockets are still the first one's"


def test_7_the_lock_of_a_stopped_daemon_is_a_lock(daemon: Daemon, closing: ExitStack) -> None:
    daemon.stop()
    second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
    closing.callback(second.close)
    assert second.launch().wait(20) == 2
    daemon.go_on()
    assert daemon.stats()["daemon"]["pid"] == daemon.pid


def test_15_stale_sockets_are_replaced(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    paths = [session_socket_path(daemon.run_dir), Path(control_endpoint(Path(daemon.run_dir)).removeprefix("ipc://"))]
    daemon.kill()
    assert all(path.is_socket() for path in paths), "kill -9 leaves them"
    daemon.start()
    peer = connect(daemon)
    peer.store(SPEC, chain_of("again", 2))
    assert peer.load(SPEC, chain_of("again", 2)) == 2
    peer.close()
    assert daemon.terminate() == 0
    assert not any(path.exists() for path in paths), "SIGTERM takes them away"


def test_15_a_terminated_daemon_says_good_bye(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer = connect(daemon)
    peer.store(SPEC, chain_of("bye", 2))
    peer.reserve(SPEC, chain_of("open", 2))
    assert daemon.terminate() == 0
    assert peer.is_over()
    with pytest.raises(NoAnswer):
        peer.ask(m.Ping, timeout_s=0.1)
