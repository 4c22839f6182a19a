"""The lock of a directory: who is refused at once, and whose end is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import state_of, wait_until

from tiercache.daemon.tiers.nvme.disk import lock
from tiercache.daemon.tiers.nvme.disk.lock import LockedBy, take_lock

HOLDER = """
import sys
from pathlib import Path
from tiercache.daemon.tiers.nvme.disk.lock import take_lock
take_lock(Path(sys.argv[1]), int(sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that holds the lock, for a daemon with that pid (0: it is the daemon)."""

    def __init__(self, path: Path, daemon_pid: int) -> None:
        command = [sys.executable, "-c", HOLDER, str(path), str(daemon_pid)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"locked\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 50.0)
    monkeypatch.setattr(lock, "OWN_PATIENCE_S", 50.0)


def refusal(path: Path, daemon_pid: int = 0) -> LockedBy:
    with pytest.raises(LockedBy) as caught:
        take_lock(path, daemon_pid)
    return caught.value


def test_a_daemon_that_runs_is_not_waited_for(tmp_path: Path) -> None:
    holder = Holder(tmp_path, 0)
    try:
        for daemon_pid in (0, os.getpid()):
            problem = refusal(tmp_path, daemon_pid)
            assert (str(problem), problem.ourselves) == (str(holder.process.pid), False)
    finally:
        holder.end()
    os.close(take_lock(tmp_path))


def test_a_holder_that_has_yet_to_write_its_name_is_not_called_another_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two workers of one daemon open one directory, by two paths, at the same moment."""
    holder = Holder(tmp_path, os.getpid())
    name = (tmp_path / "lock").read_text()
    (tmp_path / "lock").write_text("")
    monkeypatch.setattr(lock, "OWN_PATIENCE_S", 0.0)
    monkeypatch.setattr(lock.time, "sleep", lambda _: (tmp_path / "lock").write_text(name))
    try:
        problem = refusal(tmp_path, os.getpid())
        assert (str(problem), problem.ourselves) == (str(os.getpid()), True)
    finally:
        holder.end()


@pytest.mark.parametrize("whose", ["of a daemon that has ended", "of ours"])
def test_the_end_of_a_worker_is_waited_for(tmp_path: Path, ended_pid: int, whose: str) -> None:
    holder = Holder(tmp_path, os.getpid() if whose == "of ours" else ended_pid)
    os.kill(holder.process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(holder.process.pid) == "T", "it to stop")
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(take_lock(tmp_path, os.getpid())))
    thread.start()
    try:
        assert not taken
    finally:
        holder.end()
        thread.join(50)
    assert taken
    assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())
    os.close(taken[0])


@pytest.mark.stress
def test_another_process_with_the_pid_of_the_daemon_is_told_from_it(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, where each daemon has the same pid; or one that got the pid of a daemon that has ended."""
    monkeypatch.setattr(lock, "PATIENCE_S", 0.05)
    monkeypatch.setattr(lock, "OWN_PATIENCE_S", 0.05)
    holder = Holder(tmp_path, sleeper)
    try:
        name = (tmp_path / "lock").read_text()
        assert name.split()[0] == str(sleeper)
        (tmp_path / "lock").write_text(f"{sleeper} 1\n")
        problem = refusal(tmp_path, sleeper)
        assert (str(problem), problem.ourselves, problem.ending) == (str(sleeper), False, True)
        (tmp_path / "lock").write_text(name)
        problem = refusal(tmp_path, sleeper)
        assert problem.ourselves, "by another path"
    finally:
        holder.end()
