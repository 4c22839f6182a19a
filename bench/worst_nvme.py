"""The tier below: what is offered to it, comes up from it, and is reserved on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from worst_bench import FULL, TTL_MS, Act, Bench, Case, spec

from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m


def _match_new_chains(bench: Bench) -> Act:
    """Chains that are in DRAM alone: what is asked for again is offered for writing."""
    bench.written()
    numbers = bench.many("new")  # the same in each round: a daemon has room for 4096
    for number in numbers:
        bench.store(number, bench.long[: 16 * 300])
    bench.call(m.Flush, tier="nvme", namespaces=numbers, key=b"")

    def act() -> None:
        for _ in range(3):
            bench.call(m.Match, namespaces=numbers, keys=bench.long)

    return act


def _promote(window: int, blocks: int) -> Callable[[Bench], Act]:
    def prepare(bench: Bench) -> Act:
        number = bench.many(f"promoted {window}", 1, window=window)[0]
        keys = bench.keys(blocks)
        bench.store(number, keys)
        bench.written()
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")

        def act() -> None:
            asked = {"namespaces": [number], "keys": keys, "ttl_ms": TTL_MS, "promote": True}
            leases = [bench.call(m.Match, **asked).lease for _ in range(16)]
            waiting = []
            for client in bench.more(16):
                lease = bench.call(m.Match, client, **asked).lease
                for _ in range(60):
                    wanted = {"lease": lease, "namespace": number, "first": blocks - 1, "count": 1}
                    waiting.append((client, client.session().post(m.Resolve, 30.0, **wanted)))
            for client, pending in waiting:
                with suppress(RequestRefused):
                    client.session().wait(pending)
            for lease in leases:
                bench.call(m.Release, lease=lease)

        return act

    return prepare


def _grants_end(bench: Bench) -> Act:
    """Places on NVMe that clients have reserved, when their sessions end."""
    granted = spec("granted")
    bench.client.expect(granted, direct=True)
    number = bench.client.register(granted)
    for client in bench.more(4):
        for _ in range(100):
            keys = bench.keys(128)
            bench.call(m.ReserveExtents, client, namespace=number, parent=b"", keys=keys, ttl_ms=TTL_MS)
    return bench.drop_others


CASES = (
    Case("match_new_chains", "match of 256 chains that NVMe lacks", _match_new_chains, FULL, "nvme"),
    Case("promote_chain", "16000 blocks come up for 32 leases, 960 wait", _promote(0, 16_000), FULL, "nvme"),
    Case("promote_window", "a window of 2048 comes up for 32 leases", _promote(2048, 2048), FULL, "nvme"),
    Case("grants_end", "400 stores past DRAM end with their sessions", _grants_end, 0, "nvme"),
)
