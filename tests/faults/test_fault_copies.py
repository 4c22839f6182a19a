"""Faults 36, 37, 38: copies that are abandoned, and blocks that are good only when the daemon says so.

The copier here is the real one, held up half-way at a gate, so that a test can do things in mid-copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chains import chain_of, key_of
from fault_blocks import content, spec_of
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Daemon
from waiting import wait_until

from tiercache.connector import loads as loading
from tiercache.copies.pool import Addresses, Copier, Limit
from tiercache.errors import DeadlineExceeded
from tiercache.protocol import messages as m

SPEC = spec_of(64 << 10)
BLOCKS = 16
HANG_S = 40.0


class Gate:
    """A copier that stops half-way through each copy until it is opened."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.half_way = threading.Event()
        self.open = threading.Event()

    def copy_in(self, addresses: Addresses, block_ids: Addresses, limit: Limit, after: Any = None) -> int:
        return self._in_halves(
            lambda part: self._copier.copy_in(addresses[part], block_ids[part], limit, after), len(block_ids)
        )

    def copy_out(self, block_ids: Addresses, addresses: Addresses, limit: Limit, after: Any = None) -> int:
        return self._in_halves(
            lambda part: self._copier.copy_out(block_ids[part], addresses[part], limit, after), len(block_ids)
        )

    def mark(self) -> Any:
        return self._copier.mark()

    def _in_halves(self, copy: Callable[[slice], int], count: int) -> int:
        done = copy(slice(0, count // 2))
        self.half_way.set()
        assert self.open.wait(HANG_S), "the gate was never opened"
        return done + copy(slice(count // 2, count))


@pytest.fixture
def gated(daemon: Daemon, engine_of: Callable[..., Engine]) -> tuple[Engine, Gate]:
    """An engine whose copies stop half-way."""
    engine = engine_of(daemon, SPEC)
    mover = engine.connector._mover
    assert mover is not None
    gate = Gate(mover.copier)
    mover.copier = gate
    return engine, gate


def stored(daemon: Daemon, connect: Callable[..., Peer], seed: str) -> bytes:
    """A chain that another client has stored."""
    keys = chain_of(seed, BLOCKS)
    connect(daemon).store(SPEC, keys)
    return keys


def test_36_a_cancelled_load_is_done_when_its_copy_is(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    engine, gate = gated
    keys = stored(daemon, connect, "cancelled")
    transfer = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    transfer.cancel()
    assert not transfer.done(), "a copy is under way: the blocks are not the engine's yet"
    with pytest.raises(DeadlineExceeded):
        transfer.result(0.05)
    gate.open.set()
    good = transfer.result(HANG_S)
    assert transfer.done()
    assert good <= BLOCKS // 2, "what had not begun when it was cancelled does not begin"
    engine.verify(keys, good)
    # From here on the blocks are another request's, and nothing lands in them any more.
    engine.pool[:] = 0x11
    assert (
        engine.connector.load_async(engine.connector.match(keys), list(range(20, 20 + BLOCKS))).result(HANG_S) == BLOCKS
    )
    assert np.all(engine.pool[:BLOCKS] == 0x11)


def test_36_a_load_past_its_deadline_is_done_when_its_copy_is(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    engine, gate = gated
    keys = stored(daemon, connect, "deadline")
    transfer = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    assert transfer._limit.deadline_s > time.monotonic()
    transfer._limit.deadline_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        transfer.result(0.05)
    assert not transfer.done()
    gate.open.set()
    assert transfer.result(HANG_S) <= BLOCKS // 2


def test_36_a_load_that_has_not_begun_never_touches_its_blocks(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    engine, gate = gated
    keys = stored(daemon, connect, "queued")
    first = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    second = engine.connector.load_async(engine.connector.match(keys), list(range(20, 20 + BLOCKS)))
    second.cancel()
    gate.open.set()
    assert first.result(HANG_S) == BLOCKS
    assert second.result(HANG_S) == 0
    assert np.all(engine.pool[20 : 20 + BLOCKS] == 0xDD), "not a byte of a load that was cancelled in time"
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "both leases are over")


def test_38_blocks_are_not_good_before_the_daemon_says_so(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    """All bytes have arrived, and the answer to the release is still out."""
    engine, gate = gated
    keys = stored(daemon, connect, "release")
    transfer = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    daemon.stop()
    with engine.hurried():
        gate.open.set()
        last = content(key_of(keys, BLOCKS - 1), SPEC)
        wait_until(lambda: engine.pool[BLOCKS - 1].tobytes() == last, "the last byte has arrived")
        assert transfer.result(HANG_S) == 0, "without the daemon's word it is a miss"
    daemon.go_on()


@pytest.mark.parametrize("why", ["flush", "expiry", "kill", "restart"])
def test_38_a_lease_lost_in_mid_copy_is_a_miss(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine, gate = gated
    keys = stored(daemon, connect, "lost")
    if why == "expiry":
        monkeypatch.setattr(loading, "READ_TTL_MS", 60)
        monkeypatch.setattr(engine.connector.client.leases, "keep", lambda *_, **__: None)
    transfer = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    if why == "flush":
        other = connect(daemon)
        other.ask(m.Flush, tier="all", namespaces=[], key=key_of(keys, 2))
        for number in range(3):
            other.store(SPEC, chain_of(f"new owner {number}", 256))
    elif why == "expiry":
        wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lease is over")
        for number in range(3):
            connect(daemon).store(SPEC, chain_of(f"new owner {number}", 256))
    else:
        daemon.kill()
        if why == "restart":
            daemon.start()
    gate.open.set()
    assert transfer.result(HANG_S) == 0


def test_37_a_store_owns_its_blocks_until_it_is_done(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    """The engine may change the blocks the moment `done()` is true, and not before."""
    engine, gate = gated
    keys = chain_of("store", BLOCKS)
    transfer = engine.connector.store_async(keys, engine.write(keys))
    assert gate.half_way.wait(HANG_S)
    other = connect(daemon)
    assert other.length(SPEC, keys) == 0, "nothing is visible before it is copied"
    assert not transfer.done()
    gate.open.set()
    wait_until(transfer.done, "the store is done")
    engine.pool[:] = 0x22
    assert transfer.result(0).stored == BLOCKS
    assert other.load(SPEC, keys) == BLOCKS


def test_37_a_cancelled_store_publishes_only_what_it_copied(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    engine, gate = gated
    keys = chain_of("store", BLOCKS)
    transfer = engine.connector.store_async(keys, engine.write(keys))
    assert gate.half_way.wait(HANG_S)
    transfer.cancel()
    assert not transfer.done()
    gate.open.set()
    result = transfer.result(HANG_S)
    assert result.stored <= BLOCKS // 2
    engine.pool[:] = 0x33
    other = connect(daemon)
    assert other.load(SPEC, keys) == result.stored
    stats = daemon.stats()
    assert (stats["leases"]["write"], stats["leases"]["quarantined"]) == (0, 0)


@pytest.mark.parametrize("why", ["flush", "kill"])
def test_37_a_store_overtaken_in_mid_copy(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer], why: str
) -> None:
    engine, gate = gated
    keys = chain_of("overtaken", BLOCKS)
    transfer = engine.connector.store_async(keys, engine.write(keys))
    assert gate.half_way.wait(HANG_S)
    if why == "flush":
        connect(daemon).ask(m.Flush, tier="all", namespaces=[], key=b"")
    else:
        daemon.restart()
    gate.open.set()
    assert transfer.result(HANG_S).stored == 0
    assert connect(daemon).length(SPEC, keys) == 0, "a flushed block does not come back"
    wait_until(lambda: daemon.stats()["arena"]["used_bytes"] == 0, "its frames are back")


def test_46_the_mapping_outlives_a_daemon_that_dies_in_mid_copy(
    daemon: Daemon, gated: tuple[Engine, Gate], connect: Callable[..., Peer]
) -> None:
    """The client does not unmap memory while a copy reads it; it does so afterwards."""
    engine, gate = gated
    keys = stored(daemon, connect, "mapping")
    session = engine.connector.client.session()
    arena = session.arena
    assert arena is not None
    transfer = engine.connector.load_async(engine.connector.match(keys), list(range(BLOCKS)))
    assert gate.half_way.wait(HANG_S)
    daemon.kill()
    wait_until(lambda: not engine.connector.available, "the client knows that it is down")
    assert arena.region_count == 4, "a copy is under way"
    gate.open.set()
    assert transfer.result(HANG_S) == 0
    assert arena.wait_unmapped(HANG_S)
