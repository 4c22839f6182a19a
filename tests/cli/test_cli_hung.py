"""A daemon that does not answer: every command names its process and says that it still runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiercache
from tiercache.cli import connection
from tiercache.cli.exit_status import EXIT_NO_ANSWER, EXIT_UNWELL
from tiercache.cli.main import main


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("4MiB", region="2MiB", log=tmp_path_factory.mktemp("hung") / "log") as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        yield daemon
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_DEADLINE_S", 0.2)
    monkeypatch.setattr(connection, "REQUEST_S", 0.2)


@pytest.mark.parametrize("command", [["ping"], ["stats"], ["ls"], ["flush", "--yes"], ["unpin", "--all"], ["check"]])
def test_it_is_named(stopped: tiercache.LaunchedDaemon, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = main([*command, "--address", stopped.address])
    said = capsys.readouterr().err
    assert f"(pid {stopped.pid}) does not answer: it was stopped (SIGSTOP): let it go on with kill -CONT" in said
    assert (status, said.count("\n")) == (EXIT_NO_ANSWER, 1)


def test_a_process_of_its_own_has_the_same_status(stopped: tiercache.LaunchedDaemon) -> None:
    code = "from tiercache.cli import connection; connection.CONNECT_DEADLINE_S = connection.REQUEST_S = 0.2"
    code += "; import runpy; runpy.run_module('tiercache.cli.main', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "ping", "--address", stopped.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (EXIT_NO_ANSWER, "")
    assert "does not answer" in ended.stderr


def test_a_check_of_the_default_daemon_does_not_take_it_for_none(
    stopped: tiercache.LaunchedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERCACHE_RUN_DIR", stopped.address)
    assert main(["check"]) == EXIT_NO_ANSWER
    assert f"(pid {stopped.pid}) does not answer" in capsys.readouterr().err


def test_programs_are_told_its_pid(stopped: tiercache.LaunchedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "--json", "--address", stopped.address]) == EXIT_NO_ANSWER
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["pid"]) == (False, stopped.pid)


def test_leftover_files_are_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even where a killed daemon has left its files behind."""
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    (tmp_path / "session.sock").touch()
    assert connection.serving_pid(tmp_path) is None
    assert main(["ping", "--address", str(tmp_path)]) == EXIT_UNWELL
    assert "does not answer" not in capsys.readouterr().err
