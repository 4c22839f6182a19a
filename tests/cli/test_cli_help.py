"""Help and completion of every command: sentences, defaults, an exit status, examples; words for three shells."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from tiercache.cli import completion
from tiercache.cli.app import app
from tiercache.cli.commands import COMMANDS as LISTED
from tiercache.cli.commands import PURPOSES, WITH_PARSER
from tiercache.cli.main import main

MOST_COLUMNS = 100


COMMANDS = [*LISTED, "bench codec"]

Help = Callable[[str], str]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """The help of a command, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")

    def one(command: str) -> str:
        status = main([*command.split(), "--help"])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return one


@pytest.fixture(scope="module")
def commands() -> list[completion.Command]:
    """All commands, as completion knows them."""
    return completion.commands(typer.main.get_command(app).make_context("tiercache", ["ping"]))


def test_help_and_completion_load_no_torch() -> None:
    program = (
        "import sys; from tiercache.cli.main import main; main(['completion', 'bash']); main(['serve', '--help']); "
        "print([name for name in ('torch', 'transformers', 'uvicorn', 'starlette') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--kv-cache-memory SIZE" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_list_of_commands_goes_by_purpose(help_of: Help) -> None:
    text = help_of("")
    places = [text.index(f"\n{purpose}:\n") for purpose in PURPOSES]
    assert places == sorted(places)
    for name in COMMANDS:
        if " " not in name:
            assert re.search(rf"^  {name} +[A-Z][a-z]+ ", text, re.MULTILINE), name


@pytest.mark.parametrize("name", sorted({*LISTED} - {*WITH_PARSER}))
def test_the_list_says_what_the_help_of_the_command_begins_with(name: str, help_of: Help) -> None:
    assert " ".join(help_of(name).split("\n\n")[1].split()).startswith(LISTED[name].about)


def test_only_the_command_that_is_asked_for_is_imported() -> None:
    program = (
        "import sys; from tiercache.cli.main import main; main(sys.argv[1:]); "
        "print([name for name in ('typer', 'tiercache.cli.ping', 'tiercache.cli.pin') if name in sys.modules])"
    )
    for arguments, loaded in (
        (["--help"], ["typer"]),
        (["ping", "--help"], ["typer", "tiercache.cli.ping"]),
        (["unpin", "--help"], ["typer", "tiercache.cli.pin"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == str(loaded)


@pytest.mark.parametrize("name", WITH_PARSER)
def test_commands_with_a_parser_of_their_own_need_no_typer(name: str) -> None:
    program = (
        f"import sys; from tiercache.cli.main import main; sys.modules['typer'] = None; main([{name!r}, '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: tiercache {name}" in done.stdout


@pytest.mark.parametrize("name", WITH_PARSER)
def test_a_wrong_option_is_exit_status_2(name: str) -> None:
    command = [sys.executable, "-m", "tiercache.cli.main", name, "--nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nosuch" in done.stderr or "MODEL" in done.stderr


def test_a_command_that_is_misspelt_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statz"]) == 2
    assert capsys.readouterr().err == (
        "tiercache: No such command 'statz'. Did you mean 'stats'?: see `tiercache --help`\n"
    )


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


def test_every_completion_has_every_command_and_option(commands: list[completion.Command]) -> None:
    found = commands
    assert {one.name for one in found} == set(COMMANDS)
    daemon = next(one for one in found if one.name == "daemon")
    log_format = next(one for one in daemon.options if "--log-format" in one.names)
    assert log_format.values == ("auto", "text", "json")
    for script in (completion.bash(found), completion.fish(found)):
        for one in found:
            for option in one.options:
                assert option.names[0].lstrip("-") in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ins"], ["inspect"]),
        (["flush", "--ti"], ["--tier"]),
        (["flush", "--tier", ""], ["all", "dram", "shared"]),
        (["stats", "--watch", "--j"], ["--json"]),
        (["bench", ""], ["codec"]),
        (["bench", "codec", "--bl"], ["--block-bytes"]),
        (["daemon", "--log-format", "j"], ["json"]),
        (["check", "--config", "/etc/hostnam"], ["/etc/hostname"]),
        (["pin", "--ttl", ""], []),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(
    typed: list[str], offered: list[str], tmp_path: Path, commands: list[completion.Command]
) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(completion.bash(commands))
    ask = 'source "$1"; shift; COMP_WORDS=(tiercache "$@"); COMP_CWORD=$#; _tiercache; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", str(script), *typed], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_are_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "tiercache" in script
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=script, text=True, timeout=20, check=True)


def test_another_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "tiercache: tcsh: there is completion for bash, zsh, fish\n"
