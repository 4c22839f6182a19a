"""How a command is declared: its function's parameters are the options, its docstring is the help.

Common options, and the end that every help has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

SILENT = "3 a daemon runs but does not answer"
"""The end of the statuses of commands that ask a daemon."""
STATUS = f"0 done, 1 no daemon runs, 2 a wrong command line or setting, {SILENT}"
LOCAL_STATUS = "0 done, 2 a wrong command line or setting"
"""Of commands that ask no daemon."""
PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Settings of every `Typer`: help as plain text, errors as they are."""
DECLARED: dict[str, typer.Typer] = {}
"""The commands of the modules that have been imported."""

Function = TypeVar("Function", bound=Callable[..., int])

Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="DIR", help="Run directory of the daemon (default: $TIERCACHE_RUN_DIR, or this user's)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with raw numbers.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
]
PromptModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME|DIR", help="Model of the prompt TEXT; that of a folder tokenises it."),
]
Salt = Annotated[
    str | None,
    typer.Option("--salt", metavar="SALT", envvar="TIERCACHE_SALT", help="The tenant's secret; '' for none."),
]
"""Options that mean the same in all commands."""


def command(name: str, examples: str, status: str = STATUS) -> Callable[[Function], Function]:
    """Declares a function as the command `name`. It returns the exit status."""

    def declare(function: Function) -> Function:
        DECLARED[name] = typer.Typer(**PLAIN)
        DECLARED[name].command(name, epilog=ending(examples, status))(function)
        return function

    return declare


def ending(examples: str, status: str = STATUS) -> str:
    """The end of every help: the meaning of the exit status, then examples, line by line."""
    return f"Exit status: {status}.\n\n\b\nExamples:\n{examples.rstrip()}\n"
