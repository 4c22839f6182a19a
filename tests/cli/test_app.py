"""Help of every command: sentences, defaults, an exit status, examples; and what it loads."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from command_line import DEADLINE_S, Run

from tiercache.cli.commands import COMMANDS as LISTED
from tiercache.cli.commands import PURPOSES, WITH_PARSER

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


def output_of(program: str) -> str:
    """What a program prints in a fresh interpreter."""
    start = "import sys; from tiercache.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


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
    out = output_of(f"main({arguments}); print(*[name for name in {watched} if name in sys.modules])")
    assert set(out.splitlines()[-1].split()) == loaded
