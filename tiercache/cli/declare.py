"""How a command is declared: its function's parameters are the options, its docstring is the help.

Common options, and the end that every help has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

STATUS = "0 done, 1 no daemon answers or what was asked about is not so, 2 a wrong command line or setting"
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
"""`--address` and `--json` mean the same everywhere."""


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
