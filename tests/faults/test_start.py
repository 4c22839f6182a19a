"""Starts that go wrong: run directories, signals, former lives. One clear line, or no daemon left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_peer import Peer
from fault_processes import Daemon
from waiting import wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress


def test_a_run_dir_that_others_may_write_is_refused(closing: ExitStack) -> None:
    daemon = Daemon("--arena", "4MiB")
    closing.callback(daemon.close)
    Path(daemon.run_dir).chmod(0o777)
    assert daemon.launch().status() == 2
    [line] = daemon.log().splitlines()
    assert "chmod 0700" in line


def test_signals_during_the_start_end_the_daemon(closing: ExitStack) -> None:
    """SIGTERM as soon as there is a socket: status 0, sockets gone, no traceback."""
    daemon = Daemon("--arena", "256MiB", "--region", "8MiB")
    closing.callback(daemon.close)
    daemon.launch()
    wait_until(lambda: (Path(daemon.run_dir) / "lock").exists() and _answers(daemon), "it has begun")
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.log()


def _answers(daemon: Daemon) -> bool:
    try:
        with Peer(daemon.run_dir, map_arena=False):
            return True
    except OSError:
        return False


SPEC = spec_of(64 << 10)


def test_28_requests_of_a_former_life_are_refused(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """A DEALER keeps what was sent to a dead daemon, and brings it to the next one."""
    old, keys = connect(daemon), chain_of("former", 3)
    old.store_chain(SPEC, keys)
    daemon.kill()
    flush = old.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=60)
    match = old.post(m.Match, namespaces=[1], keys=keys, ttl_ms=60_000, deadline_s=60)
    daemon.start()
    new = connect(daemon)
    new.store_chain(SPEC, keys)
    for request_id in (flush, match):
        reply = old.answer_to(request_id, 15)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.STALE_GENERATION.value
        assert reply.generation == new.generation != old.generation
    assert new.load_chain(SPEC, keys) == 3, "the old life's flush did nothing"
    assert daemon.stats()["leases"]["read"] == 0
    stale = new.tell(m.Flush, generation=old.generation, tier="all", namespaces=[], key=b"")
    assert stale.code == m.ErrorCode.STALE_GENERATION.value
    assert new.load_chain(SPEC, keys) == 3


def test_7_a_second_daemon_on_the_same_run_dir_is_refused(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    peer, keys = connect(daemon), chain_of("first", 4)
    peer.store_chain(SPEC, keys)
    for _ in range(2):
        second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
        closing.callback(second.close)
        assert second.launch().status() == 2
        lines = second.log().splitlines()
        assert len(lines) == 1, second.log()
        assert f"pid {daemon.pid}" in lines[0]
        assert "--run-dir" in lines[0]
    assert peer.load_chain(SPEC, keys) == 4
    assert connect(daemon).load_chain(SPEC, keys) == 4, "the sockets are still the first one's"
