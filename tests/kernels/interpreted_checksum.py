"""The kernel in Triton's interpreter.

Not collected by itself: TRITON_INTERPRET=1 must be set before the kernel is decorated, so
`test_checksum.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from checksum_cases import LENGTHS, check_kernel

from tiercache.kernels.checksum import lane_sums

pytestmark = pytest.mark.kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_checksum.py, with TRITON_INTERPRET=1"


@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_twin_and_numpy_agree(length: int) -> None:
    check_kernel(length, "cpu")


def test_no_blocks_are_no_sums() -> None:
    assert lane_sums(torch.zeros(0, dtype=torch.int64), 4096).tolist() == []
