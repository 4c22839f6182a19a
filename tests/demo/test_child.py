"""The processes of the demo: they start, or say why not, and end with the demo however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import state_of, wait_until

from tiercache.demo import child as demo_child
from tiercache.demo import valkey
from tiercache.demo.child import Child, ChildFailed
from tiercache.demo.valkey import ValkeyProcess
from tiercache.errors import ConfigError


def test_a_child_may_finish_at_the_end_and_is_killed_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patient.py").write_text(
        "import sys, pathlib\nprint('ready', flush=True)\nsys.stdin.read()\npathlib.Path(sys.argv[1]).touch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(demo_child, "STOP_TIMEOUT_S", 60.0)
    with Child("patient", str(tmp_path / "finished")) as child:
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == "ready\n"
    assert child.process.returncode == 0
    assert (tmp_path / "finished").exists()
    child = Child("patient", str(tmp_path / "killed"))
    with pytest.raises(ChildFailed), child:
        raise ChildFailed("something else went wrong")
    assert child.process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_while_a_child_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupted(*arguments: object, **options: object) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), demo_child.none_left():
        Child("json.tool")
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    for pipe in (started[0].stdin, started[0].stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("#!/bin/sh\necho no memory for this\nexit 1\n", "no memory for this"),
        ("\x7fELF", "/valkey-server cannot be run"),
    ],
    ids=["it ends", "of another machine"],
)
def test_a_store_that_does_not_start_says_why(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a relative path, as PATH may have it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").write_text(program)
    (tmp_path / "bin" / "valkey-server").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    with pytest.raises(ChildFailed, match=rf"did not start:\n  .*{words}"):
        ValkeyProcess(tmp_path, 1 << 24)


def test_a_store_has_a_password_that_others_cannot_see_and_ends_with_its_parent(tmp_path: Path) -> None:
    try:
        valkey.server_program()
    except ConfigError as error:
        pytest.skip(str(error))
    script = (
        "import sys, signal; from pathlib import Path; from tiercache.demo.valkey import ValkeyProcess\n"
        "store = ValkeyProcess(Path(sys.argv[1]), 1 << 24)\n"
        "print(store.process.pid, store.url, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        password = url.split(":")[2].partition("@")[0]
        assert password not in Path(f"/proc/{pid}/cmdline").read_text()
        assert (tmp_path / "valkey.conf").stat().st_mode & 0o077 == 0
        parent.kill()
    wait_until(lambda: state_of(pid) in ("", "Z"), "the store has ended")
