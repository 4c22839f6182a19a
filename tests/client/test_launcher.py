"""The process of a launched daemon: its session, its pipe and its end. A small program stands in for the daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import tiercache
from tiercache.client.launcher import STOP_TIMEOUT_S, LaunchedDaemon
from tiercache.errors import DaemonUnavailable

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
