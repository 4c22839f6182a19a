"""The thread that watches the HTTP process: with children that are not servers, so that each way to end is one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.observe import http_process
from tiercache.daemon.observe.http_process import HttpProcess

DEADLINE_S = 30.0


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[HttpProcess]:
    config = DaemonConfig(run_dir=tmp_path / "run", http="127.0.0.1:0", http_hosts="a.internal,b.internal")
    process = HttpProcess(config)
    yield process
    process._socket.close()


def child(script: str) -> list[str]:
    """A command to which further arguments can be added."""
    return ["sh", "-c", script, "sh"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_end_is_said_and_leaves_no_descriptor(watched: HttpProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    watched.problem = "it was so before"
    watched._command = child("exit 3")
    assert watched._live() == ("ended with status 3", False)
    watched._command = ["/nonexistent/python"]
    assert watched._live() == ("could not be started (pipe, fork, setsid or exec: No such file or directory)", False)
    assert watched.problem
    monkeypatch.setattr(http_process, "STEADY_S", 0.0)
    watched._command = child("sleep 0.1; exit 4")
    assert watched._live() == ("ended with status 4", True)
    assert watched.problem == "", "the process had run well for a while"
    assert descriptors() == before


def test_a_child_that_does_not_end_is_killed_and_none_comes_after_it(
    watched: HttpProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_process, "STOP_S", 0.2)
    said, says = os.pipe()
    watched._command = child(f"trap '' TERM; echo > /dev/fd/{says}; while :; do sleep 0.01; done")
    os.set_inheritable(says, True)
    monkeypatch.setattr(http_process.subprocess, "Popen", _popen_with(says))
    watched.start()
    assert os.read(said, 1)
    monkeypatch.setattr(http_process, "STOP_S", DEADLINE_S / 10)
    watched.stop()
    watched._thread.join(DEADLINE_S)
    assert watched._child is not None
    assert watched._child.poll() is not None
    assert watched._socket.fileno() == -1
    assert watched._live() == ("was not wanted any more", False)
    for fd in (said, says):
        os.close(fd)


def _popen_with(fd: int) -> Any:
    """`Popen` that hands a further descriptor on."""
    popen = http_process.subprocess.Popen

    def start(command: list[str], pass_fds: list[int], **named: Any) -> Any:
        return popen(command, pass_fds=[*pass_fds, fd], **named)

    return start
