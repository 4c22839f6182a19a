"""The small parts: clocks, slices, peers, mounts, regions, the run directory, long messages, and the log of health."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from waiting import wait_until

import tiercache
from tiercache.daemon.ground import connections, mounts, regions, slices
from tiercache.daemon.ground.clock import STALL_S, LeaseClock
from tiercache.daemon.ground.connections import HANDSHAKE_MS, Connections
from tiercache.daemon.ground.health_log import HealthLog
from tiercache.daemon.ground.multipart import SKIPPED_AT_ONCE, Multipart
from tiercache.daemon.ground.regions import RegionMaker
from tiercache.daemon.ground.run_directory import RunDir, guard
from tiercache.daemon.ground.slices import CpuLimit
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.daemon.tiers.nvme.worker.opening import Plan, open_directory
from tiercache.errors import ConfigError, DirectoryUnavailable

# --- lease time stands still while the daemon does ---------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[0])
    return times


def test_time_in_which_the_loop_runs_counts(now: list[float]) -> None:
    clock = LeaseClock()
    start_s = clock()
    for _ in range(100):
        now[0] += STALL_S / 2
        assert clock.observe() == now[0]
    assert clock() - start_s == pytest.approx(50 * STALL_S)
    assert clock.stalls == 0


def test_a_gap_does_not_count(now: list[float]) -> None:
    clock = LeaseClock()
    start_s = clock()
    now[0] += 5
    assert clock() == start_s, "lease time is that of the last `observe`"
    clock.observe()
    assert clock() == start_s
    now[0] += 0.01
    clock.observe()
    assert clock() - start_s == pytest.approx(0.01)
    assert clock.stalls == 1


# --- a slice ends after so much CPU time of its thread -----------------------------------------------


class Clocks:
    """Of the wall, and of a thread that gets every fourth nanosecond."""

    def __init__(self) -> None:
        self.wall_ns = 1000
        self.asked = 0

    def perf_counter_ns(self) -> int:
        return self.wall_ns

    def thread_time_ns(self) -> int:
        self.asked += 1
        return 50 + self.wall_ns // 4


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    its = Clocks()
    clock = SimpleNamespace(perf_counter_ns=its.perf_counter_ns, thread_time_ns=its.thread_time_ns)
    monkeypatch.setattr(slices, "time", clock)
    return its


def test_it_runs_out_by_the_clock_of_the_thread_which_it_asks_rarely(clocks: Clocks) -> None:
    limit = CpuLimit(1000)
    while not limit.over:
        clocks.wall_ns += 4
    assert clocks.wall_ns == 5000
    assert clocks.asked < 40
    assert limit.over


# --- which of too many peers has to go, by what ZeroMQ tells of their coming and going ---------------


FIRST = 1 << 20
"""Numbers of files that this process does not have: to shut one down does nothing."""
CAME, LEFT = zmq.EVENT_ACCEPTED, zmq.EVENT_CLOSED


class Told:
    """At most three connections, and a pipe whose events are said here."""

    def __init__(self, socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.events: list[tuple[int, int]] = []
        self.refused: list[int] = []
        self.ours = Connections(socket, 3)
        self._pipe = self.ours._monitor
        monkeypatch.setattr(connections.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(connections.os, "dup", self._dup)

    def getsockopt(self, option: int) -> int:
        return int(zmq.POLLIN) if self.events else 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        event, number = self.events.pop(0)
        return [struct.pack("=hi", event, FIRST + number), b"endpoint"]

    def _dup(self, fd: int) -> int:
        self.refused.append(fd - FIRST)
        raise OSError("gone")

    def say(self, *events: tuple[int, int]) -> None:
        """Let it see these events, and none after them."""
        self.events += events
        self.ours._monitor = self  # type: ignore[assignment]
        try:
            assert not self.ours.look()
        finally:
            self.ours._monitor = self._pipe

    def heard(self, number: int) -> None:
        self.ours.heard(SimpleNamespace(get=lambda option: FIRST + number))  # type: ignore[arg-type]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        told = Told(socket, monkeypatch)
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == HANDSHAKE_MS, "else a silent peer would stay"
        yield told
        told.ours.close()


def test_the_oldest_that_may_not_have_shaken_hands_goes(told: Told) -> None:
    told.say(*((CAME, number) for number in range(5)))
    assert told.refused == [0, 1]
    assert told.ours.refused == 2
    assert told.ours.count == 3


def test_one_that_lives_for_longer_than_a_handshake_stays(told: Told) -> None:
    told.say((CAME, 0))
    told.now_s = HANDSHAKE_MS / 1000 + 1
    told.say((CAME, 1), (CAME, 2), (CAME, 3))
    assert told.refused == [1]


def test_what_was_heard_says_nothing_of_a_later_peer_with_that_number(told: Told) -> None:
    told.heard(0)
    told.say((CAME, 0))
    told.say((LEFT, 0), (CAME, 0))
    told.say((CAME, 1), (CAME, 2), (CAME, 3))
    assert told.refused == [0]


def test_the_newest_goes_where_all_others_have_shaken_hands(told: Told) -> None:
    for number in range(3):
        told.heard(number)
    told.say(*((CAME, number) for number in range(4)))
    assert told.refused == [3]


def test_those_that_leave_take_no_place(told: Told) -> None:
    told.say(*((CAME, number) for number in range(4)))
    assert told.refused == [0], "which ZeroMQ has not closed yet"
    told.say((LEFT, 1), (CAME, 4))
    assert told.refused == [0]
    told.say((LEFT, 0), (CAME, 5))
    assert told.refused == [0, 2]


# --- directories on file systems that are not mounted, or that others are mounted over ---------------


MIB = 1 << 20


def plan(path: Path, **more: Any) -> Plan:
    return Plan(path, 32 * MIB, 4 * MIB, **more)


def test_a_mount_point_of_fstab_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "my disk"
    place.mkdir()
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# disks\n/dev/x {str(place).replace(' ', chr(92) + '040')} xfs defaults 0 0\nshort\n")
    monkeypatch.setattr(mounts, "FSTAB", fstab)
    with pytest.raises(DirectoryUnavailable, match=f"nothing is mounted at {place}, as /etc/fstab says: mount it"):
        open_directory(plan(place / "kv"), DiskIO(), lambda *args: None)
    assert list(place.iterdir()) == []
    monkeypatch.setattr(mounts, "_mounted", lambda path: path == place)
    mounts.check_mounted(place / "kv", needed=False)
    mounts.check_mounted(tmp_path / "other", needed=False)


def test_a_disk_of_its_own_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "mount_point_of", lambda path: Path("/"))
    with pytest.raises(DirectoryUnavailable, match="it is on the file system of /, and nvme_require_mount is set"):
        open_directory(plan(tmp_path / "kv", require_mount=True), DiskIO(), lambda *args: None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(mounts, "mount_point_of", lambda path: Path("/mnt"))
    mounts.check_mounted(tmp_path / "kv", needed=True)


def test_a_message_of_too_many_parts_is_skipped_in_slices() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, context.socket(zmq.DEALER) as sender:
        socket.bind("inproc://here")
        sender.connect("inproc://here")
        messages, slices = Multipart(socket, 3), 0

        def received() -> list[bytes]:
            nonlocal slices
            try:
                message = messages.receive()
            except zmq.Again:
                return []
            slices += not message
            return [part.bytes for part in message[1:]]

        for count in (1, 2):
            sender.send_multipart([b"x"] * count)
            assert wait_until(received) == [b"x"] * count
        assert slices == 0
        sender.send_multipart([b"x"] * (3 * SKIPPED_AT_ONCE))
        sender.send(b"later")
        assert wait_until(received) == [b"later"]
        assert slices == 4, "the first parts, and three slices"


def test_the_daemon_ends_if_the_thread_of_the_arena_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it all stores would be dropped, and nothing would say why."""

    def fail(size_bytes: int, name: str) -> int:
        raise ValueError("a surprise")

    monkeypatch.setattr(regions, "create_region", fail)
    ended: list[str] = []
    maker = RegionMaker(4 << 20, 2 << 20, "off", lambda region, fd: pytest.fail("no region was made"), ended.append)
    maker.start()
    maker.join(60)
    assert ended == ["the arena cannot be made: ValueError: a surprise"]


