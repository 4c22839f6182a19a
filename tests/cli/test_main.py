"""The command line without a daemon: exit statuses, one-line errors, and outputs that cannot be written."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, DEADLINE_S, Run, assert_refused, run_process

from tiercache.config.daemon_config import load_config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], ["bogus", "--help"]),
        (["statz"], ["No such command 'statz'. Did you mean 'stats'?"]),
        (["stats", "--bogus"], ["--bogus"]),
        (["stats", "--watch", "soon"], ["soon", "SECONDS"]),
        (["stats", "0"], ["0", "SECONDS"]),
        (["stats", "--watch", "arena", "5"], ["SECONDS", "no sections"]),
        (["ping", "--count", "0"], ["--count"]),
        (["flush"], ["--yes"]),
        (["flush", "--tier", "nvme"], ["--tier", "nvme", "all, dram, shared"]),
        (["flush", "--yes", "--prefix", "00ff"], ["--prefix", "00ff", "32 hex digits"]),
        (["config", "--config", "/nowhere.toml"], ["/nowhere.toml", "--config"]),
        (["completion", "tcsh"], ["tcsh: there is completion for bash, zsh, fish"]),
        (["top"], ["top needs a terminal: use `tiercache stats --watch`"]),
        (["top", "--sort", "size"], ["--sort size: must be one of: asked, hits, blocks, idle"]),
        (["keygen", "/dev/null/keys"], ["/dev/null is not a directory"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused(run: Run, arguments: list[str], words: list[str]) -> None:
    assert_refused(run(*arguments), *words)


@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--watch"], ["ping"], ["flush", "--yes"]], ids=" ".join)
def test_without_a_daemon_the_remedy_is_named(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    assert_refused(run(*arguments, "--address", tmp_path), str(tmp_path), "tiercache daemon", "--address", status=1)


def test_without_a_daemon_json_is_still_json(run: Run, tmp_path: Path) -> None:
    status, out, err = run("ping", "--json", "--address", tmp_path)
    answer = json.loads(out)
    assert (status, err, answer["ok"], answer["address"]) == (1, "", False, str(tmp_path))


def test_config_prints_a_file_that_reads_back(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_text('arena = "1GiB"\n')
    monkeypatch.setenv("TIERCACHE_PIN_SHARE", "0.25")
    status, out, err = run("config", "--config", path)
    assert (status, err) == (0, "")
    assert f'arena = "1GiB"  # from {path}\n' in out
    assert "pin_share = 0.25  # from TIERCACHE_PIN_SHARE\n" in out
    printed = tmp_path / "b.toml"
    printed.write_text(out)
    assert load_config(printed, {}) == load_config(path)
    tree = json.loads(run("config", "--config", path, "--json")[1])
    assert tree["arena"] == {"value": 1 << 30, "text": "1GiB", "source": str(path)}
    assert tree["policy"] == {"value": "hazard", "text": "hazard", "source": "default"}


def test_version(run: Run) -> None:
    status, out, err = run("version")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"tiercache \S+ \(protocol \d+, python 3\.\S+, .*\)\n", out)
    assert run("--version") == (status, out, err)
    assert json.loads(run("version", "--json")[1])["pyzmq"][0].isdigit()


@pytest.mark.parametrize("command", ["--help", "config"])
def test_an_output_on_a_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    assert_refused((done.returncode, "", done.stderr), "output", "No space left on device", status=1)


@pytest.mark.parametrize("command", ["config", "version"])
def test_a_reader_that_has_seen_enough_is_no_error(command: str) -> None:
    with subprocess.Popen([*COMMAND, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert child.returncode == 0


def test_the_processes_exit_with_the_status() -> None:
    done = run_process("ping", "--address", "/nowhere")
    assert_refused((done.returncode, done.stdout, done.stderr), "no daemon at /nowhere", status=1)
