"""Shared by all commands: the application, groups in its help, common options, the end of each help."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RUN, LOOK, CHANGE, MEASURE, SERVE = "Run", "Look", "Change", "Measure", "Serve"
PURPOSES = (RUN, LOOK, CHANGE, MEASURE, SERVE)
"""Groups of commands by purpose, in the order of the help."""

STATUS = "0 done, 1 no daemon answers or what was asked about is not so, 2 a wrong command line or setting"
HELP_COLUMNS = 100


class _Group(TyperGroup):
    """Lists the commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        by_purpose: dict[str, list[tuple[str, str]]] = {purpose: [] for purpose in PURPOSES}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                purpose = getattr(command, "rich_help_panel", None) or LOOK
                by_purpose.setdefault(purpose, []).append((name, command.get_short_help_str(HELP_COLUMNS)))
        for purpose, rows in by_purpose.items():
            if rows:
                with formatter.section(purpose):
                    formatter.write_dl(rows)


def ending(examples: str, status: str = STATUS) -> str:
    """The end of every help: the meaning of the exit status, then examples, line by line."""
    return f"Exit status: {status}.\n\n\b\nExamples:\n{examples.rstrip()}\n"


app = typer.Typer(
    name="tiercache",
    cls=_Group,
    epilog=ending("""\
  tiercache daemon --arena 16GiB      run the daemon in the foreground
  tiercache top                       what it does, live
  tiercache doctor                    what is wrong, and what to do
  tiercache COMMAND --help            more about a command
"""),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tiercache.cli import config

        config.version(as_json=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions and end.")
    ] = False,
) -> None:
    """KV cache offloading for LLM serving: the daemon, and commands that look at it."""


Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="DIR", help="Run directory of the daemon (default: $TIERCACHE_RUN_DIR, or this user's)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with raw numbers.")]
"""`--address` and `--json` mean the same everywhere."""

OWN_HELP: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
"""Settings of commands that read their own command line."""
