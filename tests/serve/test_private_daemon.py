"""A daemon that dies again and again is started again and again, and then no more."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from server_process import wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.serve import private_daemon
from tiercache.serve.private_daemon import PrivateDaemon

pytestmark = pytest.mark.engine


def test_a_daemon_that_lives_briefly_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_daemon, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(private_daemon, "_MAX_RESTARTS", 2)
    with PrivateDaemon("16MiB") as daemon:
        killed: set[int] = set()

        def gave_up() -> bool:
            with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
                pid = int((Path(daemon.address) / "lock").read_text())
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return "ended 3 times in a row: no cache" in caplog.text

        wait_until(gave_up, "it is given up")
        assert len(killed) == 3
    assert not Path(daemon.address).exists()


def test_a_daemon_that_hangs_is_ended_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("_PING_S", 0.5), ("_MOST_MISSED", 3), ("_FIRST_PAUSE_S", 0.01)):
        monkeypatch.setattr(private_daemon, name, value)
    caplog.set_level("INFO")
    with PrivateDaemon("16MiB") as daemon:
        lock = Path(daemon.address) / "lock"
        hung = int(lock.read_text())
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: "the private daemon is back" in caplog.text, "it is started again", 60)
        assert "has not answered" in caplog.text
        assert int(lock.read_text()) != hung


def test_a_closed_daemon_stays_closed() -> None:
    with tiercache.launch("16MiB") as daemon:
        pass
    with pytest.raises(DaemonUnavailable, match="launch another one"):
        daemon.restart()
