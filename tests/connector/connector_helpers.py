"""Helpers of the connector's tests: chains, and what a pool holds."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import tiercache

BLOCK_BYTES = 5000  # no multiple of the frame's alignment


def spec(block_bytes: int = BLOCK_BYTES, **fields: object) -> tiercache.NamespaceSpec:
    """A namespace of blocks of four tokens."""
    form = {"engine": "test/1", "layout": "x", "dtype": "uint8", "block_size": 4, **fields}
    return tiercache.NamespaceSpec(block_bytes=block_bytes, **form)  # type: ignore[arg-type]


def keys(name: str, blocks: int) -> bytes:
    """The packed keys of a chain of its own."""
    return tiercache.KeyChain(tiercache.root_key(name), 4, range(blocks * 4)).packed()


def bytes_of(connector: tiercache.Connector, block_ids: list[int]) -> list[bytes]:
    """The contents of pool blocks, as they are stored."""
    assert connector.pool is not None
    parts = connector.pool.segments
    return [
        b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in parts)
        for block in block_ids
    ]


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll until `condition()` is true. Fails at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        threading.Event().wait(0.005)
