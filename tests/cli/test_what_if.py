"""The estimate for other sizes of cache as operators see it: from a real daemon, and as a table and a sentence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from command_line import Run
from waiting import wait_until

import tiercache
from tiercache.cli.what_if import sentence, table

BLOCKS = 320
ROUNDS = 25
SPEC = tiercache.NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=1, block_bytes=65536)
GIB = 1 << 30


def curve(*rates: tuple[float, float]) -> dict[str, Any]:
    """Hit rates by GiB, for 1 GiB of DRAM and 6 GiB of NVMe."""
    found = [{"capacity_bytes": int(size * GIB), "hit_rate": rate} for size, rate in rates]
    tiers = {"dram": {}, "nvme": {"capacity_bytes": 6 * GIB}}
    return {"arena": {"bytes": GIB}, "tiers": tiers, "what_if": {"window_s": 7200.0, "curve": found}}


def test_a_real_daemon_says_what_more_memory_would_bring(run: Run) -> None:
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, SPEC.block_bytes), np.uint8))
    with (
        tiercache.launch("64MiB", policy="lru") as daemon,
        tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True) as connector,
    ):
        for number in range(ROUNDS):  # 5 chains in turn are 1600 blocks, and there is room for 1024
            chain = tiercache.KeyChain(tiercache.root_key(f"{number % 5}"), 1, range(BLOCKS))
            connector.match(chain.packed())
            connector.store(chain.packed(), range(BLOCKS))

        def counted() -> dict[str, Any] | None:
            found: dict[str, Any] = connector.stats()["daemon"]["what_if"]
            return found if found["accessed_blocks"] == ROUNDS * BLOCKS else None

        what_if = wait_until(counted, "all accesses are counted")
        assert what_if["hit_rate"] == 0
        found = {one["capacity_bytes"] >> 20: one["hit_rate"] for one in what_if["curve"]}
        assert list(found) == [8, 16, 32, 64, 128, 256, 512]
        assert found[64] == pytest.approx(0, abs=0.05)  # a loop that is larger than an LRU cache
        assert found[128] == found[512] == pytest.approx(0.8, abs=0.05)
        text = run("stats", "--address", daemon.address)[1]
    assert re.search(r"what if +twice the DRAM \(128.0 MiB\) would have had [78]\d\.\d% of the blocks", text)
    assert "# what if (LRU caches of other sizes)" in text


def test_the_sentence() -> None:
    assert sentence(curve((1, 0.25), (2, 0.375), (7, 0.5), (13, 0.625))) == (
        "twice the DRAM (2.0 GiB) would have had 37.5% of the blocks looked up in the last 120.0 min, and this much "
        "25.0%; with the NVMe 50.0%, with twice the NVMe 62.5%"
    )
    assert "not enough" in sentence(curve())
    assert table(curve()) == []
    assert "off" in sentence({})
