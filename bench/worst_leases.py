"""Loads and stores under way: many of them, and all that ends with them."""

from __future__ import annotations

import time
from typing import Any

from worst_bench import FULL, TTL_MS, Act, Bench, Case, spec

from tiercache.protocol import messages as m


def _leases(bench: Bench, clients: int, **fields: Any) -> None:
    keys = bench.long[: 16 * 2000]
    for client in bench.more(clients):
        for count in range(1, 1025):
            part = keys[: 16 * (count + 900)]
            bench.call(m.Match, client, namespaces=[bench.main], keys=part, **{"ttl_ms": TTL_MS, **fields})


def _session_ends(bench: Bench) -> Act:
    _leases(bench, 16)
    return bench.drop_others


def _leases_expire(bench: Bench) -> Act:
    _leases(bench, 8, ttl_ms=1500)
    return lambda: time.sleep(2.5)


def _flush_below_leases(bench: Bench) -> Act:
    _leases(bench, 16)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[:16])
        time.sleep(0.5)

    return act


def _pending_chain(bench: Bench) -> tuple[list[int], int]:
    """A long chain of which all but the first run is complete."""
    number = bench.client.register(spec("pending"))
    leases = bench.store(number, bench.keys(60_000), commit=False)
    for lease in leases[1:]:
        bench.call(m.Commit, lease=lease, blocks=m.pack_indices(list(range(m.MAX_RESERVE))))
    return leases, number


def _commit_releases_many(bench: Bench) -> Act:
    leases, _ = _pending_chain(bench)
    return lambda: bench.call(m.Commit, lease=leases[0], blocks=m.pack_indices(list(range(m.MAX_RESERVE))))


def _abort_drops_many(bench: Bench) -> Act:
    leases, _ = _pending_chain(bench)
    return lambda: bench.call(m.Abort, lease=leases[0], finished=True)


def _flush_drops_many(bench: Bench) -> Act:
    leases, number = _pending_chain(bench)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")
        bench.call(m.Abort, lease=leases[0], finished=True)

    return act


def _store_full(bench: Bench) -> Act:
    return lambda: [bench.store(bench.main, bench.keys(512)) for _ in range(100)]


def _store_other_size(bench: Bench) -> Act:
    number = bench.client.register(spec("large", block_bytes=1 << 20))
    return lambda: [bench.store(number, bench.keys(1)) for _ in range(200)]


def _store_large_after_small(bench: Bench) -> Act:
    """As many small blocks as the window of new ones has, each a chain; then large ones push them out."""
    number = bench.client.register(spec("pushing", block_bytes=1 << 20))
    for _ in range(20_000):
        bench.store(bench.main, bench.keys(1))
    return lambda: [bench.store(number, bench.keys(16)) for _ in range(30)]


def _renew_wide(bench: Bench) -> Act:
    """All leases of a session, each on windows of 2048 blocks, after something was dropped."""
    number = bench.many("renewed", 1, window=2048)[0]
    bench.store(number, bench.long[: 16 * 2048])
    leases = []
    for _ in range(500):
        reply = bench.call(m.Match, namespaces=[number], keys=bench.long[: 16 * 2048], ttl_ms=TTL_MS)
        leases.append(reply.lease)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[16 * 60_000 : 16 * 60_001])
        bench.call(m.Renew, leases=leases, ttl_ms=TTL_MS)
        for lease in leases:
            bench.call(m.Release, lease=lease)

    return act


def _leases_of_one_session(bench: Bench) -> Act:
    client = bench.more(1)[0]
    for _ in range(50_000):
        bench.call(m.Match, client, namespaces=[bench.main], keys=bench.long[:16], ttl_ms=TTL_MS)
    return bench.drop_others


def _write_leases_end(bench: Bench) -> Act:
    # Without the arena: what mapped clients leave is in quarantine until this process ends.
    for client in bench.more(8, mapped=False):
        for _ in range(64):
            bench.call(m.Reserve, client, namespace=bench.main, parent=b"", keys=bench.keys(512), ttl_ms=TTL_MS)
    return bench.drop_others


CASES = (
    Case("session_ends", "16 sessions with 1024 leases each end", _session_ends, FULL),
    Case("leases_expire", "8192 leases expire within a moment", _leases_expire, FULL),
    Case("flush_below_leases", "flush a chain that 16384 leases hold", _flush_below_leases, FULL),
    Case("commit_releases_many", "commit a run that 60000 blocks wait for", _commit_releases_many, FULL),
    Case("abort_drops_many", "abort a run that 60000 blocks wait for", _abort_drops_many, FULL),
    Case("flush_drops_many", "flush a namespace with 60000 pending blocks", _flush_drops_many, FULL),
    Case("store_full", "reserve and commit 512 blocks, all full", _store_full, FULL),
    Case("store_other_size", "store blocks of another size, all full", _store_other_size, FULL),
    Case("store_large_after_small", "small new blocks, then large ones", _store_large_after_small, FULL),
    Case("write_leases_end", "8 sessions with 64 stores of 512 blocks each end", _write_leases_end, FULL),
    Case("renew_wide", "renew 500 leases of 2048 pins after a drop", _renew_wide, FULL),
    Case("many_leases", "a session with 50000 leases ends", _leases_of_one_session, FULL, "max_leases_per_session"),
)
