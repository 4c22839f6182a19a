"""`python -m tiercache.http` and `tiercache http`: serve a daemon's statistics over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tiercache.config.daemon_config import default_run_dir
from tiercache.daemon.ground.logs import start_logging
from tiercache.errors import ConfigError, TierCacheError
from tiercache.ground.arguments import HelpFormatter
from tiercache.ground.extras import install_extra
from tiercache.ground.units import parse_duration_s

EXAMPLES = """\
Exit status: 0 stopped by a signal, 2 a wrong setting or a missing package.

Examples:
  tiercache http                                  for the daemon of this user, at 127.0.0.1:8181
  tiercache http /run/tiercache --listen 127.0.0.1:9000
  curl -s 127.0.0.1:8181/metrics
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tiercache http",
        description="Serve /healthz, /readyz, /metrics, /v1/stats and /v1/affinity for a daemon of this host. "
        "`tiercache daemon --http` starts the same beside the daemon.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "run_dir", nargs="?", type=Path, default=None, metavar="RUN_DIR", help="of the daemon ($TIERCACHE_RUN_DIR)"
    )
    parser.add_argument("--listen", default="127.0.0.1:8181", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="listen where other hosts can connect. There is no password: they can read the statistics (names of "
        "models and clients, no tokens, no KV) and ask how much is stored of prompts whose salt they know",
    )
    parser.add_argument(
        "--hosts",
        default="",
        metavar="HOST,...",
        help="further names that requests may be for, such as a proxy's. "
        "Without any, an address of this host is only asked as localhost, 127.0.0.1, [::1] or itself",
    )
    parser.add_argument(
        "--request-timeout", default="30s", metavar="DURATION", help="for a request to come (default: %(default)s)"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="auto", choices=["auto", "text", "json"])
    parser.add_argument("--parent-fd", type=int, help="end when this inherited pipe reaches its end of file")
    parser.add_argument("--listen-fd", type=int, help="an inherited socket that is bound to the address")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve as the command line says; exit status 0 after a clean stop, 2 for a wrong setting or a missing package."""
    args = make_parser().parse_args(argv)
    try:
        from tiercache.http.server import HttpSettings, serve
    except ImportError as error:
        print(f"tiercache http: needs {error.name}: {install_extra('http')}", file=sys.stderr)
        return 2
    listener = start_logging(args.log_level, args.log_format)
    try:
        try:
            request_s = parse_duration_s(args.request_timeout)
        except ValueError as error:
            raise ConfigError(f"request_timeout: {error}") from None
        settings = HttpSettings(
            run_dir=args.run_dir or default_run_dir(),
            listen=args.listen,
            allow_remote=args.allow_remote,
            hosts=args.hosts,
            request_s=request_s,
            parent_fd=args.parent_fd,
            listen_fd=args.listen_fd,
        )
        return serve(settings)
    except TierCacheError as error:
        print(f"tiercache http: {error}", file=sys.stderr)
        return 2
    finally:
        listener.stop()


if __name__ == "__main__":
    sys.exit(main())
