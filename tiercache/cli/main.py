"""Entry point of the `tiercache` command.

Its exit statuses are explained in `exit_status`. Errors are one line on stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from tiercache.cli.commands import COMMANDS, WITH_PARSER
from tiercache.cli.exit_status import EXIT_NO_ANSWER, EXIT_OK, EXIT_UNWELL, EXIT_USAGE, NotAnswering
from tiercache.errors import ConfigError, TierCacheError

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character missing in the locale is no reason to fail
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except TierCacheError as error:
        print(f"tiercache: {error}", file=sys.stderr)
        if isinstance(error, NotAnswering):
            return EXIT_NO_ANSWER
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_UNWELL
    except KeyboardInterrupt:  # also while a command was still being imported
        print("tiercache: stopped", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        _print_no_more()  # the reader has closed the pipe
        return EXIT_OK
    except OSError as error:
        if arguments[:1] == ["daemon"]:
            raise
        if error.filename is not None:
            # A path that the command line named, or one that it led to.
            print(f"tiercache: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
            return EXIT_USAGE
        if error.errno not in _UNWRITABLE:
            raise
        _print_no_more()
        print(f"tiercache: the output cannot be written: {error.strerror}: send it elsewhere", file=sys.stderr)
        return EXIT_UNWELL


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if arguments[:1] and arguments[0] in WITH_PARSER:
        # Without typer, whose import takes longer than the rest: a sidecar starts in a fraction of a second.
        command = import_module(COMMANDS[arguments[0]].module)
        try:
            return int(command.main(arguments[1:]) or EXIT_OK)
        except SystemExit as end:  # argparse's, after its help or a complaint
            return end.code if isinstance(end.code, int) else EXIT_OK
    from tiercache.cli.app import run

    return run(arguments)


def _print_no_more() -> None:
    """Stop output: Python would try once more while it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
