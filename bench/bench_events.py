"""The cost of KV events to the daemon for each stored block.

    python bench/bench_events.py

Two daemons in turn, one without events and one with them and with a subscriber. Blocks of 32 tokens are
reserved and committed without being copied, into an arena that is full, so that each also evicts one.

Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading

import zmq
from common import SEED, Daemon, Report, cpu_s, wait_populated

from tiercache.client.client import Client
from tiercache.protocol.keys import name_blocks
from tiercache.protocol.messages import KEY_BYTES, Commit, Reserve, pack_indices
from tiercache.protocol.namespaces import NamespaceSpec

WINDOW = 128
WINDOWS = 64
CHAINS = 8
BLOCKS = CHAINS * WINDOWS * WINDOW
ROUNDS = 7
BLOCK_SIZE = 32
SPEC = NamespaceSpec(engine="bench", layout="bytes", dtype="uint8", block_size=BLOCK_SIZE, block_bytes=4096)

_random = random.Random(SEED)


def store(client: Client, namespace: int, tokens: list[int]) -> None:
    """One chain, half as long as the arena, a window at a time, as a connector does."""
    wants, before, indices = client.wants_events, b"", pack_indices(list(range(WINDOW)))
    for _ in range(WINDOWS):
        keys = _random.randbytes(WINDOW * KEY_BYTES)
        events = name_blocks(before + keys, len(before) // KEY_BYTES, tokens) if wants else None
        fields = {"namespace": namespace, "parent": before, "keys": keys, "ttl_ms": 60_000, "events": events}
        lease = client.session().call(Reserve, **fields).lease
        states = client.session().call(Commit, lease=lease, blocks=indices).states
        assert states == bytes(WINDOW), "every block is visible"
        before = keys[-KEY_BYTES:]


def listen(endpoint: str, received: list[int]) -> None:
    """A subscriber, until the context of its socket ends."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    with socket:
        while socket.poll(5000):
            received[0] += len(socket.recv_multipart()[2])


def main() -> None:
    """Both daemons in turn."""
    report = Report("bench_events")
    tokens = [_random.randrange(150_000) for _ in range(WINDOW * BLOCK_SIZE)]
    costs: dict[str, list[float]] = {"off": [], "on": []}
    received = [0]
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as folder:
        endpoint = f"ipc://{folder}/events"
        with Daemon("64MiB") as off, Daemon("64MiB", kv_events=endpoint) as on:
            listener = threading.Thread(target=listen, args=(endpoint, received))
            listener.start()
            clients = {"off": (off, off.connect(map_arena=True)), "on": (on, on.connect(map_arena=True))}
            for turn in range(ROUNDS + 1):
                for name, (daemon, client) in clients.items():
                    wait_populated(client)
                    before = cpu_s(daemon.pid)
                    for _ in range(CHAINS):
                        store(client, client.register(SPEC), tokens)
                    if turn:  # the first one fills the arena
                        costs[name].append((cpu_s(daemon.pid) - before) / BLOCKS * 1e6)
            for _, client in clients.values():
                client.close()
        listener.join()
    ratios = [on / off for off, on in zip(costs["off"], costs["on"], strict=True)]
    for name, samples in costs.items():
        label = f"daemon's CPU for a block, events {name}"
        report.add(f"events_{name}_us", label, statistics.median(samples), "µs", samples=samples)
    report.add("events_ratio", "events on over off", statistics.median(ratios), samples=ratios)
    received_bytes = received[0] / BLOCKS / (ROUNDS + 1)
    report.add("events_bytes", "bytes published for a block, removal included", received_bytes)
    report.finish()


if __name__ == "__main__":
    main()
