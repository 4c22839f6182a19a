"""Settings of a daemon that runs: read again at SIGHUP, changed by hand, and shown."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_client import Client
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.daemon.ground.run_directory import RunDir
from tiercache.errors import ConfigError

FILE = 'region = "2MiB"\nquota = "team-a=1MiB"\nlog_level = "info"\n'


class Running:
    """A daemon with a file of settings."""

    def __init__(self, daemon: tiercache.LaunchedDaemon, file: Path) -> None:
        self.daemon, self.file, self.log = daemon, file, Path(daemon.log)

    def reload(self, text: str) -> str:
        """Write the file and have the daemon read it; returns what the log says of it."""
        before = len(self.log.read_text())
        self.file.write_text(text)
        os.kill(self.daemon.pid, signal.SIGHUP)
        wait_until(lambda: "reloaded" in self.log.read_text()[before:])
        with Client(Path(self.daemon.address), map_arena=False) as client:  # all other lines are logged by now
            client.ask("settings")
        return self.log.read_text()[before:]

    def limits(self) -> dict[str, int]:
        """The limits of the quotas that the daemon knows."""
        with Client(Path(self.daemon.address), map_arena=False) as client:
            return {one["name"]: one["limit_bytes"] for one in client.stats().get("quotas", [])}

    def settings(self) -> dict[str, list[object]]:
        """By key: value, source, whether it can be set, and what a start now would have."""
        with Client(Path(self.daemon.address), map_arena=False) as client:
            return {key: rest for key, *rest in client.ask("settings")[1]}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    file = tmp_path / "settings.toml"
    file.write_text(FILE)
    os.environ["TIERCACHE_CONFIG"] = str(file)
    try:
        with tiercache.launch("8MiB", log=tmp_path / "log") as daemon:
            yield Running(daemon, file)
    finally:
        os.environ.pop("TIERCACHE_CONFIG", None)


def test_a_hangup_has_the_file_read_again(running: Running) -> None:
    said = running.reload(FILE.replace("1MiB", "2MiB").replace("info", "warning").replace('"2MiB"\n', '"4MiB"\n', 1))
    assert running.limits() == {"team-a": 2 << 20}
    assert "that change with a restart only: region" in said
    settings = running.settings()
    assert settings["log_level"] == ['"warning"', str(running.file), True, None]
    assert settings["region"] == ['"2MiB"', str(running.file), False, '"4MiB"']
    assert settings["arena"][:2] == ['"8MiB"', "--arena"]
    assert running.daemon.poll() is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('quota = "team-a"\n', "is not a list of quotas"),
        ('quota = "team-a=3MiB"\nlog_level = "loud"\n', "log_level = loud"),
        ('quota = "team-a=3MiB"\narena_size = "1GiB"\n', "no such setting"),
        ('quota = "team-a=3MiB"\nheadroom = "7MiB"\n', "more than half of arena"),
        ("quota = \n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing(running: Running, text: str, why: str) -> None:
    lines = running.reload(text).splitlines()
    # A daemon that has just begun, or is slow, says more. What it says of the file is one line, as all it says is.
    [said] = [line for line in lines if " INFO " not in line]
    assert "settings were not reloaded, and stay as they were: " in said
    assert why in said
    assert running.limits() == {"team-a": 1 << 20}
    assert running.settings()["log_level"][0] == '"info"'


def test_what_is_set_by_hand_holds_until_a_reload(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--address", running.daemon.address]
    assert main(["set", "quota=team-a=3MiB,team-b=1MiB", *where]) == 0
    assert "until the daemon reloads" in capsys.readouterr().out
    assert running.limits() == {"team-a": 3 << 20, "team-b": 1 << 20}
    assert main(["config", "--running", "--json", *where]) == 0
    quota = json.loads(capsys.readouterr().out)["settings"]["quota"]
    assert (quota["value"], quota["next_start"]) == ("team-a=3MiB,team-b=1MiB", "team-a=1MiB")
    assert quota["source"].startswith("tiercache set")
    assert main(["config", "--running", *where]) == 0
    assert 'a reload or restart makes it "team-a=1MiB"' in capsys.readouterr().out
    assert main(["set", "log_level=debug", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": "log_level", "value": "debug", "note": ""}
    wait_until(lambda: "DEBUG" in running.log.read_text())
    for wrong in ("arena=1GiB", "quotas=1", "log_level=loud", "quota", "quota=x"):
        assert main(["set", wrong, *where]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    running.reload(FILE)
    assert running.limits()["team-a"] == 1 << 20
    assert running.settings()["log_level"][:2] == ['"info"', str(running.file)]


def test_a_run_dir_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user: choose one with --run-dir"):
        RunDir(tmp_path)
