"""A daemon on a real directory, and a connector that reads blocks there itself."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, POOL_BLOCKS, Cluster, content
from host_backend import Fault, HostBackend

import tiercache


class DirectCluster(Cluster):
    """A cluster whose connector has a `HostBackend`, if `direct`, and if `stores` for those too; faults as for that."""

    def __init__(
        self,
        root: Path,
        fault: Callable[[int], Fault | None] = lambda number: None,
        write_fault: Callable[[int], Fault | None] = lambda number: None,
        *,
        direct: bool = True,
        stores: bool = False,
        **settings: Any,
    ) -> None:
        self.is_direct = direct
        self.stores = stores
        self.backend = HostBackend(fault, write_fault)
        # Aligned to pages, as device memory is: reads go straight into it.
        self.area = mmap.mmap(-1, POOL_BLOCKS * BLOCK_BYTES)
        super().__init__(root, **settings)

    def start(self) -> None:
        """Start the daemon, and connect."""
        super().start()
        self.wait_loaded()  # before that no client may write to the directory, and blocks go to DRAM
        self.connector.close()
        self.pool = np.frombuffer(self.area, np.uint8).reshape(POOL_BLOCKS, BLOCK_BYTES)
        self.connector = self.connect(gds=self.backend if self.is_direct else "off", gds_store=self.stores)

    def connect(self, **options: Any) -> tiercache.Connector:
        """One more connector to the same pool."""
        pool = tiercache.Pool.from_blocks(self.pool)
        return tiercache.connect(
            self.daemon.address, namespace=self.spec, pool=pool, required=True, request_timeout_s=30.0, **options
        )

    def fill(self, chain: bytes, places: Sequence[int]) -> None:
        """Put the content of a chain's blocks into these pool blocks."""
        for number, place in enumerate(places):
            self.pool[place] = content(key_of(chain, number))

    def dram_blocks(self) -> int:
        """Blocks in DRAM."""
        return int(self.connector.client.stats()["tiers"]["dram"]["blocks"])

    def is_right(self, number: int, chain: bytes, block: int) -> bool:
        """Whether a pool block holds what belongs under a key."""
        return bool(np.array_equal(self.pool[number], content(key_of(chain, block))))

    def direct(self, name: str) -> int:
        """A counter of the connector."""
        return self.connector.counters[f"direct_{name}"]


def store_on_disk(cluster: Cluster, name: str, blocks: int) -> bytes:
    """A chain that is on NVMe and no longer in DRAM."""
    chain = chain_of(name, blocks)
    assert cluster.store(chain).stored == blocks
    cluster.wait_written()
    cluster.flush_dram()
    return chain


def damage(cluster: Cluster, block: int) -> None:
    """Flip a bit of the n-th slot of the first segment, behind the daemon's back."""
    segment = next((cluster.directories[0] / "segments").glob("*.seg"))
    with segment.open("r+b") as file:
        file.seek(block * BLOCK_BYTES + 777)
        byte = file.read(1)[0]
        file.seek(block * BLOCK_BYTES + 777)
        file.write(bytes([byte ^ 16]))
