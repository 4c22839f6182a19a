"""What the daemon costs: latency, CPU, memory, and how fast it starts.

    python bench/bench_daemon.py            # all of it
    python bench/bench_daemon.py requests   # only what two requests of an engine cost

Latencies are those of a client in another process, by the client's own call, back to back. Blocks
are 4096 bytes and are reserved and committed without being copied: only the daemon is measured.

Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from common import (
    ROOT,
    SEED,
    Daemon,
    PingWatch,
    Report,
    available_bytes,
    cpu_s,
    percentile,
    rss_besides_arena_bytes,
    threads_cpu_us,
    wait_populated,
)

import tiercache
from tiercache.client.client import Client
from tiercache.protocol import messages
from tiercache.protocol.keys import KeyChain, root_key
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE
from tiercache.protocol.namespaces import NamespaceSpec

MIB = 1 << 20
BLOCK_BYTES = 4096
TTL_MS = 60_000
WINDOW = MAX_RESERVE
CHAIN_BLOCKS = 8192
RSS_STEPS = (200_000, 1_000_000)
POPULATE_BYTES = 4 << 30
CONTEXT_TOKENS = 131_072
CLIENTS = 4
CLIENTS_S = 2.0
ROUNDS, CALLS = 60, 25
"""Each figure of `requests` is the median of so many rounds, of so many calls each."""

_random = random.Random(SEED)


def spec() -> NamespaceSpec:
    """The smallest possible blocks."""
    return NamespaceSpec(engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=BLOCK_BYTES)


def store_chain(client: Client, namespace: int, keys: bytes) -> None:
    """Publish a chain without writing any byte of it."""
    parent = b""
    for start in range(0, len(keys), WINDOW * KEY_BYTES):
        part = keys[start : start + WINDOW * KEY_BYTES]
        reserved = cast(
            messages.Reserved,
            client.call(messages.Reserve, namespace=namespace, parent=parent, keys=part, ttl_ms=TTL_MS),
        )
        count = len(part) // KEY_BYTES
        if len(reserved.frames) != 8 * count:
            raise RuntimeError("the arena is too small for this benchmark")
        blocks = messages.pack_indices(list(range(count)))
        client.call(messages.Commit, lease=reserved.lease, blocks=blocks)
        parent = part[-KEY_BYTES:]


def timed(rounds: int, call: Callable[[], Any], after: Callable[[Any], Any] | None = None) -> list[float]:
    """Seconds of each of `rounds` calls; `after` gets each result, outside of the timing."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        if after is not None:
            after(result)
    return times


