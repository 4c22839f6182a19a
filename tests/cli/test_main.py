"""The command line: exit statuses, one-line errors, outputs that cannot be written, help, daemons that are silent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from command_line import COMMAND, DEADLINE_S, Run, assert_refused

import tiercache
from tiercache.cli import completion, connection
from tiercache.cli.app import app
from tiercache.cli.commands import COMMANDS as LISTED
from tiercache.cli.commands import PURPOSES, WITH_PARSER
from tiercache.cli.exit_status import EXIT_NO_ANSWER, EXIT_UNWELL
from tiercache.config.daemon_config import load_config
from tiercache.protocol import messages


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


# --- help of every command: sentences, defaults, an exit status, examples; and what it loads ---------


MOST_COLUMNS = 100
COMMANDS = [*LISTED, "bench codec"]
Help = Callable[[str], str]


@pytest.fixture
def help_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> Help:
    """The help of a command, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")

    def one(command: str) -> str:
        status, out, err = run(*command.split(), "--help")
        assert (status, err) == (0, "")
        return out

    return one


def test_the_list_of_commands_goes_by_purpose(help_of: Help, run: Run) -> None:
    text = help_of("")
    places = [text.index(f"\n{purpose}:\n") for purpose in PURPOSES]
    assert places == sorted(places)
    for name in LISTED:
        assert re.search(rf"^  {name} +[A-Z][a-z]+ ", text, re.MULTILINE), name
        if name not in WITH_PARSER:
            about = " ".join(help_of(name).split("\n\n")[1].split())
            assert about.startswith(LISTED[name].about)
    assert "\n  stats " in run()[1]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_says_what_one_needs(command: str, help_of: Help) -> None:
    text = help_of(command)
    assert [line for line in text.splitlines() if len(line) > MOST_COLUMNS] == []
    assert re.search(r"[A-Z][^\n]+[a-z].*[.:]\n", text), "a sentence"
    examples = text[text.lower().index("examples:") :].strip().splitlines()[1:]
    assert f"tiercache {command}".strip() in examples[0]
    if command != "bench":
        status = " ".join(text.lower()[text.lower().index("exit status:") :].partition("examples:")[0].split())
        assert re.match(r"exit status: 0 \w+", status), status
    for option in re.findall(r"^  (--[a-z-]+) +(?:<\w+>|[A-Z|a-z]+)\n? +([^\n]*)", text, re.MULTILINE):
        assert option[1], f"{option[0]} is not explained"


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["--help"], {"typer"}),
        (["unpin", "--help"], {"typer", "tiercache.cli.pin"}),
        (["serve", "--help"], {"tiercache.cli.serve"}),
    ],
)
def test_only_the_command_that_is_asked_for_is_imported(arguments: list[str], loaded: set[str]) -> None:
    watched = ["typer", "tiercache.cli.ping", "tiercache.cli.pin", "tiercache.cli.serve", "torch", "starlette"]
    code = f"import sys; from tiercache.cli.main import main; main({arguments}); "
    command = [sys.executable, "-c", f"{code}print(*[name for name in {watched} if name in sys.modules])"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert (set(done.stdout.splitlines()[-1].split()), done.stderr) == (loaded, "")


# --- completion of commands, options and values in three shells --------------------------------------


@pytest.fixture(scope="module")
def commands() -> list[completion.Command]:
    return completion.commands(typer.main.get_command(app).make_context("tiercache", ["ping"]))


ASK = 'source "$1"; shift; COMP_WORDS=(tiercache "$@"); COMP_CWORD=$#; _tiercache; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ins", "inspect"),
        ("flush --ti", "--tier"),
        ("flush --tier ", "all dram shared"),
        ("stats --watch --j", "--json"),
        ("bench ", "codec"),
        ("bench codec --bl", "--block-bytes"),
        ("daemon --log-format j", "json"),
        ("check --config /etc/hostnam", "/etc/hostname"),
        ("pin --ttl ", ""),
        ("completion z", "zsh"),
    ],
)
def test_bash_completes(typed: str, offered: str, tmp_path: Path, commands: list[completion.Command]) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(completion.bash(commands))
    command = ["bash", "-c", ASK, "bash", str(script), *typed.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.stderr, done.stdout.split()) == ("", offered.split())


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_are_what_their_shell_reads(shell: str, run: Run) -> None:
    status, script, _ = run("completion", shell)
    assert (status, "tiercache" in script) == (0, True)
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=script, text=True, timeout=DEADLINE_S, check=True)


# --- a daemon that does not answer: every command names its process and says that it still runs ------


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
