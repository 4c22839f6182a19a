"""Loads past DRAM, end to end: a real daemon, a real directory, O_DIRECT reads into the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from cluster import Cluster
from direct_case import DirectCluster
from host_backend import Fault, HostBackend
from waiting import wait_until

import tiercache
from tiercache.connector.direct import loads as direct
from tiercache.connector.direct.loads import DirectPath
from tiercache.connector.direct.probe import GdsProbe, Mode
from tiercache.errors import ConfigError, RequestRefused
from tiercache.protocol import messages
from tiercache.protocol.checksums import CHECKSUM_LANES

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


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.WRONG])
@pytest.mark.parametrize("number", [1])
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


@pytest.mark.stress
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


def ask(cluster: Cluster, keys: bytes, *, direct: bool, promote: bool, ttl_ms: int = 10_000) -> messages.Matched:
    """A match with extents by hand."""
    session = cluster.connector.client.session()
    number = session.namespace_id(cluster.spec, direct=direct)
    reply = cluster.connector.client.call(
        messages.Match, namespaces=[number], keys=keys, ttl_ms=ttl_ms, resolve=8, promote=promote, extents=True
    )
    assert isinstance(reply, messages.Matched)
    return reply


def extents(cluster: Cluster, lease: int, first: int, count: int) -> messages.ExtentList:
    number = cluster.connector.client.session().namespace_id(cluster.spec)
    reply = cluster.connector.client.call(messages.Extents, lease=lease, namespace=number, first=first, count=count)
    assert isinstance(reply, messages.ExtentList)
    return reply


def on_disk(cluster: Cluster, blocks: int) -> bytes:
    chain = chain_of("a", blocks)
    assert cluster.store(chain).stored == blocks
    cluster.wait_written()
    cluster.flush_dram()
    return chain


def release(cluster: Cluster, lease: int) -> bool:
    reply = cluster.connector.client.call(messages.Release, lease=lease)
    assert isinstance(reply, messages.Released)
    return reply.good


def test_extents_say_where_blocks_are(cluster: Cluster) -> None:
    session = cluster.connector.client.session()
    session.namespace_id(cluster.spec, direct=True)
    chain = on_disk(cluster, 20)
    matched = ask(cluster, chain, direct=True, promote=False)
    assert (matched.dram_blocks, matched.below_blocks, matched.extents, matched.frames) == (0, 20, True, [b""])
    reply = extents(cluster, matched.lease, 5, 512)
    named = messages.unpack_extents(reply.extents)
    assert (reply.first, reply.directories, len(named)) == (5, [str(cluster.directories[0])], 15)
    assert {(one.kind, one.codec, one.length, one.stored_length, one.directory) for one in named} == {
        (CHECKSUM_LANES, 0, cluster.spec.block_bytes, cluster.spec.block_bytes, 0)
    }
    for number, one in enumerate(named):
        path = cluster.directories[0] / "segments" / f"{one.segment:08d}.seg"
        with path.open("rb") as file:
            file.seek(one.offset)
            assert file.read(one.length) == cluster.content_of(chain[16 * (5 + number) : 16 * (6 + number)]).tobytes()
    assert extents(cluster, matched.lease, 20, 1).extents == b""
    assert release(cluster, matched.lease)
    assert cluster.nvme()["direct_blocks"] == 15


def test_what_makes_no_sense_is_refused(cluster: Cluster) -> None:
    call = cluster.connector.client.call
    chain = on_disk(cluster, 5)
    matched = ask(cluster, chain, direct=False, promote=False)
    number = cluster.connector.client.session().namespace_id(cluster.spec)
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
    # Blocks that were not named are not doubted: the client cannot have read them.
    for index in (0, 99, -1):
        call(messages.BadExtent, lease=matched.lease, namespace=number, index=index)
    assert cluster.nvme()["direct_reported_blocks"] == 0
    assert release(cluster, matched.lease)
    assert cluster.load(chain) == 5
    plain = call(messages.Match, namespaces=[number], keys=chain, ttl_ms=1000)
    assert isinstance(plain, messages.Matched)
    assert not plain.extents
    with pytest.raises(RequestRefused, match="keeps no extents"):
        call(messages.Extents, **{**good, "lease": plain.lease})
    assert release(cluster, plain.lease)
