"""The command line: all commands, and how a wrong one is told.

What a command is called, takes and explains is in the modules `app_*`, by what it is for; what it does is in the module
of its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from tiercache.cli import app_change, app_check, app_look, app_measure, app_plan, app_replay, app_run, app_serve
from tiercache.cli.command_line import app
from tiercache.cli.exits import EXIT_OK, EXIT_USAGE

__all__ = ["MODULES", "app", "run"]

MODULES = (app_run, app_look, app_check, app_change, app_measure, app_plan, app_replay, app_serve)
"""Where commands are; to import one is to have its commands."""

# ClickException, the base of all complaints about a command line. Newer typers carry a click of
# their own, older ones import it: by this way both are found.
_CommandLineError = cast("type[Exception]", typer.BadParameter.__mro__[2])


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
    except OSError as error:
        if error.filename is None:
            raise
        # A path that the command line named, or one that it led to.
        print(f"tiercache: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit:
        return EXIT_OK  # click's answer to a closed pipe (`| head`): the reader has seen enough
    return status if isinstance(status, int) else EXIT_OK


_RENAMED = {
    "--block-tokens": "--block-size",
    "--prefill-flops": "--tflops, and --mfu for the share of it that a prefill reaches",
    "--dram-gbps": "--bus 50GB, and --dram-bandwidth",
    "--nvme-gbps": "--nvme-bandwidth 6GB",
}
"""Options of `replay` that are called as those of `plan` now."""


def _one_line(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    line = " ".join(text.split()).rstrip(".")
    now = _RENAMED.get(getattr(error, "option_name", ""))
    return f"{line}: say {now}" if now else line
