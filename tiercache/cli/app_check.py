"""The commands that look for faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.command_line import LOOK, Address, Json, app, ending


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache check                     the running daemon, or the configured directories
  tiercache check --nvme /mnt/nvme0/kv --full --rate 1GiB
                                      a directory that no daemon uses, every block
  tiercache check --nvme /mnt/nvme0/kv --repair
                                      also delete what is wrong there
  tiercache check --address /run/tiercache --sample 0
                                      the books of a running daemon only
""",
        "0 no fault, 1 one was found (repaired or not), 2 it could not be checked",
    ),
)
def check(
    nvme: Annotated[
        list[str] | None,
        typer.Option("--nvme", metavar="DIR", help="Directory that no daemon uses (may be repeated)."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete wrong rows and what follows them (without a daemon only).")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every block, not a sample.")] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", min=0, help="Blocks to read, at random (default: 1000).")
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Bytes a second to read blocks at; 0: no limit.")
    ] = "200MiB",
    force: Annotated[
        bool, typer.Option("--force", help="Have a daemon up to 0.1 check any number of blocks, serving nobody.")
    ] = False,
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Look for faults: in nvme directories, or in a daemon that runs."""
    from tiercache.cli import check as command

    return command.check(
        command.Options(
            nvme=tuple(nvme or ()),
            repair=repair,
            full=full,
            sample=sample,
            rate=rate,
            force=force,
            config=path,
            as_json=as_json,
            address=address,
        )
    )


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache doctor                    the host, the disks, the daemon, the hit rate
  tiercache doctor --quick --json | jq '.findings[] | select(.state != "ok")'
  tiercache doctor --dir /mnt/nvme0/kv
                                      a disk before it is given to a daemon
  tiercache doctor --gds /mnt/nvme0/tiercache
                                      also whether GPUDirect works there, and is faster
""",
        "0 nothing fails (there may be warnings), 1 something fails, 2 a wrong command line or setting",
    ),
)
def doctor(
    gds: Annotated[
        Path | None,
        typer.Option("--gds", metavar="DIR", help="Try GPUDirect on a directory: 64 MiB, removed again (2 minutes)."),
    ] = None,
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", metavar="DIR", help="A directory for --nvme (repeatable; default: those in use)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no disk and try no GPU.")] = False,
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Examine the host, its disks and the daemon, and say what to do about what is not well.

    With or without a daemon. Takes 1 s, up to 15 s for each nvme directory (64 MiB are written there and removed),
    up to 20 s for a GPU, and 2 minutes with --gds.
    """
    from tiercache.cli import doctor as command

    return command.run(
        command.Options(
            gds=gds, directories=tuple(directories or ()), quick=quick, config=path, address=address, as_json=as_json
        )
    )
