"""Quotas on NVMe, with a real daemon: a tenant at its limit makes room among its own blocks, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, Cluster, content
from waiting import wait_until

import tiercache

Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a daemon with NVMe quotas, in blocks by name."""
    with ExitStack() as ends:

        def make(**settings: Any) -> Cluster:
            quota = ",".join(f"{name}={blocks * BLOCK_BYTES}" for name, blocks in settings.pop("blocks").items())
            cluster = Cluster(tmp_path, nvme_quota=quota, **settings)
            ends.callback(cluster.stop)
            return cluster

        yield make


class Tenant:
    """A client that names its tenant, with a pool of its own."""

    def __init__(self, cluster: Cluster, name: str, spec: tiercache.NamespaceSpec | None = None) -> None:
        self.cluster, self.name = cluster, name
        self.pool = np.zeros((128, BLOCK_BYTES), np.uint8)
        self.connector = tiercache.connect(
            cluster.daemon.address,
            namespace=spec or cluster.spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            required=True,
            request_timeout_s=30.0,
            tenant=name,
        )

    def store(self, chain: bytes) -> None:
        """Store a chain, and wait until every block that can be written has been written."""
        count = len(chain) // 16
        for number in range(count):
            self.pool[number] = content(key_of(chain, number))
        self.connector.store(chain, range(count))
        wait_until(self.quiet, "writes")

    def quiet(self) -> bool:
        nvme = self.cluster.nvme()
        return nvme["write_queue_blocks"] == 0 and nvme["write_in_flight_bytes"] == 0

    def below(self) -> int:
        """Blocks of the tenant on NVMe."""
        rows = self.connector.client.stats()["namespaces"]
        return sum(row["below_blocks"] for row in rows if row["tenant"] == self.name)

    def load(self, chain: bytes) -> int:
        """Load what there is of a chain, and compare it."""
        match = self.connector.match(chain)
        good = self.connector.load(match, range(match.blocks), timeout_s=20) if match.blocks else 0
        for number in range(good):
            assert (self.pool[number] == content(key_of(chain, number))).all(), f"wrong bytes in block {number}"
        return good


def quota(cluster: Cluster, name: str) -> dict[str, Any]:
    rows = cluster.connector.client.stats()["quotas"]
    (row,) = [row for row in rows if (row["name"], row["tier"]) == (name, "nvme")]
    return dict(row)


def forget_dram(cluster: Cluster) -> None:
    cluster.connector.flush(tier="dram", all_namespaces=True)


def test_a_tenant_at_its_quota_evicts_its_own_leaves(start: Start) -> None:
    cluster = start(blocks={"a": 24})
    a, b = Tenant(cluster, "a"), Tenant(cluster, "b")
    other, old, new = chain_of("other", 40), chain_of("old", 20), chain_of("new", 20)
    b.store(other)
    a.store(old)
    a.store(new)
    assert (a.below(), b.below()) == (24, 40)
    limits = {"limit_bytes": 24 * BLOCK_BYTES, "used_bytes": 24 * BLOCK_BYTES, "refused_blocks": 0}
    assert quota(cluster, "a") == {"name": "a", "tier": "nvme", **limits}
    forget_dram(cluster)
    assert (a.load(new), a.load(old), b.load(other)) == (20, 4, 40)


def test_what_does_not_fit_is_not_written_and_counted(start: Start) -> None:
    cluster = start(blocks={"a": 10})
    a = Tenant(cluster, "a")
    chain = chain_of("long", 30)
    a.store(chain)
    assert a.below() == 10
    assert quota(cluster, "a")["refused_blocks"] == cluster.nvme()["skipped_by_quota"] > 0
    assert a.load(chain) == 30  # in DRAM all of it
    forget_dram(cluster)
    assert a.load(chain) == 10


def test_a_full_disk_does_not_make_others_pay(start: Start) -> None:
    """The tenant goes on storing at its limit while no slot is free: it replaces its own blocks."""
    cluster = start(blocks={"a": 32}, nvme_size="16MiB", nvme_segment="2MiB")
    a, b = Tenant(cluster, "a"), Tenant(cluster, "b")
    for number in range(3):
        b.store(chain_of(f"b{number}", 60))
    settled = b.below()
    for number in range(12):
        a.store(chain_of(f"a{number}", 20))
    assert a.below() <= 32
    # It lost what the tenant was entitled to, and loses no more, however much the tenant stores.
    lost = settled - b.below()
    for number in range(12, 24):
        a.store(chain_of(f"a{number}", 20))
    assert a.below() <= 32
    assert settled - b.below() == lost
    assert cluster.check_daemon().findings == []


def test_a_quota_that_was_made_smaller_holds_after_the_next_store(start: Start, tmp_path: Path) -> None:
    cluster = start(blocks={"a": 128})
    a = Tenant(cluster, "a")
    a.store(chain_of("first", 100))
    assert a.below() == 100
    a.connector.close()
    cluster.stop()
    cluster.settings["nvme_quota"] = f"a={8 * BLOCK_BYTES}"
    cluster.start()
    cluster.wait_loaded()
    a = Tenant(cluster, "a")
    assert a.below() == 100
    a.store(chain_of("second", 4))
    wait_until(lambda: a.below() <= 8, "it fits")
    forget_dram(cluster)
    assert a.load(chain_of("second", 4)) == 4


def test_over_several_directories_and_namespaces_a_tenant_has_one_quota(start: Start) -> None:
    cluster = start(blocks={"*": 24}, directories=2)
    other_form = tiercache.NamespaceSpec(
        engine="test/2", layout="bytes", dtype="uint8", block_size=1, block_bytes=BLOCK_BYTES
    )
    one, two, free = Tenant(cluster, "a"), Tenant(cluster, "a", other_form), Tenant(cluster, "")
    for number in range(6):
        one.store(chain_of(f"one{number}", 6))
        two.store(chain_of(f"two{number}", 6))
    free.store(chain_of("free", 60))
    assert one.below() <= 24
    assert quota(cluster, "a")["used_bytes"] == one.below() * BLOCK_BYTES
    assert all(row["blocks"] for row in cluster.nvme()["directories"])
    forget_dram(cluster)
    assert free.load(chain_of("free", 60)) == 60
    assert two.load(chain_of("two5", 6)) == 6


def test_a_namespace_by_the_start_of_its_fingerprint(start: Start) -> None:
    form = {"engine": "test/1", "layout": "bytes", "dtype": "uint8"}  # the cluster's
    spec = tiercache.NamespaceSpec(**form, block_size=1, block_bytes=BLOCK_BYTES)
    name = f"ns:{spec.fingerprint()[:12]}"
    cluster = start(blocks={name: 6})
    cluster.store(chain_of("x", 20))
    cluster.wait_written()
    assert cluster.nvme()["blocks"] == 6
    assert quota(cluster, name)["used_bytes"] == 6 * BLOCK_BYTES
