"""Which side reads: what `gds=` makes of a pool, a daemon and a probe. And the daemon's answers about extents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chains import chain_of
from cluster import Cluster
from waiting import wait_until

import tiercache
from tiercache.connector.direct import loads as direct
from tiercache.connector.direct.backend import HostBackend
from tiercache.connector.direct.loads import DirectPath
from tiercache.connector.direct.probe import GdsProbe, Mode
from tiercache.errors import ConfigError, RequestRefused
from tiercache.protocol import messages
from tiercache.protocol.checksums import CHECKSUM_LANES


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


def test_auto_uses_what_is_faster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = decided(cluster, monkeypatch, GdsProbe("/d", Mode.GDS, "", 6e9, 4e9, 3e9))
    assert reads.reason == ""
    assert reads.wanted
    counters = reads.counters()
    assert (counters["direct_mode"], counters["direct_in_use"]) == (2, 1)
    assert (counters["direct_mb_per_s"], counters["bounce_mb_per_s"]) == (6000, 4000)
    assert max(map(len, counters)) <= 32
    reads.close()
    assert not reads.wanted


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


def test_direct_stores_are_only_for_clients_that_ask(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    path = decided(cluster, monkeypatch, BOTH)
    assert path.storer is None
    assert path.store_reason == "it was not asked for"
    path.close()


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (GdsProbe("/d", Mode.COMPAT, "gds: no driver", 2e9, 4e9, 3e9), "cufile-compat: 2.00 GB/s are less than 4.00"),
        (GdsProbe("/d", Mode.POSIX, "no cuda", 0, 0, 3e9), "no cuda"),
    ],
)
def test_auto_leaves_it_to_the_daemon_where_that_is_faster(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, probe: GdsProbe, reason: str
) -> None:
    reads = decided(cluster, monkeypatch, probe)
    assert reason in reads.reason
    assert not reads.wanted
    assert reads.counters()["direct_in_use"] == 0


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


def test_a_pool_in_pieces_is_loaded_by_the_daemon(cluster: Cluster) -> None:
    layers = [np.zeros((4, cluster.spec.block_bytes // 2), np.uint8) for _ in range(2)]
    pool = tiercache.Pool.from_layers(layers)
    options = {"namespace": cluster.spec, "pool": pool, "gds": HostBackend()}
    with tiercache.connect(cluster.daemon.address, **options) as connector:
        assert "2 pieces" in connector.direct.reason


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


def test_blocks_with_the_daemons_own_checksum_are_not_named(cluster: Cluster) -> None:
    chain = on_disk(cluster, 5)
    matched = ask(cluster, chain, direct=False, promote=True)
    assert matched.extents
    assert extents(cluster, matched.lease, 0, 5).extents == b""
    number = cluster.connector.client.session().namespace_id(cluster.spec)
    asked = {"lease": matched.lease, "namespace": number, "first": 0, "count": 5}
    come = 0

    def all_come() -> bool:
        nonlocal come
        reply = cluster.connector.client.call(messages.Resolve, **asked)
        assert isinstance(reply, messages.Frames)
        come = len(reply.frames) // 8
        return come == 5

    wait_until(all_come, "they come up when they are asked for")
    assert release(cluster, matched.lease)


def test_without_promote_nothing_ever_comes_up(cluster: Cluster) -> None:
    chain = on_disk(cluster, 5)
    matched = ask(cluster, chain, direct=False, promote=False)
    number = cluster.connector.client.session().namespace_id(cluster.spec)
    reply = cluster.connector.client.call(messages.Resolve, lease=matched.lease, namespace=number, first=0, count=5)
    assert isinstance(reply, messages.Frames)
    assert (reply.frames, reply.more) == (b"", False)
    assert release(cluster, matched.lease)
    assert cluster.nvme()["promoted_blocks"] == 0


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


def test_a_block_that_a_client_calls_bad_is_read_before_it_is_dropped(cluster: Cluster) -> None:
    session = cluster.connector.client.session()
    number = session.namespace_id(cluster.spec, direct=True)
    chain = on_disk(cluster, 6)
    matched = ask(cluster, chain, direct=True, promote=False)
    named = messages.unpack_extents(extents(cluster, matched.lease, 0, 6).extents)
    path = cluster.directories[0] / "segments" / f"{named[4].segment:08d}.seg"
    with path.open("r+b") as file:
        file.seek(named[4].offset + 100)
        file.write(b"damaged!")
    for index in (1, 1, 4):
        cluster.connector.client.call(messages.BadExtent, lease=matched.lease, namespace=number, index=index)
    wait_until(lambda: cluster.nvme()["blocks"] == 4, "the one that is bad is dropped, and what follows")
    stats = cluster.nvme()
    assert (stats["direct_reported_blocks"], stats["bad_blocks"]) == (3, 1)
    assert release(cluster, matched.lease), "the other blocks are good all the same"


def test_a_lost_session_lets_go(cluster: Cluster) -> None:
    pool = tiercache.Pool.from_blocks(cluster.pool)
    chain = on_disk(cluster, 5)
    options = {"namespace": cluster.spec, "pool": pool, "gds": HostBackend(), "required": True}
    other = tiercache.connect(cluster.daemon.address, **options)
    match = other.match(chain)
    assert match.blocks == 5
    assert cluster.nvme()["direct_leases"] == 1
    other.close()
    wait_until(lambda: cluster.nvme()["direct_leases"] == 0, "no lease is left")
