"""A daemon for other hosts, and a client by TCP written by hand, which says whatever it likes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tiercache.protocol.curve import load_client, make_client, make_server

WAIT_MS = 20_000


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

    def __init__(self, folder: Path, port: int) -> None:
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
            f"tcp://127.0.0.1:{port}",
            "--curve-keys",
            str(self.keys),
        )
        self._folder = folder

    def file(self, name: str) -> Path:
        """The key file of a tenant."""
        return self._folder / f"{name}.toml"

    def address(self, name: str, port: int | None = None) -> str:
        """How a tenant's client reaches the daemon."""
        return f"tcp://127.0.0.1:{port or self.port}?key={self.file(name)}"


class Tenant:
    """One session of a tenant; `also` adds connections, of which it may leave the answers lying."""

    def __init__(self, site: Site, name: str, *, map_arena: bool = False, instance: bytes = b"") -> None:
        self._site = site
        self._name = name
        self._context = zmq.Context()
        self._ids = itertools.count(1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._socket = self.also()
        hello = ["hello", 1, 1, instance or os.urandom(16), name, _now_us(), map_arena]
        self.welcome = self._exchange(hello)[0]
        assert self.welcome[0] == "welcome", self.welcome
        self.generation, self.token = self.welcome[2], self.welcome[3]

    def __enter__(self) -> Tenant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection without a goodbye."""
        self._context.destroy(linger=0)

    def also(self, high_water: int = 1000) -> zmq.Socket[bytes]:
        """One more connection with the keys of this tenant."""
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, high_water)
        sock.setsockopt(zmq.RCVBUF, 4096)
        load_client(self._site.file(self._name)).secure(sock)
        sock.connect(f"tcp://127.0.0.1:{self._site.port}")
        self._sockets.append(sock)
        return sock

    def header(self, tag: str, *fields: Any) -> bytes:
        """The parts of a request without payload."""
        start = [tag, next(self._ids), self.token, self.generation, _now_us() + 20_000_000]
        return msgspec.msgpack.encode([*start, *fields])

    def _exchange(self, message: Any, *payload: bytes) -> list[Any]:
        header = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self._socket.send_multipart([header, *payload])
        assert self._socket.poll(WAIT_MS), "no answer"
        answer, *rest = self._socket.recv_multipart()
        return [msgspec.msgpack.decode(answer, strict=False), *rest]

    def ask(self, tag: str, *fields: Any, payload: bytes | None = None) -> list[Any]:
        """One request; its reply without request id and generation, then the payload if there is one."""
        reply, *rest = self._exchange(self.header(tag, *fields), *([] if payload is None else [payload]))
        return [reply[0], *reply[3:], *rest]

    def namespace(self, block_bytes: int, **changed: Any) -> int:
        """Register a namespace of that size."""
        spec = {"engine": "raw/1", "layout": "x", "dtype": "uint8", "block_size": 4, "block_bytes": block_bytes}
        tag, number, _ = self.ask("register_namespace", {**spec, **changed})
        assert tag == "namespace"
        return int(number)

    def reserve(self, namespace: int, keys: bytes, parent: bytes = b"") -> tuple[int, list[int]]:
        """A write lease, 0 for none, and the states."""
        tag, lease, states, *_ = self.ask("reserve", namespace, parent, keys, 20_000)
        assert tag == "reserved"
        return int(lease), list(states)

    def commit(self, lease: int, count: int = 1) -> list[int]:
        """Say that the first `count` blocks of a lease are complete."""
        tag, states = self.ask("commit", lease, struct.pack(f"<{count}I", *range(count)))
        assert tag == "committed"
        return list(states)

    def store(self, namespace: int, key: bytes, data: bytes) -> list[int]:
        """Store one block, in whatever pieces it takes; the states of its commit, empty without a frame."""
        lease, _ = self.reserve(namespace, key)
        for at in range(0, len(data) if lease else 0, 2 << 20):
            assert self.ask("write", lease, 0, at, payload=data[at : at + (2 << 20)]) == ["done"]
        return self.commit(lease) if lease else []

    def load(self, namespace: int, key: bytes, length: int) -> bytes:
        """The first bytes of one block, or nothing."""
        _, _, _, lease, *_ = self.ask("match", [namespace], key, 20_000)
        if not lease:
            return b""
        tag, _, data = self.ask("read", lease, namespace, 0, 0, length)
        assert (tag, self.ask("release", lease)) == ("payload", ["released", True])
        return bytes(data)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
