"""A model with a chain and a window over a real daemon: real directories, real kills."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, Cluster, content
from waiting import wait_until

import tiercache

WINDOW = 4


class Layers:
    """One namespace of an engine: a connector, its pool, and what it stores."""

    def __init__(self, cluster: Cluster, instance: bytes, group: str, window_blocks: int) -> None:
        self.spec = tiercache.NamespaceSpec(
            engine="test/1",
            layout="bytes",
            dtype="uint8",
            block_size=1,
            block_bytes=BLOCK_BYTES,
            group=group,
            window_blocks=window_blocks,
        )
        self.pool = np.zeros((64, BLOCK_BYTES), np.uint8)
        self.connector = tiercache.connect(
            cluster.daemon.address,
            namespace=self.spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            required=True,
            request_timeout_s=30.0,
            instance=instance,
        )

    def right(self, key: bytes) -> np.ndarray[Any, Any]:
        return content(key + self.spec.group.encode())

    def store(self, chain: bytes, first: int) -> None:
        numbers = range(first, len(chain) // 16)
        for place, number in enumerate(numbers):
            self.pool[place] = self.right(key_of(chain, number))
        result = self.connector.store(chain, range(len(numbers)), first=first)
        assert result.stored + result.present == len(numbers)

    def load(self, ticket: bytes, chain: bytes, cut: int) -> int:
        """Load what this namespace needs for the cut; returns how many of these blocks are good."""
        first = max(0, cut - self.spec.window_blocks) if self.spec.window_blocks else 0
        self.pool[:] = 0
        good = self.connector.load(self.connector.adopt(ticket), range(cut - first), first=first, timeout_s=20)
        for place in range(good):
            number = first + place
            assert np.array_equal(self.pool[place], self.right(key_of(chain, number))), f"wrong bytes in block {number}"
        return good


class Hybrid:
    """An engine with both: one that matches, and a worker for each."""

    def __init__(self, cluster: Cluster) -> None:
        instance = b"i" * 16
        self.layers = [Layers(cluster, instance, "full", 0), Layers(cluster, instance, "window", WINDOW)]
        spec = self.layers[0].spec
        self.scheduler = tiercache.connect(cluster.daemon.address, namespace=spec, required=True, instance=instance)

    def store(self, chain: bytes, first: int = 0) -> None:
        for layers in self.layers:
            layers.store(chain, first)

    def load(self, chain: bytes) -> int:
        """The cut at which the engine may continue: all of its blocks are good, or none is used."""
        match = self.scheduler.match(chain, namespaces=[layers.spec for layers in self.layers])
        ticket, cut = match.ticket(), match.blocks
        good = [layers.load(ticket, chain, cut) for layers in self.layers] if cut else [0, 0]
        self.scheduler.release(match)
        return cut if good == [cut, min(cut, WINDOW)] else 0

    def close(self) -> None:
        for connector in (self.scheduler, *(layers.connector for layers in self.layers)):
            connector.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, directories=2)
    yield made
    made.stop()


def restarted(cluster: Cluster, hybrid: Hybrid) -> Hybrid:
    """Both, after kill -9 of the daemon."""
    hybrid.close()
    cluster.restart()
    return Hybrid(cluster)


CHAINS = 16
"""Enough chains that both directories almost certainly have some of them."""


def test_windows_and_chains_come_back_after_a_kill(cluster: Cluster) -> None:
    hybrid, chains = Hybrid(cluster), [chain_of(str(number), 20) for number in range(CHAINS)]
    for chain in chains:
        hybrid.store(chain[: 16 * 12])
        hybrid.store(chain, first=12)
    cluster.wait_written()
    assert cluster.nvme()["blocks"] == CHAINS * 40
    hybrid = restarted(cluster, hybrid)
    assert [hybrid.load(chain) for chain in chains] == [20] * CHAINS
    stats = cluster.nvme()
    assert stats["promoted_blocks"] == CHAINS * (20 + WINDOW)
    assert stats["written_blocks"] == 0
    assert all(one["blocks"] for one in stats["directories"])
    assert hybrid.load(chains[0][: 16 * 9]) == 9, "an older cut, with a window of its own"
    # One block of a window is flushed: the longest cut that does not need it. Its chain goes on with it.
    hybrid.layers[1].connector.flush(key=key_of(chains[1], 17))
    assert hybrid.load(chains[1]) == 17
    hybrid = restarted(cluster, hybrid)
    assert hybrid.load(chains[1]) == 17
    assert hybrid.load(chains[2]) == 20
    hybrid.layers[1].connector.flush()
    hybrid = restarted(cluster, hybrid)
    assert [hybrid.load(chain) for chain in chains] == [0] * CHAINS
    assert cluster.nvme()["blocks"] == CHAINS * 20
    # Stored again, and written within the grace of a stop.
    for chain in chains:
        hybrid.layers[1].store(chain, 0)
    hybrid.close()
    cluster.stop()
    cluster.start()
    cluster.wait_loaded()
    hybrid = Hybrid(cluster)
    assert [hybrid.load(chain) for chain in chains] == [20] * CHAINS
    assert cluster.check_daemon(sample=-1).scanned_blocks >= 200
    hybrid.close()


def test_a_window_and_its_chain_share_a_directory(cluster: Cluster) -> None:
    hybrid, chains = Hybrid(cluster), [chain_of(str(number), 12) for number in range(12)]
    for chain in chains:
        hybrid.store(chain)
    cluster.wait_written()
    hybrid.close()
    cluster.kill()
    shutil.rmtree(cluster.directories[1])
    cluster.start()
    cluster.wait_loaded()
    hybrid = Hybrid(cluster)
    found = [hybrid.load(chain) for chain in chains]
    assert set(found) == {0, 12}, "a lost disk costs its share, whole requests of it"
    for chain in chains:
        hybrid.store(chain)
    cluster.wait_written()
    assert [hybrid.load(chain) for chain in chains] == [12] * 12
    hybrid.close()


def test_the_arena_is_too_small_for_all_windows(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, arena="4MiB")
    hybrid, chains = Hybrid(cluster), [chain_of(str(number), 20) for number in range(6)]
    for chain in chains:
        hybrid.store(chain)
        cluster.wait_written()
    assert [hybrid.load(chain) for chain in chains] == [20] * 6
    wait_until(lambda: not cluster.connector.client.stats()["leases"]["read"], "no lease is left")
    hybrid.close()
    cluster.stop()
