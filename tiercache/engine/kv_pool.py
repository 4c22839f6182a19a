"""The KV pool: the memory that holds K and V, block by block.

A block has all layers, or all layers of one group (see `tiercache.engine.layer_groups`). It is one run of memory, so
that it moves in one copy. Its content depends on the layout's format:

    raw                 [layer, 2, slot, kv_head, head_dim] in the model's dtype
    fp8_*, int8, int4   a record for each layer (see `tiercache.kernels.kv_formats`)

Only full blocks have records. The tokens after the last full block of a sequence are in a *tail*, raw, until
they fill their block; then they are quantised, once. A tail belongs to its block: a holder of the block may
read the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiercache.engine.layer_groups import LayerPlace
from tiercache.kernels.kv_formats import BlockFormat

RAW = "raw"
ALIASES = {"auto": RAW, "fp8": "fp8_e4m3"}
"""Names of formats in the settings that differ from those of `tiercache.kernels.kv_formats`."""


class BatchSegment(NamedTuple):
    """The tokens `[start, end)` of a sequence, at rows `[row, row + end - start)` of the batch."""

    row: int
    start: int
    end: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Determines the size of a block and the meaning of its bytes. `layers` are those in a block, `dtype` the model's.

    Raises ValueError if the format cannot hold such a shape.
    """

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    format: str = RAW

    def __post_init__(self) -> None:
        _ = self.block_format

    @property
    def block_format(self) -> BlockFormat | None:
        """The quantised format of a full block; None if raw."""
        if self.format == RAW:
            return None
        return BlockFormat(self.format, self.block_size, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's raw K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def raw_bytes(self) -> int:
        """Bytes of a raw block."""
        return self.layers * self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this format."""
        block_format = self.block_format
        return self.raw_bytes if block_format is None else self.layers * block_format.record_bytes

    def tail_bytes(self, max_tails: int) -> int:
        """Bytes of the tails of a pool."""
        return 0 if self.format == RAW else (max_tails + 1) * self.raw_bytes

    def empty(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory: uint8 `[block, layer, record_bytes]`, or if raw as `empty_raw`."""
        block_format = self.block_format
        if block_format is None:
            return self.empty_raw(num_blocks, device)
        shape = (num_blocks, self.layers, block_format.record_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=device).fill_(0)

    def empty_raw(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory `[block, layer, 2, slot, kv_head, head_dim]` in the model's dtype."""
        shape = (num_blocks, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        # Written, not only reserved, else the first prefill or load pays for the page faults.
        return torch.empty(shape, dtype=self.dtype, device=device).fill_(0)


class KVPool:
    """Memory for `num_blocks` blocks, and for `max_tails` tails if the format needs them: one for each block table.

    `places` is the place of each layer of the model; by default every block has all layers. Create it outside of
    inference mode: tensors created inside cannot be written from outside.

    Attributes:
        blocks: see `KVLayout.empty`.
        tails: raw `[tail, layer, 2, slot, kv_head, head_dim]`; none in a raw pool. Tail 0 has no owner and is zero.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, max_tails: int, device: torch.device, places: Sequence[LayerPlace] = ()
    ) -> None:
        assert not torch.is_inference_mode_enabled()
        self.layout = layout
        self.places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(layout.layers))
        self.device = device
        self.blocks = layout.empty(num_blocks, device)
        count = 0 if layout.format == RAW else max_tails + 1
        self.tails = layout.empty_raw(count, device)
        self._free_tails = list(range(count - 1, 0, -1))
        self._tails: dict[int, int] = {}
        self._retired_blocks: set[int] = set()
        self._ended_tails: list[int] = []

    def tails_of(self, segments: Sequence[BatchSegment]) -> list[int]:
        """For one pass, the tail of each segment, 0 if it needs none. Call it once a pass, for all groups.

        A tail holds the tokens before the segment of a block already begun, and takes those of the segment in a
        block that it does not fill.
        """
        if self.layout.format == RAW:
            return [0] * len(segments)
        for block_id in self._retired_blocks:
            self._end_tail(block_id)
        self._retired_blocks.clear()
        self._free_tails += self._ended_tails
        self._ended_tails.clear()
        return [self._tail_of(segment) for segment in segments]

    def _tail_of(self, segment: BatchSegment) -> int:
        size, table = self.layout.block_size, segment.block_table
        if segment.start % size:
            tail = self._tails.pop(table[segment.start // size])
        elif segment.end % size:
            tail = self._new_tail()
        else:
            return 0
        if segment.end % size:
            self._tails[table[segment.end // size]] = tail
        else:
            self._ended_tails.append(tail)  # this pass still reads it
        return tail

    def _new_tail(self) -> int:
        assert self._free_tails, "more sequences have begun a block than may run"
        tail = self._free_tails.pop()
        # Places after a sequence's last token are read and weighted with 0, which gives 0 only for a finite number.
        self.tails[tail].zero_()
        return tail

    def _end_tail(self, block_id: int) -> None:
        if block_id in self._tails:
            self._free_tails.append(self._tails.pop(block_id))

    def retire(self, block_id: int) -> None:
        """Free the tail of a block without holders and without a key, from the next pass on."""
        if self.layout.format != RAW:
            self._retired_blocks.add(block_id)

    def copy(self, source: int, target: int) -> None:
        """Copy a block, and its tail if it has one. On CUDA it is ordered before later work."""
        self._end_tail(target)
        self._retired_blocks.discard(target)
        tail = self._tails.get(source)
        if tail is None:
            self.blocks[target].copy_(self.blocks[source])
            return
        self._tails[target] = self._new_tail()
        self.tails[self._tails[target]].copy_(self.tails[tail])

    def check_integrity(self, owners: set[int]) -> None:
        """Recount the tails; `owners` are the blocks in use. Raises AssertionError."""
        places = [*self._free_tails, *self._ended_tails, *self._tails.values()]
        assert sorted(places) == list(range(1, len(self.tails))), "a tail is lost or in two places"
        for block_id in self._tails.keys() - self._retired_blocks:
            assert block_id in owners, f"block {block_id} has a tail and no owner"
