"""Blocks through a real daemon and back: every way in, every way out, and how a connector ends."""

from __future__ import annotations

import doctest
import gc
import operator
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import bytes_of, spec
from waiting import wait_until

import tiercache
import tiercache.connector.connector
from tiercache.client import keeper
from tiercache.copies.pool import CpuCopier
from tiercache.errors import ConfigError, LayoutError
from tiercache.protocol.hints import Hint

Open = Callable[..., tiercache.Connector]
WAIT_S = 60


def test_the_example_of_the_module_runs() -> None:
    failed, tried = doctest.testmod(tiercache.connector.connector)
    assert (failed, tried > 10) == (0, True)


@pytest.mark.parametrize("mapped", [True, False])
def test_blocks_that_are_larger_than_a_payload_come_back(open_connector: Open, mapped: bool) -> None:
    pool = np.random.default_rng(0).integers(0, 256, (6, (5 << 20) + 8), np.uint8)
    connector = open_connector(name=f"mapped: {mapped}", pool=tiercache.Pool.from_blocks(pool), map_arena=mapped)
    sessions = {one["name"]: one["mapped"] for one in connector.client.stats()["sessions"]}
    assert sessions[f"mapped: {mapped}"] == mapped
    chain = chain_of(f"large {mapped}", 2)
    connector.flush(all_namespaces=True)
    assert connector.store(chain, [2, 0]) == (2, 0, 0, False)
    match = connector.match(chain + chain_of("else", 3))
    assert match.blocks == 2
    assert connector.load(match, [3, 4]) == 2
    assert np.array_equal(pool[[3, 4]], pool[[2, 0]])
    assert connector.load(match, [5]) == 0, "a match is used up"
    connector.flush(all_namespaces=True)


