"""Command lines of tests, and what a refused one says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

COMMAND = [sys.executable, "-m", "tiercache.cli.main"]
DEADLINE_S = 60.0
Run = Callable[..., tuple[int, str, str]]
"""Runs one command line: (exit status, stdout, stderr)."""


def run_process(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command line in a process of its own, without a terminal."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def assert_refused(told: tuple[int, str, str], *words: str, status: int = 2) -> None:
    """One line on stderr with all of these words, nothing on stdout, and the exit status."""
    found, out, err = told
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert err.startswith("tiercache")
    assert [word for word in words if word not in err] == [], err
