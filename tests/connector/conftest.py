"""A real daemon and real pools for the tests of the connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import tiercache

BLOCK_BYTES = 5000  # no multiple of the frame's alignment


@pytest.fixture(scope="module")
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("32MiB", region="8MiB") as daemon:
        yield daemon


@pytest.fixture
def open_connector(daemon: tiercache.LaunchedDaemon) -> Iterator[Callable[..., tiercache.Connector]]:
    """Makes connectors to the daemon, with a pool of 32 blocks of noise, closed at the end."""
    with ExitStack() as stack:

        def make(**options: Any) -> tiercache.Connector:
            noise = np.random.default_rng(1).integers(0, 256, (32, BLOCK_BYTES), np.uint8)
            pool = options.pop("pool", tiercache.Pool.from_blocks(noise))
            fields = {"engine": "test/1", "layout": "x", "dtype": "uint8", "block_size": 4}
            size = BLOCK_BYTES if pool is None else pool.block_bytes
            spec = options.pop("namespace", None) or tiercache.NamespaceSpec(**fields, block_bytes=size)
            address = options.pop("address", daemon.address)
            options.setdefault("required", True)
            return stack.enter_context(tiercache.connect(address, namespace=spec, pool=pool, **options))

        yield make


def keys(name: str, blocks: int) -> bytes:
    """The packed keys of a chain of its own."""
    return tiercache.KeyChain(tiercache.root_key(name), 4, range(blocks * 4)).packed()


def bytes_of(connector: tiercache.Connector, block_ids: list[int]) -> list[bytes]:
    """The contents of pool blocks, segment by segment."""
    assert connector.pool is not None
    import ctypes

    return [
        b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in connector.pool.segments)
        for block in block_ids
    ]
