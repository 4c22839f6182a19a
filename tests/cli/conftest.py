"""Runs command lines, in this process, against daemons that may be slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run

import tiercache
from tiercache.cli import connection
from tiercache.cli.main import main

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of this process wait; the defaults of a few seconds are short on a busy machine."""
    monkeypatch.setattr(connection, "REQUEST_S", PATIENCE_S)
    monkeypatch.setattr(connection, "CONNECT_DEADLINE_S", PATIENCE_S)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process: (exit status, stdout, stderr)."""

    def run_one(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run_one


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a daemon that holds nothing, with an arena of 64 MiB."""
    run_dir = tmp_path_factory.mktemp("run")
    with tiercache.launch("64MiB", region="8MiB", lock_memory="off", run_dir=run_dir):
        yield run_dir
