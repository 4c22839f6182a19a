"""The commands that serve others: a model, and what a daemon knows."""

from __future__ import annotations

import typer

from tiercache.cli.command_line import OWN_HELP, SERVE, app


@app.command(rich_help_panel=SERVE, **OWN_HELP)
def serve(context: typer.Context) -> int:
    """Serve a model over HTTP, with an interface like OpenAI's."""
    from tiercache.cli import serve as command

    return command.main(context.args)


@app.command(rich_help_panel=SERVE, **OWN_HELP)
def http(context: typer.Context) -> int:
    """Serve health, metrics, statistics and the affinity query of a daemon over HTTP."""
    from tiercache.http.__main__ import main as command

    return command(context.args)
