"""A real daemon, connectors to it, and what their pools hold. Conftests of several folders import the fixtures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

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
            options.setdefault("namespace", spec(BLOCK_BYTES if pool is None else pool.block_bytes))
            options.setdefault("required", True)
            return stack.enter_context(tiercache.connect(daemon.address, pool=pool, **options))

        yield make
