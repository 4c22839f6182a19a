"""Look-ups of many keys in many namespaces, hints and pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worst_bench import FULL, LONG, TTL_MS, Act, Bench, Case, spec

from tiercache.protocol import messages as m


def _match(namespaces: Callable[[Bench], list[int]], keys: Callable[[Bench], bytes], **fields: Any) -> Any:
    def prepare(bench: Bench) -> Act:
        numbers, its = namespaces(bench), keys(bench)

        def act() -> None:
            for _ in range(3):
                reply = bench.call(m.Match, namespaces=numbers, keys=its, **{"ttl_ms": TTL_MS, **fields})
                if isinstance(reply, m.Matched) and reply.lease:
                    bench.call(m.Release, lease=reply.lease)

        return act

    return prepare


def _main(bench: Bench) -> list[int]:
    return [bench.main]


def _long(bench: Bench) -> bytes:
    return bench.long


def _random(bench: Bench) -> bytes:
    return bench.keys(LONG)


def _zero_words(bench: Bench) -> bytes:
    return b"".join(bench.rng.randbytes(4) + bytes(4) + bench.rng.randbytes(8) for _ in range(LONG))


def _chains(bench: Bench) -> list[int]:
    """256 namespaces, each with the same chain of 300 blocks."""
    numbers = bench.many("chains")
    for number in numbers:
        bench.store(number, bench.long[: 16 * 300])
    return numbers


def _windows_with_one_block(bench: Bench) -> list[int]:
    numbers = bench.many("windows", window=1)
    for number in numbers:
        bench.store(number, bench.keys(1))
    return numbers


def _one_window(bench: Bench) -> list[int]:
    return _windows_with_one_block(bench)[:1]


def _thousand(bench: Bench) -> bytes:
    return bench.long[: 16 * 1024]


def _wide_windows(bench: Bench) -> list[int]:
    """32 namespaces with windows of 512 blocks, all there."""
    numbers = bench.many("wide", 32, window=512)
    for number in numbers:
        bench.store(number, bench.long[: 16 * 1024])
    return numbers


def _peek(namespaces: Callable[[Bench], list[int]], keys: Callable[[Bench], bytes]) -> Any:
    def prepare(bench: Bench) -> Act:
        numbers, its = namespaces(bench), keys(bench)
        return lambda: bench.call(m.Peek, namespaces=numbers, keys=its)

    return prepare


def _prefetch(bench: Bench) -> Act:
    numbers = _chains(bench)
    return lambda: bench.call(m.Prefetch, namespaces=numbers, keys=bench.long)


def _hint(bench: Bench) -> Act:
    numbers = [bench.main, *_chains(bench)[1:]]

    def act() -> None:
        bench.call(m.Hint, namespaces=numbers, keys=bench.long, return_in_ms=1000)
        bench.call(m.Hint, namespaces=[bench.main], keys=bench.long, ttl_ms=1)

    return act


def _pin_long(bench: Bench) -> Act:
    def act() -> None:
        bench.call(m.Pin, namespaces=[bench.main], keys=bench.long, ttl_ms=TTL_MS)
        bench.call(m.Unpin, namespaces=[bench.main], keys=bench.long)

    return act


def _many_pins(bench: Bench) -> Act:
    """As many pins as there can be, each on a chain of one block."""
    number = bench.client.register(spec("pins"))
    keys = [bench.keys(1) for _ in range(17_000)]
    for key in keys:
        bench.store(number, key)
        bench.call(m.Pin, namespaces=[number], keys=key, ttl_ms=TTL_MS)

    def act() -> None:
        for _ in range(3):
            bench.call(m.Pins)
            bench.stats()
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")

    return act


CASES = (
    Case("match_long", "match, 65536 keys, all there", _match(_main, _long), FULL),
    Case("match_miss", "match, 65536 keys, none there", _match(_main, _random), FULL),
    Case("match_zero_words", "match, 65536 keys with zero words", _match(_main, _zero_words), FULL),
    Case("match_256_chains", "match, 256 namespaces, 512 frames of each", _match(_chains, _long, resolve=512), FULL),
    Case("match_window", "match, 65536 keys, a window of 1", _match(_one_window, _random)),
    Case("match_256_windows", "match, 65536 keys, 256 windows of 1", _match(_windows_with_one_block, _random)),
    Case("peek_256_windows", "peek, 65536 keys, 256 windows of 1", _peek(_windows_with_one_block, _random)),
    Case("match_wide", "match and release, 32 windows of 512, all there", _match(_wide_windows, _thousand), FULL),
    Case("peek_256_chains", "peek, 256 namespaces", _peek(_chains, _long), FULL),
    Case("prefetch", "prefetch, 256 namespaces", _prefetch, FULL),
    Case("hint", "hint, 256 namespaces", _hint, FULL),
    Case("pin_long", "pin and unpin, 65536 keys", _pin_long, FULL),
    Case("pins", "stats, pins and a flush with 16384 pins", _many_pins, FULL),
)
