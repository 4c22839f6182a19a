"""Loads past DRAM, end to end: a real daemon, a real directory, O_DIRECT reads into the pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from direct_case import DirectCluster
from waiting import wait_until

import tiercache
from tiercache.connector.direct.backend import Fault
from tiercache.copies.pool import CopyLost

Make = Callable[..., DirectCluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[DirectCluster] = []

    def start(*arguments: Any, **settings: Any) -> DirectCluster:
        made.append(DirectCluster(tmp_path, *arguments, **settings))
        return made[-1]

    yield start
    for cluster in made:
        cluster.backend.resume()
        cluster.stop()


def test_blocks_come_from_disk_to_pool_and_dram_stays_empty(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 100)
    assert cluster.load(chain) == 100
    assert cluster.load(chain) == 100
    assert cluster.direct("blocks") == 200
    assert cluster.direct("bytes") == 200 * cluster.spec.block_bytes
    stats = cluster.nvme()
    assert (stats["direct_blocks"], stats["promoted_blocks"], stats["direct_leases"]) == (200, 0, 0)
    assert cluster.connector.client.stats()["tiers"]["dram"]["blocks"] == 0
    assert cluster.backend.reads < 200, "neighbours are read together"


def test_what_is_in_dram_comes_from_there_and_the_rest_from_disk(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 60)
    with cluster.connect() as plain:
        head = plain.match(chain[: 16 * 20])
        assert plain.load(head, range(20), timeout_s=20) == 20
    assert cluster.load(chain) == 60
    assert cluster.direct("blocks") == 40
    assert cluster.nvme()["promoted_blocks"] == 20


def test_a_load_may_begin_anywhere_in_the_run(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 30)
    match = cluster.connector.match(chain)
    assert (match.blocks, match.below_blocks) == (30, 30)
    cluster.pool[:] = 0
    assert cluster.connector.load(match, [7, 3, 99], first=12) == 3
    assert cluster.is_right(7, chain, 12)
    assert cluster.is_right(3, chain, 13)
    assert cluster.is_right(99, chain, 14)
    assert cluster.direct("blocks") == 3


def test_a_worker_reads_under_its_schedulers_lease(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 10)
    instance = cluster.connector.client.instance
    options = {"instance": instance, "required": True, "namespace": cluster.spec}
    with tiercache.connect(cluster.daemon.address, gds="auto", **options) as scheduler:
        match = scheduler.match(chain)
        assert match.blocks == 10
        adopted = cluster.connector.adopt(match.ticket())
        scheduler.release(match)
        cluster.pool[:] = 0
        assert cluster.connector.load(adopted, range(10)) == 10
    assert all(cluster.is_right(number, chain, number) for number in range(10))
    assert cluster.direct("blocks") == 10


def test_blocks_of_before_are_promoted(make: Make) -> None:
    """Such blocks have a checksum that only the daemon computes."""
    cluster = make(direct=False)
    old = cluster.store_on_disk("a", 10)
    cluster.connector.close()
    cluster.connector = cluster.connect(gds=cluster.backend)
    assert cluster.load(old) == 10
    assert cluster.direct("blocks") == 0
    assert cluster.nvme()["promoted_blocks"] == 10
    longer = chain_of("a", 25)
    assert cluster.store(longer[: 25 * 16], first=10).stored == 15
    cluster.wait_written()
    cluster.flush_dram()
    assert cluster.load(longer) == 25
    assert cluster.direct("failures") == 0
    assert cluster.nvme()["promoted_blocks"] >= 20, "a run that begins with old blocks comes up as a whole"


def test_after_a_kill_blocks_are_read_directly_again(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 40)
    cluster.restart()
    assert cluster.load(chain) == 40
    assert cluster.direct("blocks") == 40


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.WRONG])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_read_that_fails_is_made_good_by_the_daemon(make: Make, fault: Fault, number: int) -> None:
    cluster = make(lambda read: fault if read == number else None)
    chains = [cluster.store_on_disk(str(name), 10) for name in range(4)]
    for chain in chains:
        assert cluster.load(chain) == 10
    assert cluster.direct("failures") == 1
    assert cluster.direct("bad_blocks") == (fault is Fault.WRONG)
    assert cluster.direct("blocks") >= 30
    wait_until(lambda: cluster.nvme()["direct_reported_blocks"] == (fault is Fault.WRONG), "a doubt is settled")
    assert cluster.nvme()["bad_blocks"] == 0, "a client's word is not enough"
    assert cluster.nvme()["blocks"] == 40


def test_reads_that_always_fail_are_given_up(make: Make) -> None:
    cluster = make(lambda read: Fault.ERROR)
    chains = [cluster.store_on_disk(str(name), 5) for name in range(5)]
    for chain in chains:
        assert cluster.load(chain) == 5
    loader = cluster.connector.direct.loader
    assert loader is not None
    assert "3 direct reads in a row failed" in loader.off
    assert cluster.backend.reads == 3
    assert not cluster.connector.direct.wanted
    assert cluster.connector.counters["direct_in_use"] == 0


def test_a_bad_block_is_a_miss_and_forgotten(make: Make) -> None:
    cluster = make()
    chain = cluster.store_on_disk("a", 20)
    cluster.damage(7)
    good = cluster.load(chain)
    assert good == 7, "the blocks before it were verified"
    assert cluster.direct("bad_blocks") == 1
    wait_until(lambda: cluster.nvme()["blocks"] == good, "the block is forgotten with those behind it")
    assert cluster.nvme()["bad_blocks"] >= 1
    assert cluster.store(chain).stored >= 20 - good
    cluster.wait_written()
    cluster.flush_dram()
    assert cluster.load(chain) == 20


def test_a_block_that_stands_for_another_is_never_good(make: Make) -> None:
    """Right bytes at the wrong place: the checksum, seeded with the wanted key, detects them."""
    cluster = make()
    cluster.store_on_disk("a", 20)
    segment = next((cluster.directories[0] / "segments").glob("*.seg"))
    size = cluster.spec.block_bytes
    with segment.open("r+b") as file:
        file.seek(3 * size)
        third = file.read(size)
        file.seek(5 * size)
        file.write(third)
    assert cluster.load(chain_of("a", 20)) < 20
    assert cluster.direct("bad_blocks") == 1


def test_a_flush_while_reads_are_under_way_is_a_miss(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = cluster.store_on_disk("a", 10)
    match = cluster.connector.match(chain)
    transfer = cluster.connector.load_async(match, range(10))
    wait_until(lambda: cluster.backend.hanging == 1, "a read is under way")
    with cluster.connect() as other:
        assert other.flush(key=key_of(chain, 4)) == 6
        fresh = chain_of("new owner", 40)
        assert other.store(fresh, range(40)).stored == 40
        wait_until(lambda: cluster.nvme()["blocks"] == 44, "they are written")
    cluster.backend.resume()
    assert transfer.result(40) == 0
    # The named slots had no new owner before the lease ended: the bytes that came are the old ones.
    assert all(cluster.is_right(number, chain, number) for number in range(10))
    assert cluster.nvme()["direct_leases"] == 0


def test_blocks_belong_to_a_load_until_its_last_read_has_ended(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = cluster.store_on_disk("a", 10)
    match = cluster.connector.match(chain)
    cluster.pool[:] = 0
    transfer = cluster.connector.load_async(match, range(10))
    wait_until(lambda: cluster.backend.hanging == 1, "a read is under way")
    transfer._limit.deadline_s = time.monotonic()
    transfer.cancel()
    with pytest.raises(tiercache.DeadlineExceeded):
        transfer.result(0.5)  # past its deadline and cancelled, and yet not done
    cluster.backend.resume()
    assert transfer.result(40) in (0, 10)
    assert cluster.load(chain) == 10


def test_a_read_that_never_ends_keeps_its_blocks(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = cluster.store_on_disk("a", 10)
    loader = cluster.connector.direct.loader
    assert loader is not None
    loader._give_up_s = 0.2
    with pytest.raises(CopyLost):
        cluster.connector.load(cluster.connector.match(chain), range(10))
    assert "did not end" in loader.off
    assert not cluster.connector.direct.wanted
    match = cluster.connector.match(chain)
    assert cluster.connector.load(match, range(20, 30), timeout_s=20) == 10, "the cache goes on without direct I/O"


def test_the_daemon_dies_while_reads_are_under_way(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = cluster.store_on_disk("a", 10)
    transfer = cluster.connector.load_async(cluster.connector.match(chain), range(10))
    wait_until(lambda: cluster.backend.hanging == 1, "a read is under way")
    os.kill(cluster.daemon.pid, signal.SIGKILL)
    wait_until(lambda: not cluster.connector.available, "its death is known")
    assert not transfer.done()
    cluster.backend.resume()
    assert transfer.result(30) == 0, "the daemon has not confirmed the lease to its end"
    cluster.connector.close()
    cluster.daemon.close()
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(chain) == 10


def test_eviction_leaves_a_held_run_alone(make: Make) -> None:
    cluster = make(nvme_size="40MiB", nvme_segment="8MiB")
    chain = cluster.store_on_disk("kept", 50)
    match = cluster.connector.match(chain)
    with cluster.connect() as other:
        for number in range(30):
            assert other.store(chain_of(str(number), 50), range(50)).dropped == 0
            cluster.wait_written()
    cluster.pool[:] = 0
    assert cluster.connector.load(match, range(50)) == 50
    assert all(cluster.is_right(number, chain, number) for number in range(50))


def test_a_lease_that_expired_is_a_miss(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None, lease_ttl_max="1s")
    chain = cluster.store_on_disk("a", 10)
    match = cluster.connector.match(chain)
    taken = match._lease
    transfer = cluster.connector.load_async(match, range(10))
    wait_until(lambda: cluster.backend.hanging == 1, "a read is under way")
    cluster.connector.client.leases.let_go(taken)  # the client no longer renews it
    wait_until(lambda: cluster.nvme()["direct_leases"] == 0, "the lease is over")
    cluster.backend.resume()
    assert transfer.result(40) == 0
