"""Lane sums: known values, the errors that they detect, and the kernel without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.protocol.checksums import (
    CHECKSUM_LANES,
    GOLDEN,
    STRIPE_BYTES,
    block_checksum,
    block_seed,
    lane_keys,
    lane_sum,
    mix,
)

HERE = Path(__file__).parent
KEY = bytes(range(16))
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


def block(pages: int = 16) -> bytearray:
    return bytearray(np.random.default_rng(5).bytes(pages * 4096))


def damages() -> dict[str, bytearray]:
    """Ways in which bytes go wrong on their way to and from a disk."""
    good = block()
    made: dict[str, bytearray] = {}
    for bit in (0, 31, 32, 8 * 4095 + 7, 8 * STRIPE_BYTES, 8 * len(good) - 1):
        made[f"bit {bit} flipped"] = bytearray(good)
        made[f"bit {bit} flipped"][bit // 8] ^= 1 << bit % 8
    made["sign bits of two lanes flipped"] = bytearray(good)
    for at in (3, 4003):
        made["sign bits of two lanes flipped"][at] ^= 0x80
    made["lanes swapped"] = good[4:8] + good[:4] + good[8:]
    made["pages swapped"] = good[4096:8192] + good[:4096] + good[8192:]
    made["stripes swapped"] = good[STRIPE_BYTES : 2 * STRIPE_BYTES] + good[:STRIPE_BYTES] + good[2 * STRIPE_BYTES :]
    made["shifted by a lane"] = good[-4:] + good[:-4]
    made["shifted by a page"] = good[-4096:] + good[:-4096]
    made["all zero"] = bytearray(len(good))
    made["last page zero"] = good[:-4096] + bytes(4096)
    made["a page twice"] = good[:4096] + good[:4096] + good[8192:]
    return made


@pytest.mark.parametrize("name", list(damages()))
def test_damage_is_found(name: str) -> None:
    damaged = damages()[name]
    assert len(damaged) == len(block())
    assert block_checksum(bytes(damaged), 3, CHECKSUM_LANES) != block_checksum(bytes(block()), 3, CHECKSUM_LANES)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_small_change_goes_unseen(data: st.DataObject) -> None:
    """Any few bytes set to anything, in blocks that repeat themselves."""
    size = 3 * STRIPE_BYTES
    good = np.tile(np.frombuffer(data.draw(st.binary(min_size=64, max_size=64)), np.uint8), size // 64)
    bad = good.copy()
    for _ in range(data.draw(st.integers(1, 6))):
        bad[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    same = bool(np.array_equal(good, bad))
    assert (lane_sum(good.data) == lane_sum(bad.data)) == same


def test_a_checksum_says_whose_bytes_they_are() -> None:
    data = bytes(block())
    seeds = [
        block_seed(KEY, "space", len(data), 0, CHECKSUM_LANES),
        block_seed(KEY[::-1], "space", len(data), 0, CHECKSUM_LANES),
        block_seed(KEY, "other", len(data), 0, CHECKSUM_LANES),
        block_seed(KEY, "space", len(data) + 4096, 0, CHECKSUM_LANES),
        block_seed(KEY, "space", len(data), 1, CHECKSUM_LANES),
        block_seed(KEY, "space", len(data), 0, 1),
    ]
    assert len({block_checksum(data, seed, CHECKSUM_LANES) for seed in seeds}) == len(seeds)


def test_a_daemon_without_direct_stores_imports_no_numpy() -> None:
    code = (
        "import sys; from tiercache.protocol.checksums import block_checksum; block_checksum(b'x', 1, 1);"
        "print('numpy' in sys.modules); block_checksum(b'x', 1, 2); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
