"""Approximate frequency of recent look-ups: a count-min sketch that forgets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from policies.requests import Requests
from tiercache.daemon.index.policy import Touch
from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES

ROWS = 4
MOST = 15
"""Cap of a count, so that a block used much once is soon forgotten: four bits in the paper."""
FIRST_WIDTH = 1 << 14
MOST_WIDTH = 1 << 22
PERIOD = 10
"""All counts are halved after so many look-ups of blocks per block of capacity."""

_ALL = (1 << 64) - 1
_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93


class Sketch(Requests):
    """Counts every block of every prompt that is looked up, whether it is here or not (TinyLFU, Einziger et al., 2017).

    One for all tiers of a daemon. A request costs some microseconds, plus a tenth of one per block. Rows are at least
    twice as wide as the largest tier has blocks, a byte per count: at least 8 bytes a block.
    """

    def __init__(self, turnover: Turnover) -> None:
        super().__init__(turnover)
        self._rows = [bytearray(FIRST_WIDTH) for _ in range(ROWS)]
        self._mask = FIRST_WIDTH - 1
        self._added = 0
        self._capacity = 0

    def asked(self, keys: bytes, found_dram: int, found: int) -> Touch:
        how = super().asked(keys, found_dram, found)
        if how.counts:
            self._count(keys)
        return how

    def _count(self, keys: bytes) -> None:
        """Count each key once more. Counts of keys that share a place may rise by one together."""
        words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
        first, second, third = (np.uint64(factor) for factor in _FACTORS)
        mixed: npt.NDArray[np.uint64] = words[:, 0] * first ^ words[:, 1] * second
        mixed = (mixed ^ mixed >> np.uint64(32)) * third
        low, step = mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32) | np.uint64(1)
        mask = np.uint64(self._mask)
        for number, row in enumerate(self._rows):
            counts = np.frombuffer(row, np.uint8)
            places = low + np.uint64(number) * step & mask
            counts[places] = np.minimum(counts[places] + np.uint8(1), np.uint8(MOST))
        self._added += len(words)
        if self._capacity and self._added >= PERIOD * self._capacity:
            self._age()

    def _age(self) -> None:
        self._added //= 2
        for row in self._rows:
            counts = np.frombuffer(row, np.uint8)
            np.right_shift(counts, 1, out=counts)

    def frequency(self, key: bytes) -> int:
        """How often the block was looked up lately: never too low, except for halving, and seldom too high."""
        one, other = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        mixed = one * _FACTORS[0] & _ALL ^ other * _FACTORS[1] & _ALL
        mixed = (mixed ^ mixed >> 32) * _FACTORS[2] & _ALL
        low, step, mask = mixed & 0xFFFFFFFF, mixed >> 32 | 1, self._mask
        return min(row[low + number * step & mask] for number, row in enumerate(self._rows))

    def fit(self, blocks: int) -> None:
        """Make the rows wide enough for a tier with room for so many blocks."""
        self._capacity = max(self._capacity, blocks)
        if len(self._rows[0]) < min(2 * self._capacity, MOST_WIDTH):
            # A place and its new half have the same count, too high in both, until it is forgotten.
            self._rows = [row + row for row in self._rows]
            self._mask = len(self._rows[0]) - 1
