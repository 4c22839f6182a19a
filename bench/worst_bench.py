"""What the cases of `bench_worst.py` share: a client that asks for the most that it may, and what a case is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from tiercache.client.client import Client
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.namespaces import NamespaceSpec

MAX_NAMESPACES = m.MAX_NAMESPACES_PER_REQUEST
TTL_MS = 60_000
WRITTEN_S = 60.0
FULL = 100_000
"""Blocks that are there when the index counts as full."""
LONG = m.MAX_KEYS
Act = Callable[[], Any]


def spec(name: str, *, block_bytes: int = 4096, window: int = 0, tokens: int = 16) -> NamespaceSpec:
    """A namespace of the smallest blocks."""
    return NamespaceSpec(
        engine=f"bench/{name}",
        layout="bytes",
        dtype="uint8",
        block_size=tokens,
        block_bytes=block_bytes,
        window_blocks=window,
    )


class Bench:
    """A client of the daemon, and its stored blocks."""

    def __init__(self, address: str, blocks: int, rng: random.Random, settings: Mapping[str, str]) -> None:
        self.settings = settings
        self.address = address
        self.blocks = blocks
        self.rng = rng
        self.client = self.connect()
        self.main = self.client.register(spec("main"))
        self.long = b""  # the keys of the longest chain
        self._others: list[Client] = []

    def connect(self, *, mapped: bool = True) -> Client:
        """Open another session."""
        return Client.connect(self.address, name="worst", map_arena=mapped, request_timeout_s=60.0)

    def more(self, count: int, *, mapped: bool = True) -> list[Client]:
        """Open `count` further sessions; they end with `drop_others`."""
        self._others += [self.connect(mapped=mapped) for _ in range(count)]
        return self._others[-count:]

    def drop_others(self) -> None:
        for client in self._others:
            client.close()
        self._others.clear()

    def call(self, request: type[m.AnyRequest], client: Client | None = None, **fields: Any) -> Any:
        """Send a request; a refusal is a valid answer."""
        try:
            return (client or self.client).call(request, timeout_s=60.0, **fields)
        except RequestRefused as refusal:
            return refusal

    def keys(self, count: int) -> bytes:
        return self.rng.randbytes(16 * count)

    def fill(self) -> None:
        """Every frame a block: one longest chain, some long ones, many short ones."""
        self.long = self.keys(LONG)
        self.store(self.main, self.long)
        left = self.blocks - LONG
        while left > 512:
            length = self.rng.choice((1, 1, 4, 16, 64, 512, 4096))
            self.store(self.main, self.keys(min(length, left)))
            left -= min(length, left)
        self.store(self.main, self.keys(1024))

    def store(self, namespace: int, keys: bytes, parent: bytes = b"", commit: bool = True) -> list[int]:
        """A chain; returns the leases where it is not committed."""
        leases = []
        for start in range(0, len(keys), 16 * m.MAX_RESERVE):
            part = keys[start : start + 16 * m.MAX_RESERVE]
            reply = self.call(m.Reserve, namespace=namespace, parent=parent, keys=part, ttl_ms=TTL_MS)
            if not isinstance(reply, m.Reserved):
                break
            if commit and reply.lease:
                self.call(m.Commit, lease=reply.lease, blocks=m.pack_indices(list(range(len(part) // 16))))
            leases.append(reply.lease)
            parent = part[-16:]
        return leases

    def many(self, name: str, count: int = MAX_NAMESPACES, window: int = 0, block_bytes: int = 4096) -> list[int]:
        """So many namespaces."""
        specs = [spec(f"{name}/{number}", window=window, block_bytes=block_bytes) for number in range(count)]
        return [self.client.register(one) for one in specs]

    def stats(self) -> dict[str, Any]:
        return self.client.stats()

    def written(self) -> None:
        """Wait until all that is to be written is on NVMe."""
        deadline_s = time.monotonic() + WRITTEN_S
        while time.monotonic() < deadline_s:
            nvme = self.stats()["tiers"]["nvme"]
            if not nvme["write_queue_blocks"] + nvme["write_in_flight_bytes"]:
                return
            time.sleep(0.1)

    def blocks_left(self, least: int) -> bool:
        """Whether that many blocks are still there."""
        return cast(int, self.stats()["tiers"]["dram"]["blocks"]) >= least

    def settle(self, timeout_s: float) -> None:
        """Wait until deferred work is done: nothing waits to be freed, and counters stand still."""
        deadline_s, before = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline_s:
            stats = self.stats()
            now = stats["tiers"]["dram"], stats["leases"], stats["arena"]["used_bytes"]
            if now == before:
                return
            before = now
            time.sleep(0.1)

    def run(self, act: Act, timeout_s: float) -> None:
        """Run a case, and wait until the work that it leaves behind is done."""
        act()
        self.settle(timeout_s)

    def check(self) -> list[str]:
        """The findings of the daemon's own check."""
        self.drop_others()
        self.settle(10.0)
        reply = self.call(m.Check, force=True)
        return cast("list[str]", reply.findings) if isinstance(reply, m.CheckReply) else []

    def close(self) -> None:
        self.drop_others()
        self.client.close()


class Case(NamedTuple):
    """`prepare` makes ready what is not measured, and returns what is. `needs`: a setting that has to be there."""

    name: str
    label: str
    prepare: Callable[[Bench], Act]
    least_blocks: int = 0
    needs: str = ""