def test_each_cause_is_told_once_and_so_is_the_end_of_all(caplog: pytest.LogCaptureFixture) -> None:
    its = HealthLog()
    disks = ["/mnt/nvme0: it has hung for {} s", "/mnt/nvme1: it has hung for {} s"]
    with caplog.at_level(logging.INFO):
        for second in range(10, 20):
            its.look([reason.format(second) for reason in disks], second)
        its.look([disks[1].format(20)], 20)
        its.look([], 25)
    assert caplog.messages == [
        "health: degraded: /mnt/nvme0: it has hung for 10 s",
        "health: degraded: /mnt/nvme1: it has hung for 10 s",
        "health: ok again, after 15 s",
    ]


# --- the run directory: what is refused, in one line that says what to do ----------------------------


def in_a_circle(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


def for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a circle": (in_a_circle, r"{at} is a symbolic link that leads in a circle \({at}/?.*other\)"),
    "a dangling link": (
        lambda path: path.symlink_to("/nowhere/at/all"),
        r"{at} is a symbolic link that leads to nothing",
    ),
    "a file": (Path.touch, "{at} is not a directory"),
    "a link to a file": (lambda path: path.symlink_to("/etc/passwd"), r"{at} is a symbolic link to a file"),
}


@pytest.mark.parametrize("below", ["", "deep/run"])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_stands_in_its_way_is_named(tmp_path: Path, kind: str, below: str) -> None:
    make, text = STRANGE[kind]
    at = tmp_path / "at"
    make(at)
    with pytest.raises(ConfigError, match=text.format(at=at).replace(f"{at}/?.*other", ".*other")) as caught:
        RunDir(at / below)
    assert "choose one with --run-dir" in str(caught.value)


