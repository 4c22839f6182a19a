"""A daemon or an engine that hangs: calls are misses, nothing is held for ever, and the blocks are there afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

SPEC = spec_of(64 << 10)


def is_back(engine: Engine) -> None:
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")


@pytest.mark.parametrize("dies", [False, True])
def test_a_daemon_that_hangs_is_a_miss(daemon: Daemon, engine_of: Callable[..., Engine], dies: bool) -> None:
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    daemon.stop()
    with engine.hurried():
        engine.misses(keys)
    engine.misses(keys)
    if dies:
        daemon.restart()
    else:
        daemon.go_on()
    is_back(engine)
    assert engine.load(keys) == (0 if dies else 20), "it was only asleep"
    wait_until(lambda: engine.store(keys).dropped == 0, "stores are taken again")


def test_an_engine_that_hangs_does_not_hold_its_leases_for_ever(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], start_child: Callable[..., Child]
) -> None:
    """Its renewals stop with it. After SIGCONT its match is a miss, and all goes on."""
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--lease-ttl-max", "500ms")
    child = start_child("engine", daemon, block_bytes=256 << 10)
    engine = engine_of(daemon, spec_of(256 << 10))
    child.do("store", seed="held", blocks=60)
    assert child.do("hold", seed="held", blocks=60) == 60
    child.stop()
    numbers = iter(range(10**6))
    wait_until(lambda: engine.store(chain_of(next(numbers), 64)).stored == 64, "all frames can be had")
    child.go_on()
    assert child.do("load_held", seed="held") == 0
    child.do("store", seed="held", blocks=60)
    assert child.do("load", seed="held", blocks=60) == 60


def test_renewals_that_waited_for_a_stopped_daemon_are_read_before_leases_are_judged(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("queue", 4)
    peer.store_chain(SPEC, keys)
    leases = [peer.match_chain(SPEC, keys, ttl_ms=1500).lease for _ in range(20)]
    daemon.stop()
    renewals = [peer.post(m.Renew, leases=[lease], ttl_ms=30_000, deadline_s=60) for lease in leases]
    end_s = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > end_s, "more than the lease")
    daemon.go_on()
    assert all(list(peer.answer_to(request_id).alive) == [1] for request_id in renewals)
    assert all(peer.tell(m.Release, lease=lease).good for lease in leases)
