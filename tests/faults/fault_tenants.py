"""A daemon for other hosts, and a client by TCP that says whatever it likes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import msgpack
from raw_client import Requests, hello

from tiercache.protocol.curve import load_client, make_client, make_server


def free_port() -> int:
    """A port of the loopback on which no process listens, and that stays free until a daemon takes it.

    The kernel gives none of those below its own range to a test beside this one that asks for any port.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(first_of_kernel, 11_000)), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are taken")


class Site:
    """A daemon that listens on TCP, and the keys of two tenants."""

    def __init__(self, folder: Path, port: int, host: str = "127.0.0.1") -> None:
        self.host = host
        self.keys = folder / "keys"
        self.port = port
        make_server(self.keys)
        for name in ("team-a", "team-b"):
            make_client(self.keys, name, folder / f"{name}.toml")
        self.flags = (
            "--arena",
            "16MiB",
            "--region",
            "4MiB",
            "--listen",
            f"tcp://{host}:{port}",
            "--curve-keys",
            str(self.keys),
        )
        self._folder = folder

    def file(self, name: str) -> Path:
        """The key file of a tenant."""
        return self._folder / f"{name}.toml"

    def address(self, name: str, port: int | None = None) -> str:
        """How a tenant's client reaches the daemon."""
        return f"tcp://{self.host}:{port or self.port}?key={self.file(name)}"


class Tenant(Requests):
    """One session of a tenant over TCP. It sends and gets payloads, whatever it says of a mapping."""

    def __init__(self, site: Site, name: str, *, map_arena: bool = False) -> None:
        super().__init__()
        load_client(site.file(name)).secure(self._dealer)
        self._dealer.connect(f"tcp://127.0.0.1:{site.port}")
        self.welcome, _ = self.exchange(msgpack.packb(hello(os.urandom(16), name, map_arena)))
        assert self.welcome[0] == "welcome", self.welcome
        self.generation, self.token = self.welcome[2], self.welcome[3]

    def __enter__(self) -> Tenant:
        return self

    def store(self, namespace: int, key: bytes, data: bytes) -> list[int]:
        """Store one block; the states of its commit."""
        lease, *_ = self.reserve(namespace, key)
        assert self.ask("write", lease, 0, 0, payload=[data]) == ["done"]
        return self.commit(lease, [0])

    def load(self, namespace: int, key: bytes, length: int) -> bytes:
        """The first bytes of one block, or nothing."""
        _, lease, _ = self.match([namespace], key)
        if not lease:
            return b""
        tag, _, data = self.ask("read", lease, namespace, 0, 0, length)
        assert (tag, self.release(lease)) == ("payload", True)
        return bytes(data)
