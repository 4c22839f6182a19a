"""The commands that serve others: a model, and what a daemon knows."""

from __future__ import annotations

import os
import sys

import typer

from tiercache.cli.command_line import OWN_HELP, SERVE, app
from tiercache.cli.main import EXIT_USAGE


@app.command(rich_help_panel=SERVE, **OWN_HELP)
def serve(context: typer.Context) -> int:
    """Serve a model over HTTP, with an interface like OpenAI's."""
    # Both are read when torch and transformers are loaded. Threads of torch that wait must not spin: the daemon
    # and the event loop need the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from tiercache.cli import serve as command
    except ImportError as error:
        print(f"tiercache: serve needs {error.name}: pip install 'tiercache[engine,serve]'", file=sys.stderr)
        return EXIT_USAGE
    return command.main(context.args)


@app.command(rich_help_panel=SERVE, **OWN_HELP)
def http(context: typer.Context) -> int:
    """Serve health, metrics, statistics and the affinity query of a daemon over HTTP."""
    from tiercache.http.__main__ import main as command

    return command(context.args)
