"""Closes stalled connections: half a request, or an answer that the client does not read."""

from __future__ import annotations

from collections.abc import Iterable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SWEEP_S = 30
"""Seconds between sweeps; a connection that has not moved from one sweep to the next is closed."""


class Sweeper:
    """Remembers the state of each connection at the last sweep."""

    def __init__(self) -> None:
        self._stood: dict[H11Protocol, tuple[object, int]] = {}

    def sweep(self, connections: Iterable[object]) -> None:
        stand = {
            connection: _stand(connection)
            for connection in connections
            if isinstance(connection, H11Protocol) and _waits_for_client(connection)
        }
        for connection, how in stand.items():
            if self._stood.get(connection) == how:
                connection.transport.abort()
        self._stood = stand


def cut_unsent(connections: Iterable[object]) -> None:
    """Close the connections whose request is incomplete."""
    for connection in list(connections):
        if isinstance(connection, H11Protocol) and connection.conn.their_state is h11.SEND_BODY:
            connection.transport.abort()


def _waits_for_client(connection: H11Protocol) -> bool:
    """True if the client has to act: read, or send a request. A body that does not come has its own deadline."""
    cycle = connection.cycle
    return cycle is None or bool(cycle.response_complete) or connection.flow.write_paused


def _stand(connection: H11Protocol) -> tuple[object, int]:
    """What changes when the client acts: its last request, and the part of the answer it has not read."""
    return connection.cycle, connection.transport.get_write_buffer_size()
