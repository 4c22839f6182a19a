"""Leases, clocks, mappings and launched daemons of a client."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.client import mapping as module
from tiercache.client.launcher import STOP_TIMEOUT_S, LaunchedDaemon
from tiercache.client.leases import HOLD_AT_MOST_S, Leases
from tiercache.client.mapping import FEW, ArenaMapping
from tiercache.client.session import Session
from tiercache.copies.arena import Region, create_region
from tiercache.copies.pool import Limit
from tiercache.errors import ArenaError, DaemonUnavailable, DeadlineExceeded, ProtocolError
from tiercache.protocol import messages as m
from tiercache.protocol.messages import REGION_SHIFT, Abort, Release, Renewed


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


# --- addresses of frames: none outside its region, however many are looked up at once ----------------


WAIT_S = 60


@pytest.mark.parametrize("count", [1, FEW, 4 * FEW])
def test_no_frame_outside_its_region_has_an_address(count: int) -> None:
    mapping = ArenaMapping(lambda registration: None)
    fd = create_region(1 << 20, "test")
    try:
        mapping.add([(0, 1 << 20)], [fd])
        frames = np.arange(count, dtype=np.uint64) * 4096
        found = mapping.addresses(frames.tobytes(), 4096, 60.0)
        assert (found - found[0]).tolist() == frames.tolist()
        frames[-1] = (1 << 20) - 4096
        assert mapping.addresses(frames.tobytes(), 4096, 60.0)[-1] == found[0] + (1 << 20) - 4096
        for bad in ((1 << 20) - 4095, 1 << 20, 1 << 40):
            frames[-1] = bad
            with pytest.raises(ProtocolError, match="not inside its region"):
                mapping.addresses(frames.tobytes(), 4096, 60.0)
    finally:
        os.close(fd)
        mapping.end()


@contextmanager
def region(size_bytes: int = 1 << 20) -> Iterator[int]:
    fd = create_region(size_bytes, "test")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Regions that are unmapped. Their addresses say nothing: another thread may get them at once."""
    found: list[int] = []
    unmap = Region.unmap

    def note(self: Region) -> None:
        found.append(self.region_id)
        unmap(self)

    monkeypatch.setattr(Region, "unmap", note)
    return found


def packed(region_id: int) -> bytes:
    return (region_id << REGION_SHIFT).to_bytes(8, "little")


def test_a_region_is_mapped_once_and_its_number_is_bounded() -> None:
    mapping = ArenaMapping(lambda registration: None)
    try:
        with region() as fd:
            mapping.add([(3, 1 << 20)], [fd])
            address = mapping.addresses(packed(3), 4096, 60.0)
            for bad in (3, -1, 1 << (64 - REGION_SHIFT)):
                with pytest.raises(ProtocolError, match="out of range or was sent twice"):
                    mapping.add([(bad, 1 << 20)], [fd])
            with pytest.raises(ProtocolError, match="2 regions came with 1 descriptors"):
                mapping.add([(4, 1 << 20), (5, 1 << 20)], [fd])
        assert mapping.addresses(packed(3), 4096, 60.0) == address
    finally:
        mapping.end()


def test_a_thread_that_waits_for_a_region_learns_that_none_will_come() -> None:
    mapping = ArenaMapping(lambda registration: None)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            mapping.addresses(packed(7) * FEW, 4096, WAIT_S)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mapping.end()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [DeadlineExceeded]


def test_the_mapping_goes_with_the_last_copy(unmapped: list[int]) -> None:
    ready = threading.Event()
    mapping = ArenaMapping(lambda registration: ready.set())
    with region() as fd:
        mapping.add([(0, 1 << 20)], [fd])
        address = int(mapping.addresses(packed(0), 4096, 60.0)[0])
        assert ready.wait(WAIT_S), "the thread that touches all pages is a user, too"
        for _ in range(2):
            assert mapping.begin_copy()
        mapping.end()
        assert not mapping.begin_copy()
        mapping.end_copy()
        assert unmapped == []
        ctypes.memset(address, 7, 1 << 20)
        mapping.end_copy()
        assert unmapped == [0]
        mapping.add([(1, 1 << 20)], [fd])
        with pytest.raises(DeadlineExceeded):
            mapping.addresses(packed(1), 4096, 60.0)


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_driver_keeps_stays_mapped(monkeypatch: pytest.MonkeyPatch, unmapped: list[int], kept: bool) -> None:
    """Else the addresses would be mapped anew for something else, and the GPU could still write there."""

    class Driver:
        def register(self, address: int, size_bytes: int) -> None:
            pass

        def unregister(self, address: int) -> None:
            if kept:
                raise ArenaError("as the test wants it")

    monkeypatch.setattr(module, "process_memory", Driver())
    ready = threading.Event()
    mapping = ArenaMapping(lambda registration: ready.set(), cuda=True)
    with region() as fd:
        mapping.add([(0, 1 << 20)], [fd])
        assert ready.wait(WAIT_S)
        assert mapping.registration == "cuda"
        mapping.end()
    assert unmapped == ([] if kept else [0])


def test_memory_that_could_shrink_or_is_of_another_size_is_not_mapped() -> None:
    """A file that shrinks under a copy kills the process."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 20)
        with pytest.raises(ArenaError, match="not 1048576 and sealed"):
            Region(0, fd, 1 << 20)
        fcntl.fcntl(fd, 1033, fcntl.F_SEAL_SHRINK if hasattr(fcntl, "F_SEAL_SHRINK") else 2)
        with pytest.raises(ArenaError, match="and sealed"):
            Region(0, fd, 1 << 20)
    finally:
        os.close(fd)
    with region() as sealed, pytest.raises(ArenaError, match="1048576 bytes with seals"):
        Region(0, sealed, 1 << 21)
    with open("/dev/null", "rb") as file, pytest.raises(ArenaError, match="not a memory file"):
        Region(0, file.fileno(), 0)
