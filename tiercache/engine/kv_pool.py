"""The KV pool: the memory that holds K and V, block by block.

A block has all layers, or all those of one group (see `tiercache.engine.layer_groups`). It is one run of memory, so
that moving it is one copy. What is in it depends on the layout's format:

    raw                 [layer, 2, slot, kv_head, head_dim] in the model's dtype
    fp8_*, int8, int4   a record for each layer (see `tiercache.kernels.kv_formats`)

Records are of full blocks only. The tokens behind the last full block of a sequence stand in a *tail*, raw,
until they fill their block; then they are quantised, once. A tail belongs to its block: who has that one may
read the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiercache.engine.layer_groups import Place
from tiercache.kernels.kv_formats import BlockFormat

RAW = "raw"
ALIASES = {"auto": RAW, "fp8": "fp8_e4m3"}
"""Names of formats in the settings that are not those of `tiercache.kernels.kv_formats`."""


class Segment(NamedTuple):
    """The tokens `[start, end)` of a sequence, which stand at `[row, row + end - start)` of the batch."""

    row: int
    start: int
    end: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What decides how many bytes a block has and what they mean. `layers` are those in a block, `dtype` the model's.

    Raises ValueError where the format cannot hold such a shape.
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
        """How a full block is written; None where it is raw."""
        if self.format == RAW:
            return None
        return BlockFormat(self.format, self.block_size, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Raw K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def raw_bytes(self) -> int:
        """A raw block."""
        return self.layers * self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """A block in this format."""
        block_format = self.block_format
        return self.raw_bytes if block_format is None else self.layers * block_format.record_bytes

    def tail_bytes(self, max_tails: int) -> int:
        """What the tails of a pool take."""
        return 0 if self.format == RAW else (max_tails + 1) * self.raw_bytes

    def empty(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory: uint8 `[block, layer, record_bytes]`, or where raw as `empty_raw`."""
        block_format = self.block_format
        if block_format is None:
            return self.empty_raw(num_blocks, device)
        shape = (num_blocks, self.layers, block_format.record_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=device).fill_(0)

    def empty_raw(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory `[block, layer, 2, slot, kv_head, head_dim]` in the model's dtype."""
        shape = (num_blocks, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        # Written, not only reserved: else the first prefill or load pays for the page faults.
        return torch.empty(shape, dtype=self.dtype, device=device).fill_(0)


class KVPool:
    """Memory for `num_blocks` blocks, and for `max_tails` tails where these are not in it: one for each block table.

    `places` says where each layer of the model is, by default that all of them are in every block. To be made outside
    of inference mode: tensors that are made inside cannot be written from outside.

    Attributes:
        blocks: see `KVLayout.empty`.
        tails: raw `[tail, layer, 2, slot, kv_head, head_dim]`; none with a raw pool. Tail 0 has no owner, and is zero.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, max_tails: int, device: torch.device, places: Sequence[Place] = ()
    ) -> None:
        assert not torch.is_inference_mode_enabled()
        self.layout = layout
        self.places = tuple(places) or tuple(Place(0, layer) for layer in range(layout.layers))
        self.device = device
        self.blocks = layout.empty(num_blocks, device)
        count = 0 if layout.format == RAW else max_tails + 1
        self.tails = layout.empty_raw(count, device)
        self._free_tails = list(range(count - 1, 0, -1))
        self._tails: dict[int, int] = {}
        self._retired_blocks: set[int] = set()
        self._ended_tails: list[int] = []

    def tails_of(self, segments: Sequence[Segment]) -> list[int]:
        """For one pass, the tail of each segment, 0 where it needs none; to be asked once a pass, for all groups.

        It holds what is before the segment of a block that was begun, and is to take in what the segment
        leaves in a block that is not full.
        """
        if self.layout.format == RAW:
            return [0] * len(segments)
        for block_id in self._retired_blocks:
            self._end_tail(block_id)
        self._retired_blocks.clear()
        self._free_tails += self._ended_tails
        self._ended_tails.clear()
        return [self._tail_of(segment) for segment in segments]

    def _tail_of(self, segment: Segment) -> int:
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
        # Places behind a sequence's last token are read, and weighted with 0: that is 0 only of a number.
        self.tails[tail].zero_()
        return tail

    def _end_tail(self, block_id: int) -> None:
        if block_id in self._tails:
            self._free_tails.append(self._tails.pop(block_id))

    def retire(self, block_id: int) -> None:
        """Nobody holds this block any more and it has no key: its tail is free from the next pass on."""
        if self.layout.format != RAW:
            self._retired_blocks.add(block_id)

    def copy(self, source: int, target: int) -> None:
        """Copy a block, and its tail if it has one. On CUDA it is ordered before what follows."""
        self._end_tail(target)
        self._retired_blocks.discard(target)
        tail = self._tails.get(source)
        if tail is None:
            self.blocks[target].copy_(self.blocks[source])
            return
        self._tails[target] = self._new_tail()
        self.tails[self._tails[target]].copy_(self.tails[tail])

    def check_integrity(self, owners: set[int]) -> None:
        """Recount the tails; `owners` are the blocks that are in use. Raises AssertionError."""
        places = [*self._free_tails, *self._ended_tails, *self._tails.values()]
        assert sorted(places) == list(range(1, len(self.tails))), "a tail is lost or in two places"
        for block_id in self._tails.keys() - self._retired_blocks:
            assert block_id in owners, f"block {block_id} has a tail and no owner"
