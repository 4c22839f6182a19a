"""How attention is divided: rows and tokens of a tile, tiles of a batch, splits of a context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from .kv_tiles import INT4, RAW, TileFormat

MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
"""The context is not split beyond this many programs for each multiprocessor."""


class TileShape(NamedTuple):
    """How a launch is divided: rows of a tile, tokens at a time, warps and pipeline stages of a program."""

    rows: int
    tile: int
    warps: int
    stages: int


def decode_shape(group: int, of: TileFormat, dtype: torch.dtype) -> TileShape:
    """For one query token per sequence: as few rows as the matrix units take, and many loads in flight."""
    rows = max(16, triton.next_power_of_2(group))
    wide = dtype.itemsize > 2
    return TileShape(rows, _tile_tokens(of, dtype), 8 if wide or rows > 32 else 4, 2 if wide else 3)


def prefill_shape(group: int, of: TileFormat, dtype: torch.dtype) -> TileShape:
    """For many query tokens per sequence: as many rows as the registers hold."""
    if dtype.itemsize > 2 or of.dims > 128:
        rows = 32
    else:
        rows = 128 if of.kind == RAW.value else 64
    return TileShape(max(rows, triton.next_power_of_2(group)), _tile_tokens(of, dtype), 8, 2)


def _tile_tokens(of: TileFormat, dtype: torch.dtype) -> int:
    """A shape that compiles without spilling registers, as `tests/kernels/test_paged_attention.py` checks."""
    elements = 8192 // (2 if dtype.itemsize > 2 or of.kind == INT4.value else 1)
    if of.kind == INT4.value and of.dims != of.head_dim:
        elements //= 2  # columns in another order take more registers
    return max(16, min(64, elements // of.dims))


def tiles_of(segments: Sequence[tuple[int, int]], queries: int) -> list[tuple[int, int]]:
    """Tiles `(segment, first query)` for segments `(number, new tokens)`, `queries` tokens a tile.

    The last tokens of a segment attend to the most tokens, so they come first.
    """
    return [
        (number, first) for number, count in segments for first in range((count - 1) // queries * queries, -1, -queries)
    ]


def choose_splits(tiles: int, kv_heads: int, tokens: int, tile: int, processors: int) -> int:
    """Programs that share the context of a tile: as many as fill the GPU, at least `tile` tokens for each."""
    wanted = processors * PROGRAMS_PER_PROCESSOR // (tiles * kv_heads)
    return max(1, min(wanted, -(-tokens // tile), MAX_SPLITS))
