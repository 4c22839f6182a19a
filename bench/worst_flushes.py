"""Flushes of very many blocks or namespaces, and what comes right behind them."""

from __future__ import annotations

from worst_bench import FULL, Act, Bench, Case, spec

from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES


def _flush_then_store_other_size(bench: Bench) -> Act:
    number = bench.client.register(spec("larger", block_bytes=2 << 20))

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=b"")
        for _ in range(20):
            bench.store(number, bench.keys(1))

    return act


def _flush_then_match(bench: Bench) -> Act:
    numbers = [bench.main, *bench.many("chains")[1:]]

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[16 * 60_000 : 16 * 60_001])
        for _ in range(10):
            bench.call(m.Match, namespaces=numbers[:1], keys=bench.long)
            bench.call(m.Match, namespaces=numbers, keys=bench.long)

    return act


def _flush_all(bench: Bench) -> Act:
    bench.many("many", 3000)
    return lambda: bench.call(m.Flush, tier="dram", namespaces=[], key=b"")


def _flush_each(bench: Bench) -> Act:
    """A block in each of very many namespaces."""
    for number in bench.many("many", 3000):
        bench.store(number, bench.keys(1))
    return lambda: bench.call(m.Flush, tier="all", namespaces=[], key=b"")


def _flush_key(bench: Bench) -> Act:
    """The first block of chains in very many namespaces."""
    keys = bench.keys(4)
    for number in bench.many("many", 1000):
        bench.store(number, keys)
    return lambda: bench.call(m.Flush, tier="all", namespaces=[], key=keys[:KEY_BYTES])


CASES = (
    Case("flush_then_match", "flush a chain's end, then match 65536 keys", _flush_then_match, FULL),
    Case("flush_then_store", "flush everything, then store another size", _flush_then_store_other_size, FULL),
    Case("flush_all", "flush 3000 namespaces", _flush_all, FULL),
    Case("flush_each", "flush 3000 namespaces with a block each", _flush_each),
    Case("flush_key", "flush a key of 1000 namespaces", _flush_key),
)
