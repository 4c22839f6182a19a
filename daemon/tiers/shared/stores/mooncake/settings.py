"""The URL of Mooncake's store: `mooncake://master:50051?protocol=rdma&segment=4GiB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tiercache.daemon.tiers.shared.stores.queries import read_query, whole_number
from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes, round_up

PORT = 50051
SEGMENT_BYTES = 4 << 30
BUFFER_BYTES = 64 << 20
CONNECTIONS = 4
_SHARE_BYTES = 16 << 20
"""Mooncake takes memory in such portions."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_DEVICES = re.compile(r"[A-Za-z0-9._:-]+(,[A-Za-z0-9._:-]+)*")
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|etcd|redis)://[A-Za-z0-9._:/,-]+")
_EXAMPLE = "write for example mooncake://master:50051?protocol=tcp&segment=4GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """What the URL says.

    Attributes:
        master, port: where `mooncake_master` listens.
        protocol: tcp or rdma.
        device: the RDMA devices, with commas between them; empty lets Mooncake choose.
        segment_bytes: how much of this host's memory the pool has; 0 for none.
        buffer_bytes: for what Mooncake's client copies itself.
        host: the name or address by which other hosts reach this one; empty for its address on the way to the master.
        metadata: where Mooncake keeps which host has which memory.
        connections: how many transfers run side by side.
    """

    master: str
    port: int = PORT
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = SEGMENT_BYTES
    buffer_bytes: int = BUFFER_BYTES
    host: str = ""
    metadata: str = "P2PHANDSHAKE"
    connections: int = CONNECTIONS

    @property
    def address(self) -> str:
        """The URL without its settings."""
        return f"mooncake://{self.master}:{self.port}"


def parse_mooncake_url(url: str) -> MooncakeSettings:
    """Raises ConfigError."""
    _, netloc, path, query, fragment = urlsplit(url)
    shown = f"mooncake://{netloc.rpartition('@')[2]}"
    if "@" in netloc:
        raise ConfigError(f"{shown}: Mooncake knows no users and passwords: {_EXAMPLE}")
    master, colon, port = netloc.partition(":")
    if not _NAME.fullmatch(master):
        raise ConfigError(f"{shown}: {master!r} is no name or IPv4 address of a master: {_EXAMPLE}")
    if colon and not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise ConfigError(f"{shown}: {port!r} is no port: {_EXAMPLE}")
    if path.strip("/") or fragment:
        raise ConfigError(f"{shown}: has nothing behind the port but settings: {_EXAMPLE}")
    known: dict[str, Callable[[str], object]] = {
        "protocol": _protocol,
        "device": _like(_DEVICES, "mlx5_0,mlx5_1"),
        "segment": _segment,
        "buffer": _buffer,
        "host": _like(_NAME, "node-3.cluster.local"),
        "metadata": _like(_METADATA, "P2PHANDSHAKE or http://host:8080/metadata"),
        "connections": whole_number(1, 64),
    }
    found = read_query(shown, query, known)
    if "device" in found and found.get("protocol", "tcp") == "tcp":
        raise ConfigError(f"{shown}: device is for protocol=rdma: leave it out, or write protocol=rdma")
    return MooncakeSettings(
        master=master,
        port=int(port) if colon else PORT,
        protocol=found.get("protocol", "tcp"),
        device=found.get("device", ""),
        segment_bytes=found.get("segment", SEGMENT_BYTES),
        buffer_bytes=found.get("buffer", BUFFER_BYTES),
        host=found.get("host", ""),
        metadata=found.get("metadata", "P2PHANDSHAKE"),
        connections=found.get("connections", CONNECTIONS),
    )


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError("must be tcp or rdma")
    return text


def _segment(text: str) -> int:
    return 0 if text == "0" else _memory(text)


def _buffer(text: str) -> int:
    return _memory(text)


def _memory(text: str) -> int:
    size_bytes = parse_bytes(text)
    if not _SHARE_BYTES <= size_bytes <= 1 << 44:
        raise ValueError("must be 16MiB to 16TiB")
    return round_up(size_bytes, _SHARE_BYTES)


def _like(pattern: re.Pattern[str], example: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"is not understood: write for example {example}")
        return text

    return read
