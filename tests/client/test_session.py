"""Clocks that differ: deadlines go by the client's clock, and either clock may have stood still for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.protocol import messages as m

SPEC = tiercache.NamespaceSpec(engine="clocks/1", layout="x", dtype="uint8", block_size=4, block_bytes=4096)
KEYS = tiercache.KeyChain(tiercache.root_key("clocks"), 4, range(12)).packed()
FAR_US = 3_600_000_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("8MiB", region="2MiB") as daemon:
        yield daemon


@pytest.fixture
def connector(daemon: tiercache.LaunchedDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    with tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True) as connector:
        assert sum(connector.store(KEYS, range(3))[:2]) == 3
        yield connector


def say_clock(connector: tiercache.Connector, ahead_us: int) -> None:
    """Make the daemon's idea of the client's clock wrong."""
    connector.client.call(m.Ping, clock_us=time.monotonic_ns() // 1000 + ahead_us)


def test_a_client_whose_clock_fell_behind_is_served_again(connector: tiercache.Connector) -> None:
    session = connector.client.session()
    before = connector.client.stats()["counters"]["requests_expired"]
    say_clock(connector, FAR_US)
    assert connector.match(KEYS).blocks == 0, "the daemon takes the request for expired"
    wait_until(lambda: connector.match(KEYS).blocks == 3)
    assert connector.client.session() is session, "only the clock was wrong"
    assert connector.counters["times_down"] == 0
    expired = connector.client.stats()["counters"]["requests_expired"] - before
    assert 0 < expired < 100, "the client does not ask again and again"
