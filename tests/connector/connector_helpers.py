"""Namespaces for the tests of the connector, and what a pool holds."""

from __future__ import annotations

import ctypes

import tiercache

BLOCK_BYTES = 5000  # no multiple of the frame's alignment


def spec(block_bytes: int = BLOCK_BYTES, **fields: object) -> tiercache.NamespaceSpec:
    """A namespace of blocks of four tokens."""
    form = {"engine": "test/1", "layout": "x", "dtype": "uint8", "block_size": 4, **fields}
    return tiercache.NamespaceSpec(block_bytes=block_bytes, **form)  # type: ignore[arg-type]


def bytes_of(connector: tiercache.Connector, block_ids: list[int]) -> list[bytes]:
    """The contents of pool blocks, as they are stored."""
    assert connector.pool is not None
    parts = connector.pool.segments
    return [
        b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in parts)
        for block in block_ids
    ]
