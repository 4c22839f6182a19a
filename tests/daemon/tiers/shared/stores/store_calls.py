"""Calls of a store as tests want them: whole values, and deadlines that only bound a hang."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put

PATIENCE_S = 30.0


def soon(seconds: float = PATIENCE_S) -> float:
    """A deadline, by default one that no working call reaches."""
    return time.monotonic() + seconds


def content(number: int, length: int) -> bytes:
    """Bytes that differ from value to value and from place to place."""
    line = number.to_bytes(4, "little") + bytes(range(1, 252))
    return (line * (length // len(line) + 1))[:length]


def put(connection: Connection, values: dict[bytes, bytes], head_bytes: int = 5, ttl_s: float = 0.0) -> list[Fate]:
    """Write values in two parts each; what became of them."""
    puts = [Put(name, [value[:head_bytes], memoryview(value)[head_bytes:]], ttl_s) for name, value in values.items()]
    connection.put(puts, [], soon())
    return [one.fate for one in puts]


def room(name: bytes, head_bytes: int, body_bytes: int, offset: int = 0) -> Get:
    """A Get with memory of its own, which holds rubbish."""
    return Get(
        name, memoryview(bytearray(b"?" * head_bytes)), memoryview(bytearray(b"?" * body_bytes)), offset, bool(offset)
    )


def read(
    connection: Connection, names: Sequence[bytes], head_bytes: int = 5, body_bytes: int = 1 << 20, offset: int = 0
) -> list[bytes | Fate]:
    """The values, or why there are none."""
    gets = [room(name, head_bytes, body_bytes, offset) for name in names]
    settled: list[bytes] = []
    connection.get(gets, [], soon(), lambda get: settled.append(get.name))
    assert sorted(settled) == sorted(names), "each is told once"
    return [value_of(get) for get in gets]


def value_of(get: Get) -> bytes | Fate:
    """What was read, or why nothing was."""
    if get.fate is not Fate.DONE:
        return get.fate
    assert bytes(get.body[get.body_bytes :]).strip(b"?") == b"", "nothing is written behind the value"
    return bytes(get.head) + bytes(get.body[: get.body_bytes])