def test_a_folder_for_all_users_is_not_to_be_changed(tmp_path: Path) -> None:
    for_all(tmp_path / "tmp")
    with pytest.raises(
        ConfigError, match=f"is a folder for all users' files: name one in it, as {tmp_path}/tmp/"
    ) as told:
        RunDir(tmp_path / "tmp")
    assert "chmod" not in str(told.value)


@pytest.mark.parametrize("mode", [0o1700, 0o1750, 0o2700])
def test_mode_bits_that_let_nobody_in_are_left_alone(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    RunDir(tmp_path).close()


@pytest.mark.parametrize("call", ["flock", "chmod"])
def test_a_file_system_without_a_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(*{"flock": (fcntl, "flock"), "chmod": (Path, "chmod")}[call], refuse)
    attempt = (lambda: RunDir(tmp_path)) if call == "flock" else (lambda: guard(tmp_path / "session.sock", None))
    with pytest.raises(ConfigError, match=rf"{call}.*No locks available.*: choose one on a local file system"):
        attempt()


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    for command in (["-m", "tiercache.daemon", "--run-dir"], ["-m", "tiercache.cli.main", "ping", "--address"]):
        ended = subprocess.run([sys.executable, *command, name], capture_output=True, timeout=60, check=False)
        (line,) = ended.stderr.splitlines()
        assert b"is not UTF-8" in line
        assert ended.returncode == 2
    assert not os.path.exists(name)


# --- core dumps: none where there is a key, and never one that contains the arena --------------------


LEAVE_NONE = """
import logging, resource, sys
from pathlib import Path
from tiercache.daemon.ground import core_dumps
logging.basicConfig()
core_dumps.CORE_PATTERN = Path(sys.argv[2])
def refuse(*limits):
    raise ValueError("not allowed to raise maximum limit")
if sys.argv[1] == "none":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit = refuse  # as for all but root
core_dumps.leave_none()
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""


def core_limits(pid: int | str) -> list[str]:
    """Soft and hard limit, as the kernel writes them."""
    (line,) = [one for one in Path(f"/proc/{pid}/limits").read_text().splitlines() if one.startswith("Max core file")]
    return line.split()[4:6]


def flags_of_regions(pid: int | str) -> list[list[str]]:
    """VmFlags of each mapping of the arena."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    return [one.rpartition("VmFlags:")[2].split() for one in mappings if "/memfd:tiercache-" in one]


def children_of(pid: int) -> list[str]:
    return [child for one in Path(f"/proc/{pid}/task").iterdir() for child in (one / "children").read_text().split()]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_daemon_with_a_key_leaves_none_and_neither_do_its_processes(tmp_path: Path, encrypted: bool) -> None:
    key, nvme = tmp_path / "key", tmp_path / "nvme"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    nvme.mkdir(mode=0o700)
    settings = {"nvme_key": str(key)} if encrypted else {}
    with tiercache.launch(
        "8MiB", region="2MiB", nvme=str(nvme), nvme_size="64MiB", nvme_segment="2MiB", nvme_workers="on", **settings
    ) as daemon:
        (worker,) = wait_until(lambda: children_of(daemon.pid), "the worker process")
        for pid in (str(daemon.pid), worker):
            wait_until(lambda pid=pid: len(flags_of_regions(pid)) == 4, f"the arena in process {pid}")
            assert all("dd" in flags for flags in flags_of_regions(pid)), "dd: do not include in core dumps"
        limits = core_limits(daemon.pid), core_limits(worker)
    assert limits == (["1", "1"], ["1", "1"]) if encrypted else limits[0] == core_limits("self")


@pytest.mark.parametrize(
    ("before", "pattern", "after", "warned"),
    [
        ("any", "|/usr/lib/handler", "1 1", False),
        ("none", "|/usr/lib/handler", "0 0", True),
        ("none", "core", "0 0", False),
        ("none", "", "0 0", True),
    ],
)
def test_a_limit_that_cannot_be_raised_is_told_where_it_matters(
    tmp_path: Path, before: str, pattern: str, after: str, warned: bool
) -> None:
    if before == "any" and resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("a limit of 0 bytes already")
    if pattern:  # else a sandbox hides it
        (tmp_path / "pattern").write_text(pattern)
    command = [sys.executable, "-c", LEAVE_NONE, before, str(tmp_path / "pattern")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == after
    assert ("kernel.core_pattern" in done.stderr) == warned
