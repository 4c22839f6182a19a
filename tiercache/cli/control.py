"""How the commands reach the daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.config import default_address, session_socket_path
from tiercache.curve import is_remote
from tiercache.errors import DaemonUnavailable

if TYPE_CHECKING:
    from tiercache.client import Client

CONNECT_DEADLINE_S = 3.0
REQUEST_S = 2.0
"""People are more patient than engines: a busy machine is no daemon that has gone."""
_NOT_OURS = "run this as the daemon's user, or have the daemon share its sockets with a group of yours (--group)"
_REMEDY = "start a daemon with `tiercache daemon`, or name its run directory with --address"


@contextmanager
def connected(address: str | None) -> Iterator[Client]:
    """A client of the daemon at `address` (the default one when None) that maps no memory.

    Blocks for at most a few seconds. Raises DaemonUnavailable, with what to do about it.
    """
    from tiercache.client import Client

    where = address or default_address()
    # A client would wait for the socket to appear. People will not.
    if not is_remote(where):
        try:
            os.stat(session_socket_path(where))
        except PermissionError:
            raise DaemonUnavailable(f"{where} may not be entered: {_NOT_OURS}") from None
        except OSError:
            raise DaemonUnavailable(f"no daemon at {where}: {_REMEDY}") from None
    try:
        client = Client.connect(
            where, name="tiercache-cli", map_arena=False, request_timeout_s=REQUEST_S, timeout_s=CONNECT_DEADLINE_S
        )
    except DaemonUnavailable as error:
        refused = isinstance(error.__cause__, PermissionError)
        raise DaemonUnavailable(f"{error}: {_NOT_OURS if refused else _REMEDY}") from None
    try:
        yield client
    finally:
        client.close()
