"""Stores past DRAM, end to end: a real daemon, a real directory, O_DIRECT writes from the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from chains import chain_of
from direct_case import DirectCluster
from host_backend import Fault, HostBackend
from waiting import wait_until

import tiercache
from tiercache.connector.direct.transfers import MOVE_THREADS
from tiercache.protocol.messages import CommitExtents

Make = Callable[..., DirectCluster]
BLOCKS = 12
BACKWARDS = list(range(BLOCKS))[::-1]
"""Pool blocks that are not neighbours in the order of the chain, so that each block is a write of its own."""


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, stores=True)


def store_backwards(cluster: DirectCluster, chain: bytes) -> tiercache.StoreResult:
    cluster.fill(chain, BACKWARDS)
    return cluster.connector.store(chain, BACKWARDS)


def nothing_is_held(cluster: DirectCluster) -> bool:
    stats = cluster.nvme()
    return (stats["direct_write_leases"], stats["direct_quarantined_bytes"]) == (0, 0)


def fault_at(number: int, fault: Fault) -> Callable[[int], Fault | None]:
    return lambda write: fault if write == number else None


def test_blocks_go_from_pool_to_disk_and_dram_stays_empty(make: Make) -> None:
    cluster = make()
    chain = chain_of("a", 200)
    assert cluster.store(chain) == tiercache.StoreResult(stored=200)
    stats = cluster.nvme()
    assert (stats["blocks"], stats["direct_stored_blocks"], stats["written_blocks"]) == (200, 200, 0)
    assert stats["direct_stored_bytes"] == 200 * cluster.spec.block_bytes
    assert cluster.dram_blocks() == 0
    assert nothing_is_held(cluster)
    assert cluster.backend.writes < 50, "neighbours are written together"
    assert cluster.load(chain) == 200
    assert cluster.direct("blocks") == cluster.direct("stored_blocks") == 200
    assert cluster.nvme()["promoted_blocks"] == 0
    assert cluster.check_daemon(sample=-1).scanned_blocks == 200


def test_a_chain_goes_on_below_blocks_that_are_only_on_disk(make: Make) -> None:
    """As after a load past DRAM: DRAM does not have the blocks before, and need not."""
    cluster = make()
    chain = chain_of("a", 40)
    assert cluster.store(chain[: 16 * 25]).stored == 25
    assert cluster.load(chain) == 25
    assert cluster.store(chain, first=25).stored == 15
    assert cluster.dram_blocks() == 0
    assert cluster.load(chain) == 40


# --- writes that go wrong -------------------------------------------------------------------------


@pytest.mark.stress
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT])
def test_blocks_before_the_one_that_failed_are_kept(make: Make, fault: Fault) -> None:
    """For every n: the n-th write of a store fails."""
    failing = [-1]
    cluster = make(write_fault=lambda write: fault if write == failing[0] else None)
    for number in range(BLOCKS):
        chain = chain_of(f"{fault.value} {number}", BLOCKS)
        failing[0] = cluster.backend.writes + number
        result = store_backwards(cluster, chain)
        assert result.stored + result.dropped == BLOCKS
        # Without its first block the chain goes to DRAM as a whole; else DRAM would have a hole.
        assert result.stored == (number or BLOCKS)
        assert result.parent_missing is False
        assert nothing_is_held(cluster)
        assert cluster.load(chain) == result.stored
        failing[0] = -1
        assert store_backwards(cluster, chain_of(f"good {number}", BLOCKS)).stored == BLOCKS
        cluster.check_daemon()
    assert cluster.direct("store_failures") == BLOCKS
    assert cluster.connector.direct.storer is not None
    assert cluster.connector.direct.storer.off == "", "only failures in a row end it"


@pytest.mark.parametrize("number", [0, 7])
def test_what_was_written_wrong_is_never_good(make: Make, number: int) -> None:
    """The checksum is of what was in the pool, and the disk says otherwise."""
    cluster = make(write_fault=fault_at(number, Fault.WRONG))
    chain = chain_of("a", BLOCKS)
    assert store_backwards(cluster, chain).stored == BLOCKS, "the daemon does not know yet"
    assert cluster.load(chain) == number
    wait_until(lambda: cluster.nvme()["blocks"] == number, "the block is forgotten with those behind it")
    assert store_backwards(cluster, chain).stored == BLOCKS - number
    assert cluster.load(chain) == BLOCKS


def test_a_flush_while_writes_are_under_way_drops_them(make: Make) -> None:
    cluster = make(write_fault=fault_at(3, Fault.HANG))
    chain = chain_of("a", BLOCKS)
    cluster.fill(chain, BACKWARDS)
    transfer = cluster.connector.store_async(chain, BACKWARDS)
    wait_until(lambda: cluster.backend.hanging == 1, "a write is under way")
    with cluster.connect() as other:
        other.flush()
        assert not transfer.done()
        assert other.match(chain).blocks == 0
    cluster.backend.resume()
    assert transfer.result(60) == tiercache.StoreResult(dropped=BLOCKS)
    assert cluster.load(chain) == 0, "the chain is neither on disk nor in DRAM"
    assert nothing_is_held(cluster)
    assert store_backwards(cluster, chain).stored == BLOCKS


@pytest.mark.stress
def test_a_full_directory_makes_room_for_stores(make: Make) -> None:
    cluster = make(nvme_size="24MiB", nvme_segment="8MiB")
    held = chain_of("held", 10)
    assert cluster.store(held).stored == 10
    cluster.connector.pin(held, 60.0)
    last = b""
    for number in range(30):
        last = chain_of(str(number), 100)
        result = cluster.store(last)
        assert result.stored == 100, f"chain {number}: {result}"
        assert cluster.load(last) == 100
    assert cluster.dram_blocks() == 0
    assert cluster.nvme()["direct_stored_blocks"] == 10 + 30 * 100
    assert cluster.nvme()["blocks"] <= 24 * 16
    longer = chain_of("29", 250)  # room for it is not made of its own beginning
    assert cluster.store(longer) == tiercache.StoreResult(stored=150, present=100)
    assert cluster.load(longer) == 250


# --- clients that stop ----------------------------------------------------------------------------


@pytest.mark.stress
def test_the_daemon_dies_while_writes_are_under_way(make: Make) -> None:
    """Its next life gives the slot away, and then the old write arrives: a miss, and never wrong."""
    cluster = make(write_fault=lambda write: Fault.HANG if write < MOVE_THREADS else None)
    chain = chain_of("old", BLOCKS)
    cluster.fill(chain, BACKWARDS)
    old, backend, transfer = cluster.connector, cluster.backend, cluster.connector.store_async(chain, BACKWARDS)
    wait_until(lambda: backend.hanging == MOVE_THREADS, "writes are under way")
    os.kill(cluster.daemon.pid, signal.SIGKILL)
    wait_until(lambda: not old.available, "its death is known")
    cluster.daemon.close()
    cluster.backend = HostBackend()
    cluster.start()
    cluster.wait_loaded()
    fresh = chain_of("new", 100)
    cluster.fill(fresh, range(100, 200))
    assert cluster.connector.store(fresh, range(100, 200)).stored == 100
    backend.resume()
    assert transfer.result(30).stored == 0
    assert backend.writes == MOVE_THREADS < BLOCKS, "no write has begun since"
    old.close()
    good = cluster.load(fresh)
    assert good < 100, "an old write has overwritten one of them"
    wait_until(lambda: cluster.nvme()["blocks"] == good, "the overwritten block is gone")
    assert cluster.store(fresh).stored == 100 - good
    assert cluster.load(fresh) == 100


@pytest.mark.parametrize("moment", ["unready", "unwritten", "unsummed", "summed", "committing"])
def test_blocks_given_away_at_any_moment_are_never_wrong(make: Make, moment: str) -> None:
    """An engine voids a store and then writes to its blocks, at every step that reads them or comes after."""
    cluster = make()
    chain = chain_of("a", BLOCKS)
    cluster.fill(chain, BACKWARDS)
    transfers: list[tiercache.Transfer[tiercache.StoreResult]] = []

    def give_away() -> None:
        wait_until(lambda: bool(transfers), "it is under way")
        transfers[0].void()
        cluster.pool[:] = 99

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (give_away(), call(*arguments, **options))[1]

    def after(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (call(*arguments, **options), give_away())[0]

    backend, storer = cluster.backend, cluster.connector.direct.storer
    assert storer is not None
    if moment == "unready":
        backend.is_ready = before(backend.is_ready)  # type: ignore[method-assign]
    elif moment == "unwritten":
        storer._call = before(storer._call)
    elif moment == "committing":
        session = cluster.connector.client.session()
        post = session.post
        session.post = lambda request, *rest, **fields: (  # type: ignore[method-assign]
            give_away() if request is CommitExtents else None,
            post(request, *rest, **fields),
        )[1]
    else:
        backend.lane_sums = (before if moment == "unsummed" else after)(backend.lane_sums)  # type: ignore[method-assign]
    transfers.append(cluster.connector.store_async(chain, BACKWARDS))
    result = transfers[0].result(60)
    kept = BLOCKS if moment == "committing" else 0  # by then nothing reads the blocks any more
    assert result == tiercache.StoreResult(stored=kept, dropped=BLOCKS - kept)
    assert (cluster.nvme()["blocks"], cluster.dram_blocks()) == (kept, 0)
    assert nothing_is_held(cluster)
    assert cluster.load(chain) == kept, "and the loaded bytes are the stored ones"
