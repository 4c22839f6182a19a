"""A daemon that keeps dying is restarted a few times, and then no more."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from waiting import wait_until

from tiercache.serve import private_daemon
from tiercache.serve.private_daemon import PrivateDaemon

pytestmark = pytest.mark.engine


@pytest.mark.stress
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

        wait_until(gave_up, "the server gives the daemon up")
        assert len(killed) == 3
    assert not Path(daemon.address).exists()


class _Lives:
    """A daemon and a clock: each life of the daemon has a length and an answer to each ping."""

    def __init__(self, lives_s: list[float], answers: list[bool] | None = None) -> None:
        self.now_s = 0.0
        self.lives_s = lives_s
        self.said = answers
        self.killed_s: list[float] = []
        self.pauses_s: list[float] = []
        self.log = "its log"
        self._end_s = lives_s.pop(0)

    def monotonic(self) -> float:
        return self.now_s

    def poll(self) -> int | None:
        return None if self.now_s < self._end_s else 9

    def answers(self, timeout_s: float) -> bool:
        return self.said.pop(0) if self.said else True

    def kill(self) -> None:
        self.killed_s.append(self.now_s)
        self._end_s = self.now_s

    def restart(self) -> None:
        self._end_s = self.now_s + self.lives_s.pop(0)

    def wait(self, seconds: float) -> bool:
        """Until the server ends, which it does with the last life."""
        self.now_s += seconds
        if self.poll() is not None and seconds != private_daemon._POLL_S:
            self.pauses_s.append(seconds)
        return self.is_set()

    def is_set(self) -> bool:
        return not self.lives_s and self.poll() is not None

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = PrivateDaemon.__new__(PrivateDaemon)
        monkeypatch.setattr(private_daemon, "time", self)
        watched._daemon = watched._ending = self  # type: ignore[assignment]
        watched._watch()


def test_pauses_grow_with_short_lives_in_a_row_and_a_long_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_daemon, "_MAX_RESTARTS", 2)
    lives = _Lives([1, 1, 100, 1, 1, 1, 1])
    lives.watch(monkeypatch)
    assert lives.pauses_s == [0.5, 1, 0.5, 1]
    assert "ended 3 times in a row: no cache" in caplog.text
    assert lives.lives_s == [1, 1], "the daemon was not started again"


def test_only_pings_that_are_missed_in_a_row_and_in_one_life_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False] * 5 + [True] + [False] * 5 + [True] + [False] * 6  # and then begins another life
    lives = _Lives([1000, 1000, 1], [*answers, False, *[True] * 1000])
    lives.watch(monkeypatch)
    assert len(lives.killed_s) == 1
    assert lives.said is not None
    assert len(lives.said) < 1000, "the second life was asked too"
