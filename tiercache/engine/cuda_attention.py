"""Attention by the Triton kernels: the tables of a forward pass, and the launches of each layer.

All tables of a pass are made on the host as one array of words and go to the device in one copy, before the
first layer (one for each group of layers). The layers then only launch kernels: nothing waits for the device until
tokens are sampled.

    positions [token] | slots [token] | segments [segment, 5] | items [block, 2] | block tables, one after the other

A slot is where a token is written: in the pool or, if the pool is quantised, in the sequence's tail. Items are the
blocks that the pass fills, which a quantised pool then takes. See `tiercache.kernels.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiercache.engine.kv_pool import BatchSegment, KVPool
from tiercache.kernels.kv_tiles import PagedKv
from tiercache.kernels.kv_write import write_blocks, write_tokens
from tiercache.kernels.paged_attention import SEGMENT_FIELDS, paged_attention
from tiercache.kernels.tile_shapes import TileShape, choose_splits, decode_shape, prefill_shape, tiles_of

Words = npt.NDArray[np.int32]
_ALIGN_WORDS = 4
"""Every table begins at a multiple of 16 bytes, so that kernels are compiled once, for that."""
_PROCESSORS_WITHOUT_A_GPU = 8
"""Value in Triton's interpreter: large enough that contexts are split there too."""


