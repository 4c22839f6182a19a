"""A real daemon and real pools for the tests of the connector."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from connector_helpers import BLOCK_BYTES, spec
from signals_at_steps import Terminated

import tiercache

REQUEST_TIMEOUT_S = 10.0
"""On a busy machine a healthy daemon takes longer to answer than callers want to wait."""


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
            options.setdefault("request_timeout_s", REQUEST_TIMEOUT_S)
            return stack.enter_context(tiercache.connect(daemon.address, pool=pool, **options))

        yield make


@pytest.fixture
def handlers(ctrl_c: None) -> Iterator[dict[int, Any]]:
    """Handlers of SIGINT and SIGTERM that raise. They must still be installed when a test ends."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, terminate)
    mine: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    yield mine
    found = {number: signal.getsignal(number) for number in mine}
    signal.signal(signal.SIGTERM, earlier)
    assert found == mine
