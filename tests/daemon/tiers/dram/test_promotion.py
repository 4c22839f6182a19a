"""Promotions of windows, of which any block may be missing."""

from __future__ import annotations

import pytest

from tiercache.daemon.tiers.dram import promotion


@pytest.mark.parametrize(
    ("arrived", "together"), [([], []), ([2, 3, 4], [2, 3, 4]), ([2, 4, 5], [2]), ([2, 3, 5, 6], [2, 3]), ([7], [7])]
)
def test_blocks_are_stored_together_up_to_a_gap(arrived: list[int], together: list[int]) -> None:
    """Of a block behind it another one comes before: that is told of each store."""
    assert list(promotion._leading_run(arrived)) == together
