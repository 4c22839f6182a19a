"""An engine as the cache sees it: a connector, a pool, and blocks whose bytes say whose they are, and are verified."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from chains import key_of

import tiercache
from tiercache.connector.loads import Match
from tiercache.connector.stores import StoreResult
from tiercache.errors import TierCacheError
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


def whose(data: bytes, keys: bytes, spec: NamespaceSpec) -> str:
    """For messages: which of these blocks the first line of `data` belongs to."""
    for number in range(len(keys) // KEY_BYTES):
        if content(key_of(keys, number), spec)[:LINE_BYTES] == data[:LINE_BYTES]:
            return f"block {number}"
    return "no known writer"


_DIRT = 0xDD
_PATIENCE_S = 10.0
"""A good daemon on a busy machine takes longer to answer than engines wait by default."""


class Engine:
    """A connector over a numpy pool of `blocks` blocks."""

    def __init__(self, run_dir: str, spec: NamespaceSpec, blocks: int = 64, **settings: Any) -> None:
        self.spec = spec
        self.pool = np.full((blocks, spec.block_bytes), _DIRT, np.uint8)
        self.connector = tiercache.connect(
            run_dir,
            namespace=spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            **{"required": True, "request_timeout_s": _PATIENCE_S, **settings},
        )

    def write(self, keys: bytes, first: int = 0) -> list[int]:
        """Put the right bytes of keys `first..` into pool blocks 0.."""
        count = len(keys) // KEY_BYTES - first
        for number in range(count):
            self.pool[number] = np.frombuffer(content(key_of(keys, first + number), self.spec), np.uint8)
        return list(range(count))

    def store(self, keys: bytes, first: int = 0) -> StoreResult:
        """Store keys `first..` of a chain."""
        return self.connector.store(keys, self.write(keys, first), first=first)

    def verify(self, keys: bytes, good: int) -> int:
        """That the first `good` pool blocks hold what was stored under the keys."""
        for number in range(good):
            got = self.pool[number].tobytes()
            right = got == content(key_of(keys, number), self.spec)
            assert right, f"block {number} of {good} is wrong: it is {whose(got, keys, self.spec)}"
        return good

    def load_match(self, match: Match, keys: bytes, timeout_s: float | None = None) -> int:
        """Load what was matched into a dirty pool, and verify what is said to be good."""
        blocks = min(match.blocks, len(self.pool))
        self.pool[:blocks] = _DIRT
        return self.verify(keys, self.connector.load(match, list(range(blocks)), timeout_s=timeout_s))

    def load(self, keys: bytes) -> int:
        """Match, load and verify; how many blocks were good."""
        return self.load_match(self.connector.match(keys), keys)

    def misses(self, keys: bytes) -> None:
        """Check that every call is a miss, as when the cache is away, and that none raises or hangs."""
        count, cache = len(keys) // KEY_BYTES, self.connector
        assert self.load(keys) == 0
        assert self.store(keys) == (0, 0, count, False)
        assert cache.prefetch(keys) == cache.pin(keys, ttl_s=1) == cache.unpin(keys) == 0
        assert cache.store_async(keys, self.write(keys)).result() == (0, 0, count, False)
        assert cache.load_async(cache.match(keys), []).result() == 0
        assert cache.stats()["daemon"] == {}
        assert self.try_flush(b"") == 0

    def try_flush(self, key: bytes) -> int:
        """Flush; 0 when the daemon cannot be asked."""
        try:
            return self.connector.flush(key=key)
        except TierCacheError:
            return 0

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
