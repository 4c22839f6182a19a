"""`python -m tiercache.daemon`: reads settings, sets up logging, then runs the server until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import shutil
import signal
import sys
from collections.abc import Sequence

from tiercache.config.daemon_config import Resolved, add_config_flags, flags_from_args, resolve_config
from tiercache.errors import TierCacheError
from tiercache.ground.arguments import HelpFormatter

EXAMPLES = """\
Exit status: 0 stopped by a signal, 1 it failed, 2 a wrong setting.

Examples:
  tiercache daemon --arena 16GiB
  tiercache daemon --config /etc/tiercache.toml --log-level debug
  TIERCACHE_ARENA=64GiB tiercache daemon --run-dir /run/tiercache
"""


def make_parser() -> argparse.ArgumentParser:
    """The daemon's command line."""
    parser = argparse.ArgumentParser(
        prog="tiercache daemon",
        description="Keep KV blocks in page-locked memory and give them back to engines on this host.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add_config_flags(parser)
    parser.add_argument("--parent-fd", type=int, help="end when this inherited pipe reaches its end of file")
    parser.add_argument("--remove-run-dir", action="store_true", help="remove the run directory if the parent has gone")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a daemon; exit status 0 after a clean stop, 1 when it failed, 2 for a wrong setting."""
    # numpy's linear algebra, which nothing here uses, would start a thread for each core, here and in each child.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # pending until the server can reload settings
    args = make_parser().parse_args(argv)

    def read() -> Resolved:
        return resolve_config(args.config, flags=flags_from_args(args))

    from tiercache.daemon.ground.system_calls import check_calls, check_threads

    try:
        running = read()
        check_calls()
        check_threads(1)  # that of the log
    except TierCacheError as error:
        print(f"tiercache daemon: {error}", file=sys.stderr)
        return 2

    from tiercache.daemon.ground.core_dumps import leave_none
    from tiercache.daemon.ground.logs import last_words, start_logging
    from tiercache.daemon.ground.regions import check_fits

    from .descriptors import fit, raise_limit
    from .processes import beside_arena
    from .server import Server

    config = running.config
    log = start_logging(config.log_level, config.log_format)
    if config.has_secrets:
        leave_none()

    async def serve() -> int:
        files = raise_limit()

        def checked(found: Resolved, *, quiet: bool) -> Resolved:
            check_fits(found.config.arena_bytes, beside_arena(found.config))
            return found._replace(config=fit(found.config, files, quiet=quiet))

        server = Server(checked(running, quiet=False), lambda: checked(read(), quiet=True), log.figures)
        return await server.run(args.parent_fd)

    try:
        return asyncio.run(serve())
    except TierCacheError as error:
        last_words(f"tiercache daemon: {error}")
        return 2
    finally:
        log.stop()
        if args.remove_run_dir and _has_ended(args.parent_fd):
            shutil.rmtree(config.run_dir, ignore_errors=True)


def _has_ended(parent_fd: int | None) -> bool:
    """True if the parent, which never writes to its pipe, has exited. A living parent removes its directory itself."""
    return parent_fd is not None and bool(select.select([parent_fd], [], [], 0)[0])


if __name__ == "__main__":
    sys.exit(main())
