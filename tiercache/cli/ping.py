"""`tiercache ping`: is the daemon there, and how long does an answer take?"""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Address, Json, command
from tiercache.cli.exit_status import EXIT_NO_ANSWER, EXIT_OK, EXIT_UNWELL, NotAnswering
from tiercache.cli.report import print_json
from tiercache.config.daemon_config import default_address
from tiercache.errors import DaemonUnavailable
from tiercache.ground.units import format_duration


@command(
    "ping",
    """\
  tiercache ping                      exit status 0 when the daemon answers
  tiercache ping --count 1000         with percentiles of the round trip
""",
    f"0 it answers, 1 no daemon runs, 2 a wrong command line, {SILENT}",
)
def ping(
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=1_000_000, help="Number of pings.")] = 1,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Check whether the daemon answers, and how long it takes."""
    where = address or default_address()
    try:
        with connected(address) as client:
            seconds = sorted(client.ping() for _ in range(count))
    except DaemonUnavailable as error:
        if not as_json:
            raise
        if isinstance(error, NotAnswering):
            print_json({"ok": False, "address": where, "pid": error.pid, "error": str(error)})
            return EXIT_NO_ANSWER
        print_json({"ok": False, "address": where, "error": str(error)})
        return EXIT_UNWELL
    figures = {
        "min": seconds[0],
        "p50": seconds[(count - 1) // 2],
        "p99": seconds[(count * 99 - 1) // 100],
        "max": seconds[-1],
    }
    if as_json:
        in_us = {f"{name}_us": round(value * 1e6, 1) for name, value in figures.items()}
        print_json({"ok": True, "address": where, "count": count, **in_us})
    elif count == 1:
        print(f"{where}: answered in {format_duration(seconds[0])}")
    else:
        spread = ", ".join(f"{name} {format_duration(value)}" for name, value in figures.items())
        print(f"{where}: {count} answers, {spread}")
    return EXIT_OK
