"""The command line: all commands as one typer app, and the message about a wrong command line."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperGroup

from tiercache import __version__
from tiercache.cli.commands import COMMANDS, PURPOSES, WITH_PARSER
from tiercache.cli.declare import DECLARED, PLAIN, Json, command, ending
from tiercache.cli.exit_status import EXIT_OK, EXIT_USAGE
from tiercache.cli.report import print_json

HELP_COLUMNS = 100

# ClickException, the base of all complaints about a command line. Newer typers carry a click of
# their own, older ones import it: by this way both are found.
_CommandLineError = cast("type[Exception]", typer.BadParameter.__mro__[2])


class Commands(TyperGroup):
    """The commands of the list, by purpose. Imports the module of a command when that is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, dict.fromkeys(COMMANDS))  # the names, for the base class

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command with this name; None if there is none, or if it reads its own command line."""
        if cmd_name not in COMMANDS or cmd_name in WITH_PARSER:
            return None
        import_module(COMMANDS[cmd_name].module)
        return typer.main.get_command(DECLARED[cmd_name])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, as the help prints it."""
        for purpose in PURPOSES:
            with formatter.section(purpose):
                formatter.write_dl([(one.name, one.about) for one in COMMANDS.values() if one.purpose == purpose])


app = typer.Typer(
    name="tiercache",
    cls=Commands,
    epilog=ending("""\
  tiercache daemon --arena 16GiB      run the daemon in the foreground
  tiercache top                       what it does, live
  tiercache doctor                    what is wrong, and what to do
  tiercache COMMAND --help            more about a command
"""),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
    **PLAIN,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tiercache.cli.app import version

        version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions and end.")
    ] = False,
) -> None:
    """KV cache offloading for LLM serving: the daemon, and commands that look at it."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Raises the errors of `tiercache.errors`."""
    try:
        status = app(list(arguments) or ["--help"], prog_name="tiercache", standalone_mode=False)
    except _CommandLineError as error:
        print(f"tiercache: {_one_line(error)}: see `tiercache --help`", file=sys.stderr)
        return EXIT_USAGE
    except typer.Abort:
        print("tiercache: stopped", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit:
        return EXIT_OK  # click's answer to a closed pipe (`| head`): the reader has seen enough
    return status if isinstance(status, int) else EXIT_OK


def _one_line(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split()).rstrip(".")


@command("version", "  tiercache version", "0 always")
def version(as_json: Json = False) -> int:
    """Print the versions of tiercache and of what it runs on."""
    from tiercache.protocol.messages import PROTOCOL

    versions = {
        "tiercache": __version__,
        "protocol": str(PROTOCOL),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("pyzmq", "msgspec", "numpy", "torch", "transformers", "triton")},
    }
    if as_json:
        print_json(versions)
    else:
        others = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "tiercache")
        print(f"tiercache {versions['tiercache']} ({others})")
    return EXIT_OK


def _version(name: str) -> str:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return "not installed"