class KernelPass:
    """One forward pass over `segments`, which are in the order of their tokens in the batch, without gaps.

    The pool is on CUDA (or anywhere in Triton's interpreter). Nothing is uploaded before it is used. With
    `every_kernel`, layers also launch the kernels that other passes need, so that these are compiled. `tails` are
    the segments' tails, if they were taken together with those of other passes.
    """

    def __init__(
        self,
        pool: KVPool,
        segments: Sequence[BatchSegment],
        *,
        every_kernel: bool = False,
        tails: Sequence[int] | None = None,
    ) -> None:
        self.pool = pool
        self.every_kernel = every_kernel
        self.segments = segments
        self.tails = pool.tails_of(segments) if tails is None else tails

    @cached_property
    def tables(self) -> KernelTables:
        return KernelTables(self.pool, self.segments, self.tails)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 `[token]`."""
        return self.tables.positions

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """See `KernelTables.attend`."""
        if self.every_kernel:
            self.tables.attend_in_every_way(layer, query, key, value, **options)
        return self.tables.attend(layer, query, key, value, **options)


class _Launch(NamedTuple):
    """Tiles of one kind, decode or prefill: int32 `[tile, 2]` on the device."""

    tiles: torch.Tensor
    shape: TileShape
    splits: int


class KernelTables:
    """The tables of a pass, on the device.

    Args:
        rows, longest: make room for `rows` sequences of one new token and `longest` tokens each, which
          `refill` fills in again: kernels, sizes and addresses are then the same for every pass.
    """

    def __init__(
        self, pool: KVPool, segments: Sequence[BatchSegment], tails: Sequence[int], *, rows: int = 0, longest: int = 0
    ) -> None:
        self.pool = pool
        form = pool.layout.block_format
        self._kv = PagedKv.raw(pool.blocks) if form is None else PagedKv.quantised(pool.blocks, form, pool.tails)
        self._rows = rows
        self._lengths = [1] * rows or [one.end - one.start for one in segments]
        self._longest = longest or max(one.end for one in segments)
        parts = self._parts(segments, tails)
        room = rows * -(-longest // pool.layout.block_size)
        sizes = [len(part) for part in parts[:-1]] + [max(len(parts[-1]), room)]
        ends = np.cumsum([-(-size // _ALIGN_WORDS) * _ALIGN_WORDS for size in sizes]).tolist()
        self._starts = [0, *ends[:-1]]
        self._words = torch.zeros(ends[-1], dtype=torch.int32, device=pool.device)
        self._positions, self._slots, segment_words, item_words, self._tables = (
            self._words[start : start + size] for start, size in zip(self._starts, sizes, strict=True)
        )
        self._segments, self._items = segment_words.view(-1, SEGMENT_FIELDS), item_words.view(-1, 2)
        self._fill(parts)
        self._launches: dict[int, list[_Launch]] = {}

    @property
    def positions(self) -> torch.Tensor:
        return self._positions.long()

    def refill(self, segments: Sequence[BatchSegment], tails: Sequence[int]) -> None:
        """Replace the sequences by others of one new token each, at most `rows`. Does not wait for the device."""
        self._fill(self._parts(segments, tails))

    def _parts(self, segments: Sequence[BatchSegment], tails: Sequence[int]) -> list[Words]:
        """The tables on the host, in their order."""
        size = self.pool.layout.block_size
        starts, ends = np.array([one.start for one in segments]), np.array([one.end for one in segments])
        lengths = ends - starts
        rows = np.cumsum(lengths) - lengths
        blocks = [np.array(one.block_table[: -(-one.end // size)], dtype=np.int32) for one in segments]
        places = np.cumsum([0, *map(len, blocks[:-1])])
        table = np.stack([rows, starts, ends, places, np.array(tails)], axis=1)
        flat = np.concatenate(blocks)
        positions = np.arange(lengths.sum()) + np.repeat(starts - rows, lengths)
        items = np.zeros((0, 2), dtype=np.int64)
        if self._kv.pool is self._kv.tails:
            slots = flat[np.repeat(places, lengths) + positions // size] * size + positions % size
        else:
            slots = np.repeat(table[:, 4], lengths) * size + positions % size
            slots[positions < np.repeat(ends // size * size, lengths)] = -1
            # Reused tables have an item for every row: the kernel checks whether the block is full.
            count = np.ones_like(starts) if self._rows else ends // size - starts // size
            numbers = np.arange(count.sum()) + np.repeat(starts // size - np.cumsum(count) + count, count)
            items = np.stack([np.repeat(np.arange(len(segments)), count), numbers], axis=1)
        if self._rows > len(segments):
            positions, slots, table, items = self._padded(positions, slots, table, items)
        return [part.reshape(-1).astype(np.int32) for part in (positions, slots, table, items, flat)]

    def _padded(self, positions: Any, slots: Any, table: Any, items: Any) -> tuple[Any, Any, Any, Any]:
        """The tables of one-token segments, filled up to `rows` with segments of no tokens."""
        missing = self._rows - len(table)
        empty = np.zeros((missing, SEGMENT_FIELDS), dtype=np.int64)
        empty[:, 0] = np.arange(len(table), self._rows)
        if len(items):
            items = np.concatenate([items, empty[:, :2]])
        slots = np.pad(slots, (0, missing), constant_values=-1)
        return np.pad(positions, (0, missing)), slots, np.concatenate([table, empty]), items

    def _fill(self, parts: Sequence[Words]) -> None:
        words = np.zeros(self._starts[-1] + len(parts[-1]), dtype=np.int32)
        for start, part in zip(self._starts, parts, strict=True):
            words[start : start + len(part)] = part
        self._words[: len(words)].copy_(_pinned(words, self.pool.device), non_blocking=True)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of the pass's tokens into the pool, and attend.

        Query is `[head, token, head_dim]`, key and value `[kv_head, token, head_dim]`; returns `[token, head,
        head_dim]`. Only launches kernels.
        """
        if len(self._items):
            # Before the tails are written: a block is made from what its tail held.
            write_blocks(self._kv, layer, self._segments, self._tables, self._items, key, value)
        write_tokens(self._kv.tails, layer, self._slots, key, value)
        heads, count, head_dim = query.shape
        out = query.new_empty((count, heads, head_dim))
        group = heads // self._kv.format.kv_heads
        for tiles, shape, splits in self._launches_for(group, query.dtype):
            paged_attention(
                query,
                self._kv,
                self._segments,
                self._tables,
                tiles,
                out,
                layer=layer,
                shape=shape,
                splits=splits,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        return out

    def attend_in_every_way(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> None:
        """Run decode and prefill, split and not, on the first tile, to compile the kernels."""
        own, group = self._launches, query.shape[0] // self._kv.format.kv_heads
        tiles = self._launches_for(group, query.dtype)[0].tiles[:1]
        shapes = (choose(group, self._kv.format, query.dtype) for choose in (decode_shape, prefill_shape))
        self._launches = {group: [_Launch(tiles, shape, splits) for shape in shapes for splits in (1, 2)]}
        self.attend(layer, query, key, value, **options)
        self._launches = own

    def _launches_for(self, group: int, dtype: torch.dtype) -> list[_Launch]:
        found = self._launches.get(group)
        if found is None:
            of = self._kv.format
            lengths = list(enumerate(self._lengths))
            decodes, prefills = ([one for one in lengths if (one[1] == 1) is decode] for decode in (True, False))
            found = self._launches[group] = []
            for members, choose in ((decodes, decode_shape), (prefills, prefill_shape)):
                if members:
                    shape = choose(group, of, dtype)
                    found.append(self._launch(tiles_of(members, shape.rows // group), shape))
        return found

    def _launch(self, tiles: list[tuple[int, int]], shape: TileShape) -> _Launch:
        device = self.pool.device
        words = _pinned(np.array(tiles, dtype=np.int32), device).to(device, non_blocking=True)
        splits = choose_splits(len(tiles), self._kv.format.kv_heads, self._longest, shape.tile, _processors(device))
        return _Launch(words, shape, splits)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _pinned(words: Words, device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied asynchronously; torch keeps its memory until the copy is over."""
    host = torch.from_numpy(words)
    return host.pin_memory() if device.type == "cuda" else host
