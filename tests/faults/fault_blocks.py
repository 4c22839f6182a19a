"""Blocks whose bytes say whose they are: content follows from (key, namespace), 64 bytes at a time."""

from __future__ import annotations

import hashlib

from chains import key_of

from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

LINE_BYTES = 64


def spec_of(block_bytes: int = 4096, rank: int = 0) -> NamespaceSpec:
    """A namespace: equal keys of another rank or size are other bytes."""
    return NamespaceSpec(
        engine="faults/1",
        layout="bytes",
        dtype="uint8",
        block_size=16,
        block_bytes=block_bytes,
        tp_rank=rank,
        tp_size=8,
    )


def content(key: bytes, spec: NamespaceSpec) -> bytes:
    """The bytes of one block; each line of 64 names its key and namespace, so a mixture shows."""
    line = hashlib.blake2b(key + spec.fingerprint().encode(), digest_size=LINE_BYTES).digest()
    return (line * (spec.block_bytes // LINE_BYTES + 1))[: spec.block_bytes]


def whose(data: bytes, keys: bytes, specs: list[NamespaceSpec]) -> str:
    """For messages: which of these blocks the first line of `data` belongs to."""
    for spec in specs:
        for number in range(len(keys) // KEY_BYTES):
            if content(key_of(keys, number), spec)[:LINE_BYTES] == data[:LINE_BYTES]:
                return f"block {number} of rank {spec.tp_rank}"
    return "no known writer"
