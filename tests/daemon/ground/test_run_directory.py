"""The run directory: what is refused, in one line that says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercache.daemon.ground.run_directory import RunDir, guard
from tiercache.errors import ConfigError


def in_a_circle(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


def for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a circle": (in_a_circle, r"{at} is a symbolic link that leads in a circle \({at}/?.*other\)"),
    "a dangling link": (
        lambda path: path.symlink_to("/nowhere/at/all"),
        r"{at} is a symbolic link that leads to nothing",
    ),
    "a file": (Path.touch, "{at} is not a directory"),
    "a link to a file": (lambda path: path.symlink_to("/etc/passwd"), r"{at} is a symbolic link to a file"),
}


@pytest.mark.parametrize("below", ["", "deep/run"])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_stands_in_its_way_is_named(tmp_path: Path, kind: str, below: str) -> None:
    make, text = STRANGE[kind]
    at = tmp_path / "at"
    make(at)
    with pytest.raises(ConfigError, match=text.format(at=at).replace(f"{at}/?.*other", ".*other")) as caught:
        RunDir(at / below)
    assert "choose one with --run-dir" in str(caught.value)


def test_a_folder_for_all_users_is_not_to_be_changed(tmp_path: Path) -> None:
    for_all(tmp_path / "tmp")
    with pytest.raises(
        ConfigError, match=f"is a folder for all users' files: name one in it, as {tmp_path}/tmp/"
    ) as told:
        RunDir(tmp_path / "tmp")
    assert "chmod" not in str(told.value)


@pytest.mark.parametrize("mode", [0o1700, 0o1750, 0o2700])
def test_mode_bits_that_let_nobody_in_are_left_alone(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    RunDir(tmp_path).close()


@pytest.mark.parametrize("call", ["flock", "chmod"])
def test_a_file_system_without_a_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(*{"flock": (fcntl, "flock"), "chmod": (Path, "chmod")}[call], refuse)
    attempt = (lambda: RunDir(tmp_path)) if call == "flock" else (lambda: guard(tmp_path / "session.sock", None))
    with pytest.raises(ConfigError, match=rf"{call}.*No locks available.*: choose one on a local file system"):
        attempt()


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    for command in (["-m", "tiercache.daemon", "--run-dir"], ["-m", "tiercache.cli.main", "ping", "--address"]):
        ended = subprocess.run([sys.executable, *command, name], capture_output=True, timeout=60, check=False)
        (line,) = ended.stderr.splitlines()
        assert b"is not UTF-8" in line
        assert ended.returncode == 2
    assert not os.path.exists(name)
