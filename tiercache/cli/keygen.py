"""`tiercache keygen`: keys for clients on other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.declare import LOCAL_STATUS, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.protocol.curve import SERVER_FILE, check_name, make_client, make_server


@command(
    "keygen",
    """\
  tiercache keygen /etc/tiercache/keys
                                      the daemon's own keys, if there are none yet
  tiercache keygen /etc/tiercache/keys team-a
                                      let team-a in, and write its key to team-a.toml
  tiercache ping --address 'tcp://10.0.0.5:7411?key=team-a.toml'
""",
    LOCAL_STATUS,
)
def keygen(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The daemon's --curve-keys.")],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A client to let in; also the name of its tenant.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File for the client's key (default: NAME.toml).")
    ] = None,
) -> int:
    """Make keys for clients on other hosts; their connections are always encrypted."""
    if name is not None:
        check_name(name)  # before any file is made
    if not directory.joinpath(SERVER_FILE).exists():
        made = make_server(directory)
        print(f"{made}: the daemon's keys: keep them secret, and start it with")
        print(f"  tiercache daemon --listen tcp://0.0.0.0:7411 --curve-keys {directory}")
    elif name is None:
        print(f"{directory / SERVER_FILE}: the daemon's keys are there already")
    if name is not None:
        target = out or Path(f"{name}.toml")
        allowed = make_client(directory, name, target)
        print(f"{allowed}: lets {name} in, from now on; remove it to lock it out")
        print(f"{target}: {name}'s key: move it to the client, and connect there to")
        print(f"  tcp://HOST:7411?key={target.name}")
    return EXIT_OK
