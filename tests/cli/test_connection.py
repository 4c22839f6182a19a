"""A daemon that does not answer: every command names its process and says that it still runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run, assert_refused

import tiercache
from tiercache.cli import connection
from tiercache.cli.exit_status import EXIT_NO_ANSWER, EXIT_UNWELL
from tiercache.protocol import messages


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("4MiB", region="2MiB", log=tmp_path_factory.mktemp("hung") / "log") as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        yield daemon
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_DEADLINE_S", 0.2)
    monkeypatch.setattr(connection, "REQUEST_S", 0.2)


@pytest.mark.stress
@pytest.mark.usefixtures("impatient")
class TestStopped:
    @pytest.mark.parametrize("command", ["ping", "stats", "ls", "flush --yes", "unpin --all", "check"])
    def test_it_is_named(self, stopped: tiercache.LaunchedDaemon, command: str, run: Run) -> None:
        why = f"(pid {stopped.pid}) does not answer: it was stopped (SIGSTOP): let it go on with kill -CONT"
        assert_refused(run(*command.split(), "--address", stopped.address), why, status=EXIT_NO_ANSWER)

    def test_programs_are_told_its_pid(self, stopped: tiercache.LaunchedDaemon, run: Run) -> None:
        status, out, _ = run("ping", "--json", "--address", stopped.address)
        told = json.loads(out)
        assert (status, told["ok"], told["pid"]) == (EXIT_NO_ANSWER, False, stopped.pid)


class Later(messages.Request[messages.Done], tag="of a later release"):
    key: str = ""
    value: str = ""


@pytest.mark.parametrize(
    ("kind", "command"), [("Settings", ["config", "--running"]), ("ChangeSetting", ["set", "log_level=debug"])]
)
def test_a_daemon_that_does_not_know_a_request_is_of_another_release(
    daemon: Path, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str, command: list[str]
) -> None:
    monkeypatch.setattr(messages, kind, Later)
    what, own = f"the daemon at {daemon} does not know this request: it is of", tiercache.__version__
    for its, release in (("0.0.9", f"release {own}, this command of 0.0.9"), (own, f"another build of release {own}")):
        monkeypatch.setattr(connection, "__version__", its)
        assert_refused(run(*command, "--address", daemon), f"{what} {release}; restart it", status=EXIT_UNWELL)


def test_the_files_of_a_killed_daemon_are_no_daemon(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_DEADLINE_S", 0.01)
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    (tmp_path / "session.sock").touch()
    assert connection.serving_pid(tmp_path) is None
    status, _, err = run("ping", "--address", tmp_path)
    assert (status, "does not answer" in err) == (EXIT_UNWELL, False)


def test_a_seccomp_profile_that_refuses_a_question_bars_nobody(
    daemon: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # EPERM, which Python takes for a no
    assert run("ping", "--address", daemon)[0] == 0
    assert "may not be entered" not in run("doctor", "--quick", "--address", daemon)[1]
    assert_refused(run("ping", "--address", tmp_path), f"no daemon at {tmp_path}: start", status=EXIT_UNWELL)
