"""`tiercache keygen`: keys for clients on other hosts."""

from __future__ import annotations

from pathlib import Path

from tiercache.cli.exits import EXIT_OK
from tiercache.protocol.curve import SERVER_FILE, check_name, make_client, make_server


def keygen(directory: Path, name: str | None, out: Path | None) -> int:
    """Write a daemon's keys if there are none, and those of client `name`. Returns the exit status."""
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
