"""Chains and windows over many lives of the NVMe tier, at random: what is found was stored, and not flushed since."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lives import live
from played import played
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace


async def live_with_windows(root: Path, seed: int, lives: int, steps: int) -> int:
    """A chain and two windows, as wide as the seed says."""
    rng = random.Random(seed)
    windows = rng.randrange(1, 12), rng.randrange(1, 5)

    def spaces_of(rig: TierRig) -> list[Namespace]:
        return [rig.namespace(), *(rig.namespace(rank=rank, window_blocks=w) for rank, w in enumerate(windows, 1))]

    return await live(root, seed, lives, steps, spaces_of, arena_regions=3, nvme_bytes=24 << 20)


@played
async def test_lives_with_windows_that_end_anyhow(tmp_path: Path) -> None:
    back = [await live_with_windows(tmp_path / str(seed), seed, lives=4, steps=40) for seed in range(3)]
    assert sum(back) > 0, "no block ever came back: the test has checked nothing"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
@played
async def test_many_lives_with_windows_that_end_anyhow(tmp_path: Path, seed: int) -> None:
    for number in range(8):
        await live_with_windows(tmp_path / str(number), 1000 * seed + number, lives=6, steps=150)
