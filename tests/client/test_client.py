"""Leases, clocks and launched daemons of a client."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.client.launcher import STOP_TIMEOUT_S, LaunchedDaemon
from tiercache.client.leases import HOLD_AT_MOST_S, Leases
from tiercache.client.session import Session
from tiercache.copies.pool import Limit
from tiercache.errors import DaemonUnavailable, DeadlineExceeded
from tiercache.protocol import messages as m
from tiercache.protocol.messages import Abort, Release, Renewed


class Holder:
    """Something that uses a lease."""


class FakeSession:
    """Records its requests."""

    def __init__(self) -> None:
        self.renewed: list[int] = []
        self.fails = False

    def call(self, request: Any, *, leases: list[int], ttl_ms: int) -> Renewed:
        if self.fails:
            raise DeadlineExceeded("no answer")
        self.renewed += leases
        return Renewed(1, 1, b"\1" * len(leases))


def test_a_lease_is_renewed_at_half_its_time_and_for_ten_minutes_at_most() -> None:
    now_s = [100.0]
    held, session, holder = Leases(lambda: now_s[0]), FakeSession(), Holder()
    held.keep(session, 7, 10_000, holder, writing=False)  # type: ignore[arg-type]
    for elapsed_s, renewals in ((4.0, 0), (1.5, 1), (4.0, 1), (1.5, 2)):
        now_s[0] += elapsed_s
        assert held.until_next_renewal_s() <= 1.0
        held.renew(session)  # type: ignore[arg-type]
        assert session.renewed == [7] * renewals
    session.fails = True  # one whose renewal had no answer is renewed again at once
    now_s[0] += 6.0
    with pytest.raises(DeadlineExceeded):
        held.renew(session)  # type: ignore[arg-type]
    session.fails = False
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7] * 3
    now_s[0] += HOLD_AT_MOST_S
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7] * 3
    assert held.until_next_renewal_s() == 1.0, "no lease is left"


def test_what_is_under_way_is_stopped_and_nothing_else_begins() -> None:
    held, limit = Leases(), Limit()
    with held.operation(limit):
        assert not held.wait_idle(0)
        held.stop()
        assert limit.reached()
    assert held.wait_idle(0)
    with pytest.raises(DaemonUnavailable, match="closed"), held.operation(Limit()):
        pass


def test_errands_go_to_the_daemon_that_granted_the_lease_and_to_no_other() -> None:
    asked: list[tuple[Any, int]] = []
    session = Session.__new__(Session)
    session.generation = 5
    session.welcome = SimpleNamespace(session=b"ours")  # type: ignore[assignment]
    session._channels = SimpleNamespace(collect_late=lambda: False)  # type: ignore[assignment]
    session.call = lambda request, **fields: asked.append((request, fields["lease"]))  # type: ignore
    session._clock_differs = False
    leases_of: Any = deque()
    session._owner = SimpleNamespace(errands=leases_of)  # type: ignore[assignment]
    for lease, (generation, token) in enumerate([(5, b"ours"), (5, b"former"), (4, b"former")]):
        for request in (Release, Abort):
            leases_of.append((generation, token, request, {"lease": lease}))
    assert session.settle() is False
    assert asked == [(Release, 0), (Abort, 0), (Abort, 1)]
    assert not leases_of


def test_a_client_whose_clock_fell_behind_is_served_again() -> None:
    """Deadlines go by the client's clock, and either clock may have stood still for a while."""
    spec = tiercache.NamespaceSpec(engine="clocks/1", layout="x", dtype="uint8", block_size=4, block_bytes=4096)
    keys = tiercache.KeyChain(tiercache.root_key("clocks"), 4, range(12)).packed()
    pool = tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    with (
        tiercache.launch("8MiB", region="2MiB") as daemon,
        tiercache.connect(daemon.address, namespace=spec, pool=pool, required=True) as connector,
    ):
        assert connector.store(keys, range(3)).stored == 3
        session = connector.client.session()
        connector.client.call(m.Ping, clock_us=time.monotonic_ns() // 1000 + 3_600_000_000)  # an hour ahead
        assert connector.match(keys).blocks == 0, "the daemon takes the request for expired"
        wait_until(lambda: connector.match(keys).blocks == 3)
        assert connector.client.session() is session, "only the clock was wrong"
        assert connector.counters["times_down"] == 0
        expired = connector.client.stats()["counters"]["requests_expired"]
        assert 0 < expired < 100, "the client does not ask again and again"


PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("runs", flush=True)
os.read(int(sys.argv[sys.argv.index("--parent-fd") + 1]), 1)  # the end of its parent
print("over", flush=True)
"""
WAIT_S = 30.0


def said(daemon: LaunchedDaemon, text: str, times: int = 1) -> None:
    wait_until(lambda: daemon.log.read_text().count(text) >= times, f"the daemon says {text!r}")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LaunchedDaemon]:
    daemon = LaunchedDaemon(tmp_path, False, tmp_path / "log", [sys.executable, "-c", PROGRAM])
    try:
        said(daemon, "runs")
        yield daemon
    finally:
        daemon.close()


def test_each_life_has_one_pipe(daemon: LaunchedDaemon) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for life in range(2, 4):
        daemon.kill()
        with pytest.raises(DaemonUnavailable, match=r"did not start within 0\.05 s"):
            daemon.restart(timeout_s=0.05)  # rule: this program never answers
        said(daemon, "runs", life)
    assert len(os.listdir("/proc/self/fd")) == files
    daemon.forget_in_child()
    said(daemon, "over")
    daemon.close()
    assert len(os.listdir("/proc/self/fd")) == files - 1
    assert "over" in daemon.log.read_text(), "the daemon ends with the last holder of the pipe"


def test_a_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(DaemonUnavailable, match=r"ended with status 2(.|\n)*arena"):
        tiercache.launch("a lot")


def test_a_private_directory_is_removed() -> None:
    with tiercache.launch("4MiB", region="2MiB") as daemon:
        assert Path(daemon.address).stat().st_mode & 0o777 == 0o700
        assert daemon.poll() is None
    assert daemon.poll() == 0
    assert not Path(daemon.address).exists()


def test_a_closed_one_does_not_come_back(daemon: LaunchedDaemon) -> None:
    daemon.close()
    daemon.close()
    with pytest.raises(DaemonUnavailable, match="closed"):
        daemon.restart()


@pytest.mark.parametrize(
    ("settings", "environment", "grace_s"),
    [({}, {}, 20), ({"grace": "70s"}, {"TIERCACHE_GRACE": "80s"}, 70), ({}, {"TIERCACHE_GRACE": "80s"}, 80)],
)
def test_close_waits_as_long_as_the_daemon_may_write(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], environment: dict[str, str], grace_s: float
) -> None:
    """Else a slow disk costs blocks for which the daemon still had time."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    daemon = tiercache.launch("4MiB", **settings)  # type: ignore[arg-type]
    wait, waited_s = daemon._process.wait, list[float]()

    def noted(timeout_s: float) -> int:
        waited_s.append(timeout_s)
        return wait(timeout_s)

    monkeypatch.setattr(daemon._process, "wait", noted)
    daemon.close()
    assert waited_s == [grace_s + STOP_TIMEOUT_S]
    assert daemon.poll() == 0, daemon.log
