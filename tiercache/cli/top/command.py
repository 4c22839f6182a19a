"""`tiercache top`: a daemon, live, on a terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.cli.declare import SILENT, Address, command
from tiercache.config.daemon_config import default_address


@command(
    "top",
    """\
  tiercache top                       live, until q
  tiercache top --interval 5 --sort idle
  tiercache top --once | head -20     one frame, for a pipe
""",
    f"0 left with q, 1 no daemon runs at the start, 2 no terminal or a wrong command line, {SILENT}",
)
def top(
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two readings (default: 1)."
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, after one interval, and end.")] = False,
    sort: Annotated[
        str, typer.Option("--sort", metavar="asked|hits|blocks|idle", help="Order of the namespaces (default: asked).")
    ] = "asked",
    address: Address = None,
) -> int:
    """Watch the daemon on a terminal: tiers, hit rates, namespaces, hot prefixes, clients, queues, health.

    Keys: q leaves, p pauses, s sorts by another column, ? shows help. Waits for a daemon that restarts.
    """
    from tiercache.cli.top.screen import show

    return show(address or default_address(), interval_s, once, sort)
