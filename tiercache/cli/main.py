"""Entry point of the `tiercache` command.

Its exit statuses are explained in `exits`. Errors are one line on stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from tiercache.cli.exits import EXIT_NO_ANSWER, EXIT_OK, EXIT_UNWELL, EXIT_USAGE, NotAnswering
from tiercache.errors import ConfigError, TierCacheError

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character missing in the locale is no reason to fail
    try:
        if arguments[:1] == ["daemon"]:
            # Before typer and rich are imported, so that a sidecar starts in a fraction of a second.
            from tiercache.daemon.__main__ import main as daemon_main

            return daemon_main(arguments[1:]) or EXIT_OK
        from tiercache.cli.app import run

        status = run(arguments)
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
        if error.filename is not None or error.errno not in _UNWRITABLE or arguments[:1] == ["daemon"]:
            raise
        _print_no_more()
        print(f"tiercache: the output cannot be written: {error.strerror}: send it elsewhere", file=sys.stderr)
        return EXIT_UNWELL


def _print_no_more() -> None:
    """Stop output: Python would try once more while it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
