"""What the daemon keeps and tells beside blocks: answers, settings, models, statistics, events."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec
import zmq
from worst_bench import FULL, TTL_MS, Act, Bench, Case, spec

from tiercache.protocol import messages as m


def _set_quota(bench: Bench) -> Act:
    """Limits for very many tenants, beside very many namespaces."""
    bench.many("many", 3000)
    text = ",".join(f"tenant-{number}=1GiB" for number in range(1000))

    def act() -> None:
        bench.call(m.ChangeSetting, key="quota", value=text)
        bench.stats()
        bench.store(bench.main, bench.keys(512))
        bench.call(m.ChangeSetting, key="quota", value="")
        bench.call(m.Settings)

    return act


def _models(bench: Bench) -> Act:
    """Of as many sessions as there may be, each with as many models as it may have."""
    for number, client in enumerate(bench.more(50)):
        cards = [m.ModelCard([f"{number}-{card}-{'x' * 200}"], bytes(16), ["0" * 32], 16) for card in range(100)]
        bench.call(m.Report, client, registration="none", counters={}, models=cards)

    def act() -> None:
        for _ in range(3):
            bench.call(m.Models)
        bench.drop_others()

    return act


def _unread(bench: Bench) -> Act:
    """As many answers as one process may leave unread, over many connections."""
    bench.store(bench.main, keys := bench.keys(1))
    sockets, requests = [], []
    for client in bench.more(40):
        lease = bench.call(m.Match, client, namespaces=[bench.main], keys=keys, ttl_ms=TTL_MS).lease
        session = client.session()
        for _ in range(8):
            sock = zmq.Context.instance().socket(zmq.DEALER)
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                sock.set(option, value)
            sock.connect(f"ipc://{bench.address}/control.sock")
            sockets.append(sock)
            deadline_us = time.monotonic_ns() // 1000 + 60_000_000
            asked = m.Read(1, session.welcome.session, session.generation, deadline_us, lease, bench.main, 0, 0, 4096)
            requests.append(msgspec.msgpack.encode(asked))

    def act() -> None:
        for _ in range(60):
            for sock, request in zip(sockets, requests, strict=True):
                with suppress(zmq.Again):
                    sock.send(request, zmq.NOBLOCK)
            time.sleep(0.02)
        for sock in sockets:
            sock.close()
        bench.drop_others()

    return act


def _events(bench: Bench) -> Act:
    """Stores with as many tokens as a message holds; then all are forgotten."""
    tokens = 900
    number = bench.client.register(spec("events", tokens=tokens))
    short = bench.client.register(spec("short events"))

    def store(namespace: int, size: int) -> None:
        hashes: list[int | bytes] = [bench.rng.randbytes(32) for _ in range(512)]
        run = m.EventRun(hashes, None, bytes(4 * size * 512))
        keys = bench.keys(512)
        lease = bench.call(m.Reserve, namespace=namespace, parent=b"", keys=keys, ttl_ms=TTL_MS, events=run).lease
        bench.call(m.Commit, lease=lease, blocks=m.pack_indices(list(range(512))))

    for _ in range(200):
        store(short, 16)

    def act() -> None:
        for _ in range(30):
            store(number, tokens)
        time.sleep(0.3)
        bench.call(m.Flush, tier="all", namespaces=[], key=b"")

    return act


def _stats(bench: Bench) -> Act:
    bench.many("many", 3000)
    for client in bench.more(40):
        counters = {f"counter_{number}": number for number in range(64)}
        bench.call(m.Report, client, registration="none", counters=counters)

    def act() -> None:
        for _ in range(3):
            bench.client.stats(histograms=True, hot_prefixes=1000)
        bench.drop_others()

    return act


def _inspect(bench: Bench) -> Act:
    return lambda: [
        bench.call(m.Inspect, namespaces=[], key=bench.long[-16:], chain=True),
        bench.call(m.Inspect, namespaces=[bench.main], key=bench.long[-16:], chain=True),
    ]


def _decode(bench: Bench) -> Act:
    """As many small values as fit into a message."""

    def act() -> None:
        bench.call(m.Renew, leases=[1] * 2_000_000, ttl_ms=1000)
        bench.call(m.Match, namespaces=[1] * 2_000_000, keys=bytes(16))
        bench.call(m.Flush, tier="dram", namespaces=[1] * 2_000_000, key=bytes(16))

    return act


def _check(bench: Bench) -> Act:
    return lambda: bench.call(m.Check, force=True)


CASES = (
    Case("unread", "4096 unread answers over 320 connections", _unread),
    Case("set_quota", "quotas of 1000 tenants, 3000 namespaces", _set_quota),
    Case("models", "5000 models of 50 sessions", _models),
    Case("stats", "stats with all lists full", _stats),
    Case("inspect", "inspect the end of 65536 blocks, its chain", _inspect, FULL),
    Case("decode", "messages of 2 million values", _decode),
    Case("check", "check the books", _check, FULL),
    Case("events", "stores of 460,000 tokens, then all forgotten", _events, needs="kv_events"),
)
