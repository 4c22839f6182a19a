"""The estimate for other sizes of cache as operators see it: from a real daemon, and as a table and a sentence."""

from __future__ import annotations

from typing import Any

from tiercache.cli.what_if import sentence, table

GIB = 1 << 30


def curve(*rates: tuple[float, float]) -> dict[str, Any]:
    """Hit rates by GiB, for 1 GiB of DRAM and 6 GiB of NVMe."""
    found = [{"capacity_bytes": int(size * GIB), "hit_rate": rate} for size, rate in rates]
    tiers = {"dram": {}, "nvme": {"capacity_bytes": 6 * GIB}}
    return {"arena": {"bytes": GIB}, "tiers": tiers, "what_if": {"window_s": 7200.0, "curve": found}}


def test_the_sentence() -> None:
    assert sentence(curve((1, 0.25), (2, 0.375), (7, 0.5), (13, 0.625))) == (
        "twice the DRAM (2.0 GiB) would have had 37.5% of the blocks looked up in the last 120.0 min, and this much "
        "25.0%; with the NVMe 50.0%, with twice the NVMe 62.5%"
    )
    assert "not enough" in sentence(curve())
    assert table(curve()) == []
    assert "off" in sentence({})
