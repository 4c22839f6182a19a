"""The cost of the HTTP port: an affinity query of 8192 tokens, and its effect on the daemon's other clients.

    .venv/bin/python bench/bench_http.py

Prints a table and, last, one line of JSON. Pings are compared within one run, in rounds that take turns: alone, beside
a process that sends 50 queries a second, and to another, idle daemon beside the same process: its slowdown is due to
the machine.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import re
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from common import Report, cpu_s, percentile, rss_besides_arena_bytes

import tiercache
from tiercache.client.client import Client
from tiercache.connectors.vllm.names import block_hashes, hash_seed, keys_of
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import ModelCard

TOKENS = 8192
BLOCK = 16
BLOCKS = TOKENS // BLOCK
SPEC = tiercache.NamespaceSpec(engine="bench/1", layout="x", dtype="uint8", block_size=BLOCK, block_bytes=4096)
QUERIES = 300
ROUNDS = 6
ROUND_S = 1.5
QUERIES_PER_S = 50
START_S = 10.0


class Port:
    """The daemon's HTTP port over one connection that stays open."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=10)

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        self._connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text.decode()}")
        return text

    def times_ms(self, count: int, path: str, body: bytes | None = None) -> list[float]:
        """Seconds of that many requests, one after the other."""
        took = []
        for _ in range(count):
            start_s = time.perf_counter()
            self.ask(path, body)
            took.append((time.perf_counter() - start_s) * 1e3)
        return took


def url_in(log: Path) -> str:
    """The address of the HTTP process, once it listens."""
    deadline_s = time.perf_counter() + START_S
    while not (found := re.search(r"serving (http://\S+) for", log.read_text())):
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"no HTTP: {log.read_text()}")
        time.sleep(0.01)
    return found[1]


def fill(address: str) -> tuple[tiercache.Connector, dict[str, bytes]]:
    """Chains with both kinds of hashes, and a query for each."""
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, SPEC.block_bytes), np.uint8))
    connector = tiercache.connect(address, namespace=SPEC, pool=pool, required=True)
    tokens, seed = list(range(TOKENS)), hash_seed("sha256")
    root = salted_root(content_id("bench"), "salt")
    chains = {
        "chain": tiercache.KeyChain(root, BLOCK, tokens).packed(),
        "vllm": keys_of(root, block_hashes("sha256", seed, tokens, BLOCK), 1, 0, BLOCKS),
    }
    for name, keys in chains.items():
        if connector.store(keys, range(BLOCKS)).stored != BLOCKS:
            raise RuntimeError(f"{name} could not be stored")
    names = [SPEC.fingerprint()]
    own = ModelCard(["chain"], content_id("bench"), names, BLOCK)
    vllm = ModelCard(["vllm"], content_id("bench"), names, BLOCK, "vllm/sha256", BLOCK, seed)
    connector.announce([own, vllm])
    queries = {name: json.dumps({"model": name, "tokens": tokens, "salt": "salt"}).encode() for name in chains}
    return connector, queries


def wait_known(port: Port, queries: dict[str, bytes]) -> None:
    deadline_s = time.perf_counter() + START_S
    for query in queries.values():
        while True:
            try:
                answer = json.loads(port.ask("/v1/affinity", query))
                break
            except RuntimeError:
                if time.perf_counter() > deadline_s:
                    raise
                time.sleep(0.05)
        if answer["matched"] != TOKENS:
            raise RuntimeError(f"matched {answer['matched']} of {TOKENS}")


def keep_asking(url: str, query: bytes, asking: Event) -> None:
    """Runs in its own process: sends `QUERIES_PER_S` while `asking` is set. Ends with its parent."""
    port = Port(url)
    while True:
        asking.wait()
        port.ask("/v1/affinity", query)
        time.sleep(1 / QUERIES_PER_S)


def pings_us(client: Client) -> list[float]:
    """Round trips every 2 ms for a round."""
    took, end_s = [], time.perf_counter() + ROUND_S
    while time.perf_counter() < end_s:
        took.append(client.ping() * 1e6)
        time.sleep(0.002)
    return took


def compare_pings(report: Report, address: str, idle: str, url: str, query: bytes) -> None:
    spawn = multiprocessing.get_context("spawn")
    asking = spawn.Event()
    asker = spawn.Process(target=keep_asking, args=(url, query, asking), daemon=True)
    asker.start()
    alone: list[float] = []
    beside: list[float] = []
    other: list[float] = []
    with (
        Client.connect(address, name="ping", map_arena=False) as client,
        Client.connect(idle, name="ping", map_arena=False) as idle_client,
    ):
        for _ in range(ROUNDS):
            asking.clear()
            time.sleep(0.1)
            alone += pings_us(client)
            asking.set()
            beside += pings_us(client)
            other += pings_us(idle_client)
    asker.terminate()
    asker.join()
    report.add("ping_p50_us", "ping, alone, p50", statistics.median(alone), "us")
    report.add("ping_p99_us", "ping, alone, p99", percentile(alone, 0.99), "us")
    for name, label, pings in (("ping", "ping", beside), ("idle_ping", "ping of an idle daemon", other)):
        for share in (0.5, 0.99):
            value = percentile(pings, share) / percentile(alone, share)
            text = f"{label} beside {QUERIES_PER_S} queries a second, p{share:.0%}".rstrip("%")
            report.add(f"{name}_p{share * 100:.0f}_ratio", text, value, "x alone")


def http_pid(client: Client) -> int:
    return next(int(session["pid"]) for session in client.stats()["sessions"] if session["name"] == "http")


def main() -> None:
    report = Report("bench_http")
    with (
        tiercache.launch("256MiB", region="64MiB", http="127.0.0.1:0") as daemon,
        tiercache.launch("64MiB") as idle,
        Client.connect(daemon.address, map_arena=False) as client,
    ):
        connector, queries = fill(daemon.address)
        with connector:
            url = url_in(Path(daemon.log))
            port = Port(url)
            wait_known(port, queries)
            child = http_pid(client)
            for name, query in queries.items():
                before = cpu_s(daemon.pid), cpu_s(child)
                took = port.times_ms(QUERIES, "/v1/affinity", query)
                cpu = [(cpu_s(pid) - was) / QUERIES * 1e3 for pid, was in zip((daemon.pid, child), before, strict=True)]
                report.add(
                    f"query_{name}_ms",
                    f"query of 8192 tokens, keys as {name}",
                    statistics.median(took),
                    "ms",
                    samples=took,
                )
                report.add(f"query_{name}_http_cpu_ms", "  CPU of the HTTP process", cpu[1], "ms")
                report.add(f"query_{name}_daemon_cpu_ms", "  CPU of the daemon, its sockets included", cpu[0], "ms")
            peek = client.stats()["latency"]["Peek"]
            report.add("peek_us_p50", "on the daemon's loop, p50", peek["p50_us"], "us")
            report.add("peek_us_p99", "on the daemon's loop, p99", peek["p99_us"], "us")
            compare_pings(report, daemon.address, idle.address, url, queries["vllm"])
            port = Port(url)  # the old connection was idle for too long
            for path in ("/healthz", "/metrics"):
                took = port.times_ms(QUERIES, path)
                report.add(f"{path[1:]}_ms", path, statistics.median(took), "ms", samples=took)
            report.add("http_mb", "memory of the HTTP process", rss_besides_arena_bytes(child) / 1e6, "MB")
    report.finish()


if __name__ == "__main__":
    main()
