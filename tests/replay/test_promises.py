"""What the default policy promises, on the sample of traffic that is here; `bench_policies.py --promises` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.replay.formats.mooncake import Mooncake
from tiercache.replay.formats.trace import Trace
from tiercache.replay.optimum import Accesses
from tiercache.replay.requests import Request
from tiercache.replay.simulation import Sizes
from tiercache.replay.swift import Swift

BLOCK_BYTES = 64 << 20
POINT = 0.01


@pytest.fixture(scope="module")
def sample() -> Trace:
    return Trace(Path(__file__).with_name("sample.jsonl.gz"), [Mooncake()], lambda tokens: BLOCK_BYTES)


def rates(sample: Trace, requests: list[Request], percent: int, policy: str, divisor: float = 1.0) -> list[float]:
    """Shares of the blocks asked for that DRAM had, and that both tiers had. DRAM has that part of the different
    blocks, and headroom for the longest request; NVMe is five times as large."""
    accesses = Accesses(requests)
    dram, headroom = accesses.unique_blocks * percent // 100 * BLOCK_BYTES, accesses.longest * BLOCK_BYTES
    engine = Swift(Sizes(dram + headroom, 5 * dram, policy=policy, headroom_bytes=headroom))
    engine.declare(1, sample.specs[1])
    found = [engine.play(one._replace(time_s=one.time_s / divisor)) for one in requests]
    hits = sum(one.dram for one in found), sum(one.dram + one.nvme for one in found)
    return [its / accesses.asked_blocks for its in hits]


@pytest.mark.parametrize("percent", [1, 2, 5])
def test_hazard_is_no_more_than_a_point_behind_lru_at_any_pace(percent: int, sample: Trace) -> None:
    requests = list(sample)
    lru, hazard = (rates(sample, requests, percent, policy) for policy in ("lru", "hazard"))
    assert min(one - other for one, other in zip(hazard, lru, strict=True)) > -POINT
    if percent == 5:  # the quickest
        assert rates(sample, requests, percent, "hazard", 10_000.0) == pytest.approx(hazard, abs=POINT)