def latencies(report: Report, daemon: Daemon) -> None:
    """Pings, matches and resolves of one client."""
    with daemon.connect(map_arena=True) as client:
        wait_populated(client)
        namespace = client.register(spec())
        keys = _random.randbytes(CHAIN_BLOCKS * KEY_BYTES)
        store_chain(client, namespace, keys)
        timed(300, client.ping)
        pings = [seconds * 1e6 for seconds in timed(3000, client.ping)]
        report.add("ping_us_p50", "ping, p50", statistics.median(pings), "µs", at_most=100, samples=pings)
        report.add("ping_us_p99", "ping, p99", percentile(pings, 0.99), "µs")

        def match(wanted: bytes) -> messages.Matched:
            reply = client.call(messages.Match, namespaces=[namespace], keys=wanted, ttl_ms=TTL_MS)
            return cast(messages.Matched, reply)

        def release(reply: messages.Matched) -> None:
            if reply.lease:
                client.call(messages.Release, lease=reply.lease)

        misses = _random.randbytes(len(keys))
        for blocks, limit_ms in ((512, 0.12), (8192, 0.25)):
            length = blocks * KEY_BYTES
            half = keys[: length // 2] + misses[: length - length // 2]
            for kind, wanted in (("", keys[:length]), ("_half", half), ("_miss", misses[:length])):
                milliseconds = [seconds * 1e3 for seconds in timed(400, partial(match, wanted), release)]
                label = f"match {blocks} keys, " + {"": "all there", "_half": "half there", "_miss": "none there"}[kind]
                median = statistics.median(milliseconds)
                report.add(f"match_{blocks}{kind}_ms_p50", label, median, "ms", at_most=limit_ms, samples=milliseconds)
        held = match(keys)

        def resolve() -> messages.Reply:
            return client.call(messages.Resolve, lease=held.lease, namespace=namespace, first=4096, count=512)

        milliseconds = [seconds * 1e3 for seconds in timed(400, resolve)]
        median = statistics.median(milliseconds)
        report.add("resolve_512_ms_p50", "resolve 512 frames", median, "ms", at_most=0.25, samples=milliseconds)
        release(held)
        _server_cpu(report, daemon, match, release, keys)
        _write_costs(report, client, namespace)


def _server_cpu(
    report: Report,
    daemon: Daemon,
    match: Callable[[bytes], messages.Matched],
    release: Callable[[messages.Matched], None],
    keys: bytes,
) -> None:
    """CPU of the daemon for each match of 8192 keys with a lease."""
    costs = []
    for _ in range(5):
        before = cpu_s(daemon.pid)
        leases = [match(keys) for _ in range(900)]
        costs.append((cpu_s(daemon.pid) - before) / len(leases) * 1e3)
        for lease in leases:
            release(lease)
    report.add(
        "match_8192_server_cpu_ms",
        "match 8192 keys, daemon's CPU",
        statistics.median(costs),
        "ms",
        at_most=0.15,
        samples=costs,
    )


def _write_costs(report: Report, client: Client, namespace: int) -> None:
    """Reserve and commit of 512 blocks."""
    reserves, commits = [], []
    parent = b""
    for _ in range(32):
        keys = _random.randbytes(512 * KEY_BYTES)
        start = time.perf_counter()
        reply = client.call(messages.Reserve, namespace=namespace, parent=parent, keys=keys, ttl_ms=TTL_MS)
        middle = time.perf_counter()
        reserved = cast(messages.Reserved, reply)
        blocks = messages.pack_indices(list(range(512)))
        client.call(messages.Commit, lease=reserved.lease, blocks=blocks)
        commits.append((time.perf_counter() - middle) * 1e3)
        reserves.append((middle - start) * 1e3)
        parent = keys[-KEY_BYTES:]
    report.add("reserve_512_ms_p50", "reserve 512 blocks", statistics.median(reserves), "ms", samples=reserves)
    report.add("commit_512_ms_p50", "commit 512 blocks", statistics.median(commits), "ms", samples=commits)


def hashing(report: Report) -> None:
    """CPU of hashing 128K tokens into the keys of blocks of 16."""
    tokens = [_random.randrange(150_000) for _ in range(CONTEXT_TOKENS)]
    for key, label, given, limit in (
        ("hash_128k_ms", "hash 128K tokens, a list", tokens, 8.0),
        ("hash_128k_array_ms", "hash 128K tokens, a numpy array", np.array(tokens, np.int32), 8.0),
    ):
        costs = []
        for _ in range(15):
            before = time.process_time()
            chain = KeyChain(root_key("bench"), 16, given)
            costs.append((time.process_time() - before) * 1e3)
        assert len(chain) == CONTEXT_TOKENS // 16
        report.add(key, label, statistics.median(costs), "ms CPU", at_most=limit, samples=costs)


# --- what an engine does ---------------------------------------------------------------------------


def requests(report: Report) -> None:
    """A load of one block, and a match of 8192 keys, by the connector: CPU of both processes, and round trips."""
    for name, blocks, block_bytes in (("load_one", 1, 128 << 10), ("match_8192", CHAIN_BLOCKS, BLOCK_BYTES)):
        with Daemon("64MiB") as daemon, daemon.connect() as watch:
            wait_populated(watch)
            form = NamespaceSpec(engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=block_bytes)
            pool = tiercache.Pool.from_blocks(np.ones((blocks, block_bytes), np.uint8))
            with tiercache.connect(daemon.directory, namespace=form, pool=pool, required=True) as connector:
                keys = _random.randbytes(blocks * KEY_BYTES)
                store_chain(connector.client, connector.client.register(form), keys)

                def call(connector: tiercache.Connector = connector, keys: bytes = keys) -> None:
                    match = connector.match(keys)
                    if len(keys) == KEY_BYTES:
                        assert connector.load(match, [0]) == 1
                    else:
                        assert match.blocks == len(keys) // KEY_BYTES
                        connector.release(match)

                timed(100, call)
                _costs_of(report, name, call, daemon, watch)


def _costs_of(report: Report, name: str, call: Callable[[], None], daemon: Daemon, watch: Client) -> None:
    """What one call costs; `watch` is another client."""
    label = {"load_one": "load of one 128 KiB block", "match_8192": "match and release of 8192 keys"}[name]
    before = watch.stats()["counters"]["requests"]
    timed(CALLS, call)
    trips = (watch.stats()["counters"]["requests"] - before - 1) / CALLS
    ours, theirs, took = [], [], []
    for _ in range(ROUNDS):
        our_start, their_start = threads_cpu_us(os.getpid()), threads_cpu_us(daemon.pid)
        took += timed(CALLS, call)
        ours.append((threads_cpu_us(os.getpid()) - our_start) / CALLS)
        theirs.append((threads_cpu_us(daemon.pid) - their_start) / CALLS)
    report.add(f"{name}_us_p50", f"{label}, p50", statistics.median(took) * 1e6, "µs")
    report.add(f"{name}_client_cpu_us", "  CPU of the client", statistics.median(ours), "µs", samples=ours)
    report.add(f"{name}_daemon_cpu_us", "  CPU of the daemon", statistics.median(theirs), "µs", samples=theirs)
    report.add(f"{name}_round_trips", "  round trips", trips, "")


# --- several clients -------------------------------------------------------------------------------


def client_main(argument: str) -> None:
    """One of several clients: matches and pings until its time is up, then reports its latencies."""
    order = json.loads(argument)
    keys = bytes.fromhex(order["keys"])
    pings, matches = [], []
    with Client.connect(order["address"], name="bench", map_arena=False, request_timeout_s=5.0) as client:
        namespace = client.register(spec())
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.perf_counter() + CLIENTS_S
        while time.perf_counter() < end:
            for _ in range(8):
                pings.append(client.ping() * 1e6)
            start = time.perf_counter()
            reply = client.call(messages.Match, namespaces=[namespace], keys=keys, ttl_ms=TTL_MS)
            matches.append((time.perf_counter() - start) * 1e3)
            lease = cast(messages.Matched, reply).lease
            client.call(messages.Release, lease=lease)
    print(json.dumps([pings, matches]), flush=True)


def several_clients(report: Report, daemon: Daemon) -> None:
    """Four busy clients, each in its own process."""
    keys = _random.randbytes(512 * KEY_BYTES)
    with daemon.connect(map_arena=True) as client:
        store_chain(client, client.register(spec()), keys)
    order = json.dumps({"address": daemon.directory, "keys": keys.hex()})
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--client", order],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(CLIENTS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate(timeout=30)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    pings = [value for answer in answers for value in answer[0]]
    matches = [value for answer in answers for value in answer[1]]
    requests = len(pings) + 2 * len(matches)
    report.add("ping_4_clients_us_p50", "4 clients: ping, p50", statistics.median(pings), "µs", samples=pings)
    report.add("match_512_4_clients_ms_p50", "4 clients: match 512 keys, p50", statistics.median(matches), "ms")
    report.add("requests_per_s_4_clients", "4 clients: requests per second", requests / CLIENTS_S, "1/s")


# --- start and memory --------------------------------------------------------------------------------


def first_answer(report: Report) -> None:
    """From exec to the first answered ping, for a small and a large arena."""
    times = []
    large = min(8 << 30, available_bytes() * 3 // 4) // MIB
    for arena in ("64MiB", f"{large}MiB", "64MiB"):
        with Daemon(arena) as daemon, daemon.connect():
            times.append(time.perf_counter() - daemon.started_s)
    report.add("first_answer_s", f"exec to first answer, 64 MiB and {large} MiB", max(times), "s", at_most=0.5)
    report.add("first_answer_64mib_s", "  64 MiB alone", min(times[0], times[2]), "s")


def populating(report: Report) -> None:
    """Pings back to back from the first answer on, until 4 GiB have their memory."""
    arena = min(POPULATE_BYTES, available_bytes() // 2) // MIB
    if arena * MIB < POPULATE_BYTES:
        report.note(f"populating: {arena} MiB instead of 4096, for lack of memory")
    pings = []
    with Daemon(f"{arena}MiB") as daemon, daemon.connect() as client:
        start = time.perf_counter()
        complete = False
        while not complete and time.perf_counter() - start < 30:
            pings += [client.ping() * 1e3 for _ in range(200)]
            state = client.stats()["arena"]
            complete = state["populated_bytes"] >= state["bytes"]
        took = time.perf_counter() - start
    value = percentile(pings, 0.99)
    report.add("ping_p99_ms_while_populating", f"ping p99 while {arena} MiB are populated", value, "ms", at_most=1.0)
    report.add("populate_s", "  that took", took, "s")
    report.add("populate_worst_ping_ms", "  worst ping", max(pings), "ms", at_most=100.0)


def memory(report: Report) -> None:
    """Resident memory besides the arena: empty, and for each block of a large index."""
    room = int(available_bytes() * 0.6) // BLOCK_BYTES
    steps = sorted({min(step, room) for step in RSS_STEPS})
    arena = (steps[-1] + 2 * WINDOW) * BLOCK_BYTES // MIB + 2
    with Daemon(f"{arena}MiB") as daemon, daemon.connect(map_arena=True) as client:
        wait_populated(client)
        namespace = client.register(spec())
        empty = rss_besides_arena_bytes(daemon.pid)
        report.add("rss_empty_mb", "resident besides the arena, empty", empty / 1e6, "MB", at_most=60)
        stored, start = 0, time.perf_counter()
        with PingWatch(daemon.directory) as pings:
            for step in steps:
                while stored < step:
                    count = min(CHAIN_BLOCKS, step - stored)
                    store_chain(client, namespace, _random.randbytes(count * KEY_BYTES))
                    stored += count
                each = (rss_besides_arena_bytes(daemon.pid) - empty) / stored
                key = "bytes_per_block" if step == steps[-1] else f"bytes_per_block_{step // 1000}k"
                report.add(key, f"bytes per block with {stored} in the index", each, "B", at_most=250)
        each_us = (time.perf_counter() - start) / stored * 1e6
        report.add("publish_us_per_block", "reserve and commit of each of them", each_us, "µs")
        report.add("worst_ping_ms", "worst ping while these were published", pings.worst_ms, "ms", at_most=100.0)


def main() -> None:
    """All of it, one daemon after another."""
    report = Report("bench_daemon")
    requests(report)
    if sys.argv[1:] != ["requests"]:
        hashing(report)
        first_answer(report)
        with Daemon("192MiB") as daemon:
            latencies(report, daemon)
            several_clients(report, daemon)
        populating(report)
        memory(report)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        sys.path.insert(0, str(Path(__file__).parent))
        client_main(sys.argv[2])
    else:
        main()
