"""Lane sums: known values, the errors that they detect, and the kernel without a GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tiercache.protocol.checksums import (
    CHECKSUM_LANES,
    GOLDEN,
    STRIPE_BYTES,
    block_checksum,
    lane_keys,
    mix,
)

MASK = (1 << 64) - 1


def plain(data: bytes, seed: int) -> int:
    """The definition, in Python's integers."""
    total = 0
    for stripe, start in enumerate(range(0, len(data), STRIPE_BYTES)):
        piece = data[start : start + STRIPE_BYTES]
        piece += bytes(-len(piece) % 4)
        lanes = (int.from_bytes(piece[at : at + 4], "little") for at in range(0, len(piece), 4))
        products = sum(lane * int(key) for lane, key in zip(lanes, lane_keys(), strict=False))
        total += mix((products + (stripe + 1) * GOLDEN) & MASK)
    return mix((total & MASK) ^ seed)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 4096, STRIPE_BYTES - 1, STRIPE_BYTES, STRIPE_BYTES + 1, 50_000])
def test_it_is_what_the_definition_says(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    for seed in (0, 1, MASK):
        assert block_checksum(data, seed, CHECKSUM_LANES) == plain(data, seed)


def test_known_values_never_change() -> None:
    """These values are pinned: such checksums are on disks."""
    assert [hex(int(key)) for key in lane_keys()[:2]] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    assert block_checksum(b"", 0, CHECKSUM_LANES) == mix(0) == 0
    assert hex(block_checksum(b"hello", 7, CHECKSUM_LANES)) == "0xd06f2e5840426839"
    assert hex(block_checksum(bytes(range(256)) * 400, 1, CHECKSUM_LANES)) == "0xe5f31e9f06e430de"


def test_a_daemon_without_direct_stores_imports_no_numpy() -> None:
    code = (
        "import sys; from tiercache.protocol.checksums import block_checksum; block_checksum(b'x', 1, 1);"
        "print('numpy' in sys.modules); block_checksum(b'x', 1, 2); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
