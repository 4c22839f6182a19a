"""The session socket's messages: SEQPACKET, one message per packet."""

from __future__ import annotations

import msgspec


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First packet of a client; carries its own pidfd as ancillary data.

    `instance` is random and shared by all sessions of one engine; `clock_us` is the sender's
    monotonic clock now; `map_arena` asks for the regions' descriptors.
    """

    protocol_min: int
    protocol_max: int
    instance: bytes
    name: str
    clock_us: int
    map_arena: bool


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """The daemon's answer. `control` is the ZeroMQ endpoint of the ROUTER.

    `kv_events`: the daemon publishes events, and wants an `EventRun` with each store.
    `connections`: how many this session may have to the control socket at a time.
    """

    protocol: int
    generation: int
    session: bytes
    control: str
    daemon_version: str
    arena_bytes: int
    kv_events: bool
    connections: int


class Regions(msgspec.Struct, array_like=True, tag="regions"):
    """Regions whose memfds come with this packet, in order: `[region_id, size_bytes]` each.

    Sent after `Welcome` for the regions that exist and again whenever one becomes ready, always before one of its
    frames is named to a client.
    """

    regions: list[tuple[int, int]]


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The daemon refuses this client; the socket is closed after it."""

    code: str
    text: str


SessionMessage = Welcome | Regions | Refused
