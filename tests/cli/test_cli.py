"""The command line: help, exit statuses, one-line errors, and every command against a real daemon."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import tiercache
from tiercache.cli import flush
from tiercache.cli.main import main
from tiercache.config.daemon_config import load_config

COMMAND = [sys.executable, "-m", "tiercache.cli.main"]
DEADLINE_S = 60.0
QUIET: dict[str, Any] = {"capture_output": True, "text": True, "timeout": DEADLINE_S}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process: (exit status, stdout, stderr)."""

    def run_one(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run_one


def assert_one_line(err: str, *words: str) -> None:
    assert err.startswith("tiercache: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err


# --- without a daemon --------------------------------------------------------------------------


def test_no_command_prints_the_help(run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "\n  stats " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], ["bogus", "--help"]),
        (["stats", "--bogus"], ["--bogus"]),
        (["stats", "--watch", "soon"], ["soon", "SECONDS"]),
        (["stats", "0"], ["0", "SECONDS"]),
        (["stats", "--watch", "arena", "5"], ["SECONDS", "no sections"]),
        (["ping", "--count", "0"], ["--count"]),
        (["flush", "--tier", "nvme"], ["--tier", "nvme", "all, dram, shared"]),
        (["flush", "--yes", "--prefix", "xyz"], ["--prefix", "xyz", "32 hex digits"]),
        (["flush", "--yes", "--prefix", "00ff"], ["--prefix", "00ff", "32 hex digits"]),
        (["config", "--config", "/nowhere.toml"], ["/nowhere.toml", "--config"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(run: Run, arguments: list[str], words: list[str]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert_one_line(err, *words)


@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--watch"], ["ping"], ["flush", "--yes"]])
def test_no_daemon_is_one_line_and_status_1(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    status, out, err = run(*arguments, "--address", tmp_path)
    assert (status, out) == (1, "")
    assert_one_line(err, str(tmp_path), "tiercache daemon", "--address")


def test_no_daemon_in_json(run: Run, tmp_path: Path) -> None:
    status, out, err = run("ping", "--json", "--address", tmp_path)
    answer = json.loads(out)
    assert (status, err, answer["ok"], answer["address"]) == (1, "", False, str(tmp_path))


def test_flush_asks_a_terminal_or_wants_yes(run: Run, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "flush", "--address", str(tmp_path)], stdin=subprocess.DEVNULL, **QUIET, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "--yes")


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


def test_config_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_ARENA", "1GiB")
    tree = json.loads(run("config", "--json")[1])
    assert tree["arena"] == {"value": 1 << 30, "text": "1GiB", "source": "TIERCACHE_ARENA"}
    assert tree["policy"] == {"value": "hazard", "text": "hazard", "source": "default"}


def test_version(run: Run) -> None:
    status, out, err = run("version")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"tiercache \S+ \(protocol \d+, python 3\.\S+, .*\)\n", out)
    assert json.loads(run("version", "--json")[1])["pyzmq"][0].isdigit()


def test_version_as_an_option_says_the_same(run: Run) -> None:
    assert run("--version") == run("version")


def test_a_path_that_cannot_be_used_is_one_line(run: Run, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    status, out, err = run("keygen", taken / "keys")
    assert (status, out) == (2, "")
    assert_one_line(err, str(taken), "Not a directory")


def test_a_wrong_name_of_a_client_makes_no_keys(run: Run, tmp_path: Path) -> None:
    status, out, err = run("keygen", tmp_path / "keys", "../evil")
    assert (status, out) == (2, "")
    assert_one_line(err, "client '../evil': a name has 1 to 64 letters")
    assert not (tmp_path / "keys").exists()


def test_a_locale_without_the_characters_is_no_reason_to_fail() -> None:
    with tiercache.launch("4MiB", region="2MiB") as daemon:
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
        command = [*COMMAND, "top", "--once", "--interval", "0.1", "--address", daemon.address]
        ended = subprocess.run(command, env=ascii_only, **QUIET)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "TIER" in ended.stdout


def test_ctrl_c_while_a_command_is_imported_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("tiercache.daemon"):
                raise KeyboardInterrupt

    for name in [name for name in sys.modules if name.startswith("tiercache.daemon")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert run("daemon", "--help") == (2, "", "tiercache: stopped\n")


@pytest.mark.parametrize("command", [["--help"], ["config"], ["version"]])
def test_an_output_on_a_full_disk_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 1
    assert_one_line(done.stderr, "output", "No space left on device")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    child = subprocess.Popen([*COMMAND, "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    assert child.wait(timeout=DEADLINE_S) == 0
    child.stderr.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_a_run_dir_of_another_user_is_not_called_missing() -> None:
    """Nor does its owner's daemon seem to be dead."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        call = f"main(['ping', '--address', '{folder}'])"
        # Run it once as root, to import everything: the other user may not be able to read the interpreter's files.
        first = "import os; from tiercache.cli.main import main; main(['ping', '--address', '/nowhere'])"
        code = f"{first}; os.setuid(54321); {call}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert f"{folder} may not be entered: run this as the daemon's user" in done.stderr
    finally:
        folder.rmdir()


# --- with a real daemon ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a daemon with an arena of 64 MiB."""
    run_dir = tmp_path_factory.mktemp("run")
    arguments = ["daemon", "--run-dir", str(run_dir), "--arena", "64MiB", "--lock-memory", "off"]
    with (run_dir / "log").open("w") as log:
        child = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=log)
    try:
        answers = ["ping", "--address", str(run_dir)]
        wait_until(lambda: main(answers) == 0 or child.poll() is not None, "the daemon answers")
        assert child.poll() is None, (run_dir / "log").read_text()
        yield run_dir
        child.terminate()
        assert child.wait(timeout=DEADLINE_S) == 0, (run_dir / "log").read_text()
    finally:
        child.kill()
        child.wait()


def on_a_terminal(arguments: list[str], answer: str = "") -> tuple[int, str]:
    """Run a command on a pseudo-terminal; `answer` is typed once it has asked."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen([*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    text, deadline_s = b"", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if not select.select([master], [], [], 0.1)[0]:
            continue
        try:
            text += os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if answer and b"[y/N]" in text:
            os.write(master, answer.encode())
            answer = ""
    os.close(master)
    return child.wait(timeout=DEADLINE_S), text.decode()


def test_ping(run: Run, daemon: Path) -> None:
    status, out, _ = run("ping", "--address", daemon)
    assert status == 0
    assert re.fullmatch(rf"{daemon}: answered in \S+ \S+\n", out)
    answer = json.loads(run("ping", "--count", "20", "--json", "--address", daemon)[1])
    assert (answer["ok"], answer["count"]) == (True, 20)
    assert 0 < answer["min_us"] <= answer["p50_us"] <= answer["p99_us"] <= answer["max_us"]


def test_the_environment_names_the_daemon(run: Run, daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_RUN_DIR", str(daemon))
    assert run("ping", "--json")[0] == 0


def test_stats_in_a_pipe_and_as_json(run: Run, daemon: Path) -> None:
    status, out, _ = run("stats", "--address", daemon)
    assert status == 0
    assert out.startswith("# summary\nhealth")
    assert re.search(r"^arena +0 B of 64\.0 MiB used", out, re.MULTILINE)
    tree = json.loads(run("stats", "--json", "--address", daemon)[1])
    assert (tree["arena"]["bytes"], tree["arena"]["bytes_human"]) == (64 << 20, "64.0 MiB")
    assert tree["counters"]["match_requests"] == 0


def test_sections_of_stats(run: Run, daemon: Path) -> None:
    _, out, _ = run("stats", "arena", "summary", "--address", daemon)
    assert re.findall("^# (.*)", out, re.MULTILINE)[:2] == ["summary", "arena"]
    assert list(json.loads(run("stats", "arena", "--json", "--address", daemon)[1])) == ["arena"]
    status, out, err = run("stats", "arenas", "--address", daemon)
    assert (status, out) == (2, "")
    assert_one_line(err, "arenas: is no section: there are summary, daemon, health, arena,")


def test_stats_on_a_terminal(daemon: Path) -> None:
    status, text = on_a_terminal(["stats", "--address", str(daemon)])
    assert status == 0
    assert "64.0 MiB" in text
    assert "─" in text


def test_watch_prints_a_line_per_interval_until_interrupted(daemon: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "stats", "--watch", "0.02", "--address", str(daemon)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline().split() for _ in range(23)]
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (0, "")
    assert lines[0][:3] == lines[21][:3] == ["time", "hit%", "matches/s"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", lines[1][0])


def test_watch_as_json(daemon: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "stats", "0.02", "--json", "--address", str(daemon)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    rows = [json.loads(child.stdout.readline()) for _ in range(3)]
    child.stdout.close()
    assert child.wait(timeout=DEADLINE_S) == 0, "a closed pipe ends it"
    assert [row["restarted"] for row in rows] == [False] * 3


def test_flush(run: Run, daemon: Path) -> None:
    assert run("flush", "--yes", "--address", daemon)[:2] == (0, "0 blocks flushed\n")
    answer = json.loads(run("flush", "--yes", "--json", "--tier", "dram", "--address", daemon)[1])
    assert answer == {"flushed_blocks": 0, "tier": "dram", "namespaces": [], "prefix": ""}
    status, _, err = run("flush", "--yes", "--namespace", "9f", "--address", daemon)
    assert status == 2
    assert_one_line(err, "--namespace = 9f", "no such namespace")


def test_a_flush_says_whom_it_concerns() -> None:
    alone = {"tiers": {"dram": {"blocks": 3}, "nvme": {"blocks": 4}}}
    shared = {"tiers": {**alone["tiers"], "shared": {"store": "valkey://kv:6379"}}}
    for tree in (alone, shared):
        asked = flush.question(tree, "dram", None, None)
        assert asked == "Forget all blocks of every namespace in dram (7 blocks are held now)?"
    assert "host" not in flush.question(alone, "all", None, None)
    every = "The shared store forgets them for EVERY host of the deployment. Forget"
    assert flush.question(shared, "all", None, None).startswith(every)
    assert flush.question(shared, "shared", "9f3a", None) == f"{every} all blocks of namespace 9f3a in shared?"
    one = flush.question(shared, "shared", None, "00112233" * 4)
    assert "makes the 64th part of its namespace unreachable" in one
    assert "block 00112233... and all that follow it" in one
    assert flush.outcome(3, "all", False) == "3 blocks flushed"
    assert flush.outcome(0, "shared", True) == "flushed: no host finds these blocks in the shared store any more"


def test_there_is_no_shared_tier_to_flush(run: Run, daemon: Path) -> None:
    status, _, err = run("flush", "--yes", "--tier", "shared", "--address", daemon)
    assert status == 2
    assert_one_line(err, "--tier = shared", "no shared tier")


@pytest.mark.parametrize(("answer", "status", "words"), [("y\n", 0, "0 blocks flushed"), ("n\n", 2, "stopped")])
def test_flush_on_a_terminal_asks_first(daemon: Path, answer: str, status: int, words: str) -> None:
    got, text = on_a_terminal(["flush", "--address", str(daemon)], answer)
    assert "Forget all blocks of every namespace in all tiers (0 blocks are held now)? [y/N]" in text
    assert got == status, text
    assert words in text
