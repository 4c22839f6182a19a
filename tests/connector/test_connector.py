"""Blocks through a real daemon and back: every way in, every way out."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import bytes_of, spec
from waiting import wait_until

import tiercache
import tiercache.connector.connector
from tiercache.errors import ConfigError, LayoutError

Open = Callable[..., tiercache.Connector]


def test_the_example_of_the_module_runs() -> None:
    failed, tried = doctest.testmod(tiercache.connector.connector)
    assert (failed, tried > 10) == (0, True)


@pytest.mark.parametrize("mapped", [True, False])
def test_what_is_stored_comes_back(open_connector: Open, mapped: bool) -> None:
    connector = open_connector(map_arena=mapped)
    chain = chain_of(f"round trip {mapped}", 10)
    expected = bytes_of(connector, [3, 1, 4, 2, 9, 6, 5, 8, 7, 0])
    assert connector.store(chain, [3, 1, 4, 2, 9, 6, 5, 8, 7, 0]) == (10, 0, 0, False)
    match = connector.match(chain + chain_of("else", 3))
    assert match.blocks == 10
    assert connector.load(match, list(range(20, 30))) == 10
    assert bytes_of(connector, list(range(20, 30))) == expected
    assert connector.load(match, [20]) == 0  # a match is used up


@pytest.mark.parametrize("mapped", [True, False])
def test_layered_pools_store_the_same_bytes_as_block_pools(open_connector: Open, mapped: bool) -> None:
    rng = np.random.default_rng(3)
    layers = [rng.integers(0, 256, (2, 16, 640), np.uint8) for _ in range(3)]
    layered = open_connector(pool=tiercache.Pool.from_layers(layers, block_axis=1), map_arena=mapped)
    flat = np.zeros((16, 6 * 640), np.uint8)
    blocks = open_connector(pool=tiercache.Pool.from_blocks(flat), map_arena=mapped)
    chain = chain_of(f"layers {mapped}", 5)
    assert layered.store(chain, [1, 2, 3, 5, 8]).stored == 5
    assert blocks.load(blocks.match(chain), [0, 1, 2, 3, 4]) == 5
    expected = np.concatenate([layer[part] for layer in layers for part in (0, 1)], axis=1)
    assert np.array_equal(flat[:5], expected[[1, 2, 3, 5, 8]])
    assert layered.load(layered.match(chain), [10, 11, 12, 13, 14]) == 5
    assert bytes_of(layered, [10, 11, 12, 13, 14]) == [row.tobytes() for row in flat[:5]]


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_torch_pools(open_connector: Open, dtype: str) -> None:
    import torch

    tensor = torch.randint(-100, 100, (12, 2, 64)).to(getattr(torch, dtype))
    connector = open_connector(pool=tiercache.Pool.from_blocks(tensor))
    chain = chain_of(f"torch {dtype}", 4)
    assert connector.store(chain, [0, 2, 4, 6]).stored == 4
    assert connector.load(connector.match(chain), [8, 9, 10, 11]) == 4
    raw = tensor.view(torch.uint8)
    assert torch.equal(raw[[0, 2, 4, 6]], raw[8:12])


@pytest.mark.parametrize("mapped", [True, False])
def test_blocks_larger_than_a_payload(open_connector: Open, mapped: bool) -> None:
    pool = np.random.default_rng(0).integers(0, 256, (4, (5 << 20) + 8), np.uint8)
    connector = open_connector(pool=tiercache.Pool.from_blocks(pool), map_arena=mapped)
    chain = chain_of(f"large {mapped}", 2)
    connector.flush(all_namespaces=True)
    assert connector.store(chain, [0, 1]).stored == 2
    assert connector.load(connector.match(chain), [3, 2]) == 2
    assert np.array_equal(pool[[3, 2]], pool[[0, 1]])
    connector.flush(all_namespaces=True)


def test_long_chains_go_in_windows(open_connector: Open) -> None:
    pool = np.arange(3000 * 16, dtype=np.uint32).reshape(3000, 16)
    connector = open_connector(pool=tiercache.Pool.from_blocks(pool))
    chain = chain_of("long", 1300)
    assert connector.store(chain, range(1300)).stored == 1300
    match = connector.match(chain)
    assert match.blocks == 1300
    assert connector.load(match, range(1500, 2800)) == 1300
    assert np.array_equal(pool[1500:2800], pool[:1300])
    connector.flush()


def test_a_full_queue_drops_stores_and_misses_loads(open_connector: Open) -> None:
    connector = open_connector()
    chain = chain_of("full queue", 2)
    connector.store(chain, [0, 1])
    gate = threading.Event()
    for queue in (connector._loads, connector._stores):
        queue.submit(tiercache.Transfer(lambda: gate.wait(10), lambda: None, None, _limit()))
        wait_until(lambda queue=queue: not len(queue), "it is under way")
        queue._capacity = 1
    waiting = connector.store_async(chain, [0, 1]), connector.load_async(connector.match(chain), [2, 3])
    dropped = connector.store_async(chain, [0, 1])
    missed = connector.load_async(connector.match(chain), [4, 5])
    assert (dropped.done(), dropped.result()) == (True, (0, 0, 2, False))
    assert (missed.done(), missed.result()) == (True, 0)
    gate.set()
    assert (waiting[0].result(40).present, waiting[1].result(5)) == (2, 2)
    assert _leases(connector) == (0, 0)


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


def test_windowed_namespaces_need_only_the_end(open_connector: Open) -> None:
    connector = open_connector(namespace=spec(group="window", window_blocks=2))
    chain = chain_of("window", 8)
    assert connector.store(chain, [4, 5, 6], first=3).stored == 3
    match = connector.match(chain)
    assert match.blocks == 6
    assert connector.load(match, [20, 21], first=4) == 2
    assert bytes_of(connector, [20, 21]) == bytes_of(connector, [5, 6])


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


def test_statistics_have_both_sides(open_connector: Open) -> None:
    connector = open_connector(name="statistics")
    chain = chain_of("stats", 2)
    connector.store(chain, [0, 1])
    connector.load(connector.match(chain), [2, 3])
    stats = connector.stats()
    assert stats["available"]
    expected = {"matches": 1, "matched_blocks": 2, "loads": 1, "loaded_blocks": 2, "loaded_bytes": 10000}
    assert expected.items() <= stats["client"].items()
    assert (stats["client"]["stored_blocks"], stats["client"]["failures"]) == (2, 0)
    assert "statistics" in [session["name"] for session in stats["daemon"]["sessions"]]


def test_bad_arguments_are_told_in_one_line(open_connector: Open) -> None:
    connector = open_connector()
    chain = chain_of("bad", 4)
    with pytest.raises(ValueError, match="16 bytes each"):
        connector.match(b"short")
    with pytest.raises(ValueError, match="5 keys from the root; there are 4"):
        connector.store(chain, [0, 1, 2], first=2)
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


def _limit() -> tiercache.copies.pool.Limit:
    return tiercache.copies.pool.Limit()


def _leases(connector: tiercache.Connector) -> tuple[int, int]:
    """This session's read and write leases, as the daemon counts them."""
    leases = connector.stats()["daemon"]["leases"]
    return leases["read"], leases["write"]