def test_ranks_are_matched_together(open_connector: Open) -> None:
    specs = [spec(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    instance = bytes(range(16))
    workers = [open_connector(namespace=own, instance=instance) for own in specs]
    scheduler = open_connector(pool=None, namespace=specs[0], instance=instance)
    chain = chain_of("ranks", 6)
    workers[0].store(chain, range(6))
    workers[1].store(chain, range(10, 14))
    match = scheduler.match(chain, namespaces=specs)
    assert match.blocks == 4  # what both have
    ticket = match.ticket()
    held = [worker.adopt(ticket) for worker in workers]
    scheduler.release(match)
    for worker, own, source in zip(workers, held, (0, 10), strict=True):
        assert own.blocks == 4
        assert worker.load(own, range(20, 24)) == 4
        assert bytes_of(worker, list(range(20, 24))) == bytes_of(worker, list(range(source, source + 4)))
    assert workers[0].adopt(ticket).blocks == 0  # over with its last holder
    stranger = open_connector(namespace=specs[0])
    other = scheduler.match(chain, namespaces=specs)
    assert stranger.adopt(other.ticket()).blocks == 0  # another instance
    scheduler.release(other)


def test_pins_prefetch_and_flush(open_connector: Open) -> None:
    connector = open_connector(namespace=spec(group="pins"))
    chain = chain_of("pins", 4)
    connector.store(chain, range(4))
    assert connector.pin(chain, 60) == 4
    assert connector.prefetch(chain) == 4
    assert connector.unpin(chain) == 4
    assert connector.flush(key=chain[32:48]) == 2
    assert connector.match(chain).blocks == 2
    assert connector.flush() == 2
    assert connector.match(chain).blocks == 0


def test_bad_arguments_are_told_in_one_line(open_connector: Open) -> None:
    connector = open_connector()
    chain = chain_of("bad", 4)
    with pytest.raises(ValueError, match="16 bytes each"):
        connector.match(b"short")
    with pytest.raises(ValueError, match="5 keys from the root; there are 4"):
        connector.store(chain, [0, 1, 2], first=2)
    with pytest.raises(ValueError, match="ttl_s is 0"):
        connector.pin(chain, 0)
    with pytest.raises(LayoutError, match="0 to 31"):
        connector.store(chain, [32])
    with pytest.raises(LayoutError, match="twice"):
        connector.load(connector.match(chain), [1, 1])
    with pytest.raises(LayoutError, match="has no pool"):
        open_connector(pool=None).store(chain, [0])
    with pytest.raises(LayoutError, match="namespace says"):
        open_connector(namespace=spec(4096))
    with pytest.raises(ConfigError, match="block_bytes is 0"):
        open_connector(namespace=spec(0), pool=None)


def small_pool(block_bytes: int = 700) -> tiercache.Pool:
    """Blocks whose bytes begin those of larger ones, as blocks of a group of layers may."""
    rng = np.random.default_rng(5)
    return tiercache.Pool.from_blocks(rng.integers(0, 256, (16, 2 * block_bytes), np.uint8)[:, :block_bytes])


def test_siblings_store_and_load_their_own_blocks_and_match_together(open_connector: Open) -> None:
    first = open_connector()
    windowed = spec(700, group="window of siblings", window_blocks=2)
    sibling = first.sibling(windowed, small_pool())
    both, chain = [first.namespace, windowed], chain_of("siblings", 8)
    assert first.store(chain, range(8)).stored == 8
    assert first.match(chain, namespaces=both).blocks == 0
    assert sibling.store(chain, [4, 5], first=4).stored == 2
    match = first.match(chain, namespaces=both)
    assert match.blocks == 6  # the last cut behind a whole window
    assert first.prefetch(chain, namespaces=both) == 6
    expected = bytes_of(sibling, [4, 5])
    assert sibling.load(sibling.match(chain[: 6 * 16]), [9, 8], first=4) == 2
    assert bytes_of(sibling, [9, 8]) == expected
    first.release(match)
    assert first.client.report.counters()["stored_blocks"] == 10
    assert (first.counters["stored_blocks"], sibling.counters["stored_blocks"]) == (8, 2)


def test_what_is_dropped_without_close_is_closed(daemon: tiercache.LaunchedDaemon) -> None:
    def held() -> tuple[int, ...]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("tiercache"), threading.active_count()

    def use(name: str, *, drop: bool = False) -> None:
        pool, other = tiercache.Pool.from_blocks(np.zeros((8, 5000), np.uint8)), spec(700, group="dropped")
        connector = tiercache.connect(
            daemon.address, namespace=spec(), pool=pool, required=True, request_timeout_s=60.0
        )
        sibling, client = connector.sibling(other, small_pool()), tiercache.Client.connect(daemon.address)
        chain = chain_of(name, 8)
        stored = connector.store_async(chain, range(8))
        assert stored.result().stored == sibling.store(chain, [4]).stored * 8
        assert connector.load_async(connector.match(chain), range(8)).result() == 8
        assert connector.ask_async(lambda: sibling.match(chain[:16]).blocks, 0).result() == 1
        if not drop:
            connector.close()
            client.close()

    use("closed")
    before = held()
    for number in range(3):
        use(f"dropped {number}", drop=True)
    gc.collect()
    wait_until(lambda: all(map(operator.le, held(), before)), "threads, descriptors and mappings are gone")


def test_questions_are_asked_in_the_background_and_in_order(open_connector: Open) -> None:
    connector, chain, gate = open_connector(), chain_of("questions", 8), threading.Event()
    connector.store(chain, range(8))
    waits = connector.ask_async(lambda: gate.wait(WAIT_S), False)
    match = connector.ask_async(lambda: connector.match(chain), tiercache.Match())
    cancelled = connector.ask_async(lambda: connector.match(chain), tiercache.Match())
    cancelled.cancel()
    assert not match.done()
    gate.set()
    assert (waits.result(), match.result().blocks, cancelled.result().blocks) == (True, 8, 0)
    read_leases = lambda: connector.client.stats()["leases"]["read"]  # noqa: E731
    assert read_leases() == 1
    connector.release_async(match.result())
    assert connector.ask_async(read_leases, -1).result() == 0
    connector.close()
    assert connector.ask_async(lambda: 1, 0).result() == 0


def test_a_hint_is_about_what_is_here(open_connector: Open) -> None:
    connector = open_connector()
    chain = chain_of("partly here", 5)
    connector.store(chain[:48], range(3))
    assert connector.hint(chain, Hint(return_in_s=30)) == 3
    assert connector.hint(chain_of("nowhere", 5), Hint(done=True)) == 0
    assert connector.hint(b"", Hint(done=True)) == 0
    with pytest.raises(ValueError, match="16 bytes"):
        connector.hint(b"abc", Hint(done=True))
    with pytest.raises(ValueError, match="first is -1"):
        connector.hint(chain, Hint(done=True), first=-1)
    assert connector.counters["failures"] == 0


def leases(watcher: tiercache.Connector) -> dict[str, int]:
    found = watcher.client.stats()["leases"]
    return {name: found[name] for name in ("write", "quarantined")}


@contextmanager
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds copies that have begun until the test lets them go on."""
    begun, gate = threading.Event(), threading.Event()
    copy = CpuCopier._copy

    def held(self: CpuCopier, *arguments: Any, **options: Any) -> int:
        begun.set()
        assert gate.wait(WAIT_S)
        return copy(self, *arguments, **options)

    monkeypatch.setattr(CpuCopier, "_copy", held)
    try:
        yield begun, gate
    finally:
        gate.set()


@pytest.mark.parametrize("in_background", [False, True])
def test_close_stops_a_store_and_leaves_nothing_in_quarantine(
    open_connector: Open, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """Its session outlives `close` until the daemon was told that the copies have ended."""
    monkeypatch.setattr(keeper, "CLOSE_S", 0.05)
    watcher, connector = open_connector(name="watcher", pool=None), open_connector(name="lingers")
    chain = chain_of(f"closed while it stores {in_background}", 8)

    def sessions() -> int:
        return sum(one["name"] == "lingers" for one in watcher.client.stats()["sessions"])

    with held_copies(monkeypatch) as (begun, gate), ThreadPoolExecutor() as threads:
        if in_background:
            storing = threads.submit(connector.store_async(chain, range(8)).result, WAIT_S)
        else:
            storing = threads.submit(connector.store, chain, range(8))
        assert begun.wait(WAIT_S)
        closing = threads.submit(connector.close)
        if not in_background:  # what a queue has begun may end
            wait_until(lambda: not connector.available)
            assert connector.store(chain, range(8)) == (0, 0, 8, False), "a closed connector begins nothing"
            closing.result(WAIT_S)
            assert (leases(watcher)["write"], sessions()) == (1, 1)
        gate.set()
        closing.result(WAIT_S)
        stored = storing.result(WAIT_S)
    wait_until(lambda: sessions() == 0)
    assert leases(watcher) == {"write": 0, "quarantined": 0}
    assert sum(stored[:3]) == 8
    assert watcher.match(chain).blocks == stored.stored
