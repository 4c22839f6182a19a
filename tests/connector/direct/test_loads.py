"""Loads past DRAM, end to end: a real daemon, a real directory, O_DIRECT reads into the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chains import chain_of, key_of
from cluster import Cluster
from direct_case import DirectCluster, damage, store_on_disk
from host_backend import Fault, HostBackend
from waiting import wait_until

import tiercache
from tiercache.connector.direct import loads as direct
from tiercache.connector.direct.loads import DirectPath
from tiercache.connector.direct.probe import GdsProbe, Mode
from tiercache.errors import ConfigError, RequestRefused
from tiercache.protocol import messages

Make = Callable[..., DirectCluster]


def test_blocks_come_from_disk_to_pool_and_dram_stays_empty(make: Make) -> None:
    cluster = make()
    chain = store_on_disk(cluster, "a", 100)
    assert cluster.load(chain) == 100
    assert cluster.load(chain) == 100
    assert cluster.direct("blocks") == 200
    assert cluster.connector.load(cluster.connector.match(chain), range(200, 210), first=50) == 10
    assert all(cluster.is_right(200 + number, chain, 50 + number) for number in range(10))
    assert cluster.direct("bytes") == 210 * cluster.spec.block_bytes
    stats = cluster.nvme()
    assert (stats["direct_blocks"], stats["promoted_blocks"], stats["direct_leases"]) == (210, 0, 0)
    assert cluster.connector.client.stats()["tiers"]["dram"]["blocks"] == 0
    assert cluster.backend.reads < 200, "neighbours are read together"


def test_a_worker_reads_under_its_schedulers_lease(make: Make) -> None:
    cluster = make()
    chain = store_on_disk(cluster, "a", 10)
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


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.WRONG])
def test_a_read_that_fails_is_made_good_by_the_daemon(make: Make, fault: Fault) -> None:
    cluster = make(lambda read: fault if read == 1 else None)
    chains = [store_on_disk(cluster, str(name), 10) for name in range(4)]
    for chain in chains:
        assert cluster.load(chain) == 10
    assert cluster.direct("failures") == 1
    assert cluster.direct("bad_blocks") == (fault is Fault.WRONG)
    assert cluster.direct("blocks") >= 30
    wait_until(lambda: cluster.nvme()["direct_reported_blocks"] == (fault is Fault.WRONG), "a doubt is settled")
    assert cluster.nvme()["bad_blocks"] == 0, "a client's word is not enough"
    assert cluster.nvme()["blocks"] == 40


def test_a_bad_block_is_a_miss_and_forgotten(make: Make) -> None:
    cluster = make()
    chain = store_on_disk(cluster, "a", 20)
    damage(cluster, 7)
    good = cluster.load(chain)
    assert good == 7, "the blocks before it were verified"
    assert cluster.direct("bad_blocks") == 1
    wait_until(lambda: cluster.nvme()["blocks"] == good, "the block is forgotten with those behind it")
    assert cluster.nvme()["bad_blocks"] >= 1
    assert cluster.store(chain).stored >= 20 - good
    cluster.wait_written()
    cluster.flush_dram()
    assert cluster.load(chain) == 20


def test_a_flush_while_reads_are_under_way_is_a_miss(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = store_on_disk(cluster, "a", 10)
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


@pytest.mark.stress
def test_the_daemon_dies_while_reads_are_under_way(make: Make) -> None:
    cluster = make(lambda read: Fault.HANG if read == 0 else None)
    chain = store_on_disk(cluster, "a", 10)
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


# --- which side reads ---------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def decided(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, probe: GdsProbe, stores: bool = False) -> DirectPath:
    """What `auto` chooses for a pool that claims to be on a GPU, after such a probe."""
    monkeypatch.setattr(direct, "probe_gds", lambda directory: probe)
    monkeypatch.setattr(direct, "KvikioBackend", lambda probe, device: HostBackend())
    pool = tiercache.Pool.from_blocks(cluster.pool)
    pool.device = "cuda:0"
    path = DirectPath(cluster.connector.client, cluster.spec, pool, "auto", stores)
    wait_until(lambda: "it is being probed" not in (path.reason, path.store_reason), "the choice is made")
    return path


BOTH = GdsProbe("/d", Mode.GDS, "", 6e9, 4e9, 3e9, 5e9, 3e9)


@pytest.mark.parametrize(
    ("probe", "loads", "stores"),
    [
        (BOTH, True, True),
        (replace(BOTH, direct_write_bytes_per_s=2e9), True, False),
        (replace(BOTH, write_reason="read-only"), True, False),
        (replace(BOTH, direct_bytes_per_s=2e9), False, True),
        (replace(BOTH, direct_bytes_per_s=2e9, direct_write_bytes_per_s=2e9), False, False),
        (replace(BOTH, mode=Mode.POSIX, reason="no cuda"), False, False),
    ],
)
def test_each_direction_is_chosen_by_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, probe: GdsProbe, loads: bool, stores: bool
) -> None:
    path = decided(cluster, monkeypatch, probe, stores=True)
    assert (path.loader is not None, path.storer is not None, path.wanted) == (loads, stores, loads)
    assert (path.reason == "", path.store_reason == "") == (loads, stores)
    counters = path.counters()
    assert (counters["direct_in_use"], counters["direct_store_in_use"]) == (loads, stores)
    assert counters["bounce_write_mb_per_s"] == 3000
    if probe.write_reason:
        assert path.store_reason == "read-only"
    elif not stores and probe.mode is Mode.GDS:
        assert path.store_reason == "gds: 2.00 GB/s are less than 3.00 by the bounce"
    path.close()
    assert (path.counters()["direct_in_use"], path.counters()["direct_store_in_use"]) == (0, 0)
    unasked = decided(cluster, monkeypatch, probe)
    assert unasked.storer is None
    unasked.close()


def test_a_pool_on_the_cpu_is_not_probed(cluster: Cluster) -> None:
    pool = tiercache.Pool.from_blocks(cluster.pool)
    with tiercache.connect(cluster.daemon.address, namespace=cluster.spec, pool=pool, gds="auto") as connector:
        assert connector.direct.reason == "no cuda: the pool is on the CPU"
        assert not connector.direct.wanted


def test_off_is_the_default_and_nonsense_is_refused(cluster: Cluster) -> None:
    assert not cluster.connector.direct.wanted
    assert cluster.connector.direct.counters() == {}
    with pytest.raises(ConfigError, match="choose 'off' or 'auto'"):
        tiercache.connect(cluster.daemon.address, namespace=cluster.spec, gds="always")


# --- the daemon's side ----------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(cluster: Cluster) -> None:
    call, session = cluster.connector.client.call, cluster.connector.client.session()
    chain = store_on_disk(cluster, "a", 5)
    number = session.namespace_id(cluster.spec)
    matched = session.call(messages.Match, namespaces=[number], keys=chain, ttl_ms=10_000, extents=True)
    assert (matched.dram_blocks, matched.below_blocks, matched.extents) == (0, 5, True)
    good = {"lease": matched.lease, "namespace": number, "first": 0, "count": 5}
    wrong = (
        ({"count": 0}, "bad_value"),
        ({"count": 513}, "bad_value"),
        ({"first": -1}, "bad_value"),
        ({"lease": 7}, "unknown_lease"),
        ({"namespace": 99}, "unknown_namespace"),
    )
    for changes, code in wrong:
        with pytest.raises(RequestRefused) as refused:
            call(messages.Extents, **{**good, **changes})
        assert refused.value.code == code, changes
    assert session.call(messages.Extents, **{**good, "first": 5}).extents == b""
    # Blocks that were not named are not doubted: the client cannot have read them.
    for index in (0, 99, -1):
        call(messages.BadExtent, lease=matched.lease, namespace=number, index=index)
    assert cluster.nvme()["direct_reported_blocks"] == 0
    assert session.call(messages.Release, lease=matched.lease).good
    assert cluster.load(chain) == 5
    plain = session.call(messages.Match, namespaces=[number], keys=chain, ttl_ms=1000)
    assert not plain.extents
    with pytest.raises(RequestRefused, match="keeps no extents"):
        call(messages.Extents, **{**good, "lease": plain.lease})
    assert session.call(messages.Release, lease=plain.lease).good
