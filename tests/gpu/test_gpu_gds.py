"""Direct moves of device memory: the checksum kernel compiled, and kvikio where a probe lets it in."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import chain_of, key_of

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("xxhash")

import torch
from checksum_cases import *  # noqa: F403 - the tests
from checksum_cases import noise, unsigned
from cluster import BLOCK_BYTES, POOL_BLOCKS, Cluster, content
from direct_case import damage, store_on_disk

import tiercache
from tiercache.connector.direct.backend import KvikioBackend
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds
from tiercache.kernels.checksum import lane_sums
from tiercache.protocol.checksums import lane_sum

pytestmark = pytest.mark.gpu


def test_many_large_blocks_at_once(device: str) -> None:
    data = noise(64, 2 << 20)
    pool = torch.from_numpy(data).to(device)
    addresses = torch.arange(64, device=device) * (2 << 20) + pool.data_ptr()
    assert unsigned(lane_sums(addresses, 2 << 20)) == [lane_sum(row.data) for row in data]


def test_kernels_do_not_disturb_a_capture(device: str) -> None:
    """Blocks are verified in a thread of their own while the engine captures its graphs."""
    backend = backend_without_kvikio(device)
    pool = torch.from_numpy(noise(4, 65536)).to(device)
    addresses = (torch.arange(4) * 65536 + pool.data_ptr()).numpy()
    expected = backend.lane_sums(addresses, 65536)
    seen: list[list[int]] = []
    graph, work = torch.cuda.CUDAGraph(), torch.zeros(16, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work += 1
        thread = threading.Thread(target=lambda: seen.append(backend.lane_sums(addresses, 65536)))
        thread.start()
        thread.join()
        work += 1
    assert seen == [expected]
    graph.replay()
    torch.cuda.synchronize()
    assert work.tolist() == [2.0] * 16


def backend_without_kvikio(device: str) -> KvikioBackend:
    """The part of the backend that verifies, which needs no disk."""
    backend = KvikioBackend.__new__(KvikioBackend)
    backend._torch, backend._device, backend._sums = torch, device, lane_sums  # rule: its constructor needs a disk
    backend._stream = torch.cuda.Stream(device)  # rule: as above
    return backend


# --- with kvikio ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> GdsProbe:
    """What this machine can do; skips where kvikio is of no use."""
    if importlib.util.find_spec("kvikio") is None:  # imported by the probe alone: its libraries may be missing
        pytest.skip("kvikio is not installed")
    found = probe_gds(tmp_path_factory.mktemp("gds"))
    if found.mode is Mode.POSIX:
        pytest.skip(f"no direct reads here: {found.reason}")
    return found


@pytest.fixture
def cluster(probe: GdsProbe, device: str, tmp_path: Path) -> Iterator[GpuCluster]:
    made = GpuCluster(tmp_path, probe, device)
    yield made
    made.stop()


class GpuCluster(Cluster):
    """A cluster whose pool is on a GPU, and whose connector reads blocks there directly."""

    def __init__(self, root: Path, probe: GdsProbe, device: str) -> None:
        self.gpu_pool = torch.zeros((POOL_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device)
        self.backend = KvikioBackend(probe, device)
        super().__init__(root)

    def start(self) -> None:
        """Start the daemon, and connect with both pools."""
        super().start()
        self.gpu = self.connect_gpu(gds_store=False)

    def connect_gpu(self, *, gds_store: bool) -> tiercache.Connector:
        """One more connector to the pool on the GPU."""
        return tiercache.connect(
            self.daemon.address,
            namespace=self.spec,
            pool=tiercache.Pool.from_blocks(self.gpu_pool),
            required=True,
            request_timeout_s=30.0,
            gds=self.backend,
            gds_store=gds_store,
        )

    def stop(self) -> None:
        self.gpu.close()
        super().stop()

    def expect(self, places: list[int], chain: bytes) -> None:
        for number, place in enumerate(places):
            wanted = torch.from_numpy(content(key_of(chain, number)).copy())
            assert torch.equal(self.gpu_pool[place].cpu(), wanted), f"wrong bytes in block {number}"


def test_blocks_come_from_disk_to_device(cluster: GpuCluster) -> None:
    chain = store_on_disk(cluster, "a", 100)
    places = list(range(100))[::-1]
    assert cluster.gpu.load(cluster.gpu.match(chain), places) == 100
    cluster.expect(places, chain)
    assert cluster.gpu.counters["direct_blocks"] == 100
    assert cluster.nvme()["promoted_blocks"] == 0


def test_a_load_waits_for_kernels_that_use_the_blocks(cluster: GpuCluster, device: str) -> None:
    chain = store_on_disk(cluster, "a", 4)
    match = cluster.gpu.match(chain)
    torch.cuda._sleep(int(1e9))
    before = cluster.gpu_pool[:4].clone()  # queued behind the sleep: it must see the old bytes
    transfer = cluster.gpu.load_async(match, range(4))
    assert transfer.result(20) == 4
    assert not before.any()
    cluster.expect([0, 1, 2, 3], chain)


def test_a_bad_block_never_counts_as_good(cluster: GpuCluster) -> None:
    chain = store_on_disk(cluster, "a", 20)
    damage(cluster, 7)
    good = cluster.gpu.load(cluster.gpu.match(chain), range(20))
    assert good <= 7
    cluster.expect(list(range(good)), chain)
    assert cluster.gpu.counters["direct_bad_blocks"] == 1


@pytest.fixture
def writing(cluster: GpuCluster, probe: GdsProbe) -> Iterator[tiercache.Connector]:
    """A connector that stores past DRAM."""
    if probe.write_reason:
        pytest.skip(f"no direct writes here: {probe.write_reason}")
    with cluster.connect_gpu(gds_store=True) as connector:
        yield connector


def test_blocks_go_from_device_to_disk(cluster: GpuCluster, writing: tiercache.Connector) -> None:
    chain = chain_of("a", 100)
    places = list(range(100))[::-1]
    for number, place in enumerate(places):
        cluster.gpu_pool[place] = torch.from_numpy(content(key_of(chain, number)).copy())
    assert writing.store(chain, places) == tiercache.StoreResult(stored=100)
    assert (cluster.nvme()["direct_stored_blocks"], cluster.nvme()["written_blocks"]) == (100, 0)
    cluster.check_daemon(sample=-1)
    cluster.gpu_pool.zero_()
    assert cluster.gpu.load(cluster.gpu.match(chain), range(100)) == 100
    cluster.expect(list(range(100)), chain)
    assert cluster.load(chain) == 100, "the daemon verifies what the kernel has summed"


def test_a_store_waits_for_kernels_that_fill_the_blocks(cluster: GpuCluster, writing: tiercache.Connector) -> None:
    chain = chain_of("a", 4)
    source = torch.stack([torch.from_numpy(content(key_of(chain, number)).copy()) for number in range(4)])
    source = source.to(cluster.gpu_pool.device)
    torch.cuda._sleep(int(1e9))
    cluster.gpu_pool[:4] = source  # queued behind the sleep
    assert writing.store_async(chain, range(4)).result(20).stored == 4
    assert cluster.load(chain) == 4
