"""Completion of commands, options and values in three shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
from command_line import DEADLINE_S, Run

from tiercache.cli import completion
from tiercache.cli.app import app


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
