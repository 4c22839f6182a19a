"""What the kernel must compute, compiled or interpreted: bit for bit what numpy computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiercache.kernels.checksum import lane_sums, lane_sums_reference
from tiercache.protocol.checksums import STRIPE_BYTES, lane_sum

LENGTHS = [16, 48, 4096, STRIPE_BYTES - 16, STRIPE_BYTES, STRIPE_BYTES + 16, 3 * STRIPE_BYTES, 5 * STRIPE_BYTES + 4096]


def noise(blocks: int, length: int) -> np.ndarray[Any, Any]:
    """Blocks of random bytes; the second of all ones, the third of zeros."""
    made = np.random.default_rng(length).integers(0, 256, (blocks, length), np.uint8)
    made[1:2], made[2:3] = 255, 0
    return made


def unsigned(sums: torch.Tensor) -> list[int]:
    return [int(value) for value in sums.cpu().numpy().view(np.uint64)]


@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_twin_and_numpy_agree(length: int, device: str) -> None:
    """Kernel, torch twin and numpy agree on blocks that lie anywhere, with gaps, in any order."""
    data = noise(5, length)
    pool = torch.zeros((9, length + 64), dtype=torch.uint8, device=device)
    places = [7, 0, 4, 8, 2]
    for place, row in zip(places, data, strict=True):
        pool[place, :length] = torch.from_numpy(row)
    addresses = torch.tensor([pool[place].data_ptr() for place in places], dtype=torch.int64, device=device)
    expected = [lane_sum(row.data) for row in data]
    assert unsigned(lane_sums(addresses, length)) == expected
    rows = torch.stack([pool[place, :length] for place in places])
    assert unsigned(lane_sums_reference(rows)) == expected
    assert unsigned(lane_sums(addresses[:0], length)) == []
