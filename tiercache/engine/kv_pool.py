"""The KV pool: the memory that holds K and V, block by block.

A block has all layers, or all layers of one group of them. It is one run of memory, so that it moves in one copy. Its
content depends on the layout's format:

    raw                 [layer, 2, slot, kv_head, head_dim] in the model's dtype
    fp8_*, int8, int4   a record for each layer (see `tiercache.kernels.kv_formats`)

Only full blocks have records. The tokens after the last full block of a sequence are in a *tail*, raw, until
they fill their block; then they are quantised, once. A tail belongs to its block: a holder of the block may
read the tail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiercache.copies.arena import available_bytes
from tiercache.engine.blocks import Window
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes
from tiercache.kernels.kv_formats import BlockFormat

# --- groups of layers --------------------------------------------------------------------------------
#
#     a model of 26 layers, every sixth without a window: 7 groups, blocks of 4 layers
#
#     group   0  without a window     5 11 17 23    keeps all of its blocks
#             1  window of 512        0  1  2  3    gives back what has left the window
#             2                       4  6  7  8
#             6                      24 25  -  -    two places of each block are unused
#
# A block of the KV pool holds `block_size` tokens of the layers of *one* group, and all groups have blocks of equal
# size. So any block may serve any group: one pool, one free list, and sequences that grow can use what the windows give
# back. (Idea: the hybrid KV cache manager of vLLM.) A sequence has a block table for each group. If all layers are of
# one kind there is one group, and a block has all layers. The number of layers in a block decides how much memory is
# lost to places without a layer, and how many tables there are to keep. In a group without a window such places are
# lost for every token, in others for a window's. So of all sizes that lose at most a fifth of the places and make at
# most `MAX_GROUPS` groups, the one that loses least without a window is taken; of equals that with the fewest groups.
# If there is none, or nothing would be saved, blocks have all layers and nothing is given back.

MAX_GROUPS = 8
"""Limit, since each group has tables to be made in every step, and a namespace in the tiers."""
_PLACES_PER_LOST = 5


class LayerGroup(NamedTuple):
    """Layers of a model, in their order in a block, and the window that sequences keep of them."""

    layers: tuple[int, ...]
    window: Window


class LayerPlace(NamedTuple):
    """The place of a layer: the one at index `layer` in the blocks of `group`."""

    group: int
    layer: int


class LayerGroups(NamedTuple):
    """All layers of a model. A block has places for `block_layers` of them."""

    block_layers: int
    groups: tuple[LayerGroup, ...]

    @property
    def windows(self) -> tuple[Window, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """The place of each layer."""
        found = {
            layer: LayerPlace(group_index, index)
            for group_index, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    def most_blocks(self, tokens: int, settings: EngineSettings) -> int:
        """The most blocks, over all groups, that a sequence of that many tokens holds."""
        return sum(window.most_blocks_of(tokens, settings) for window in self.windows)


def group_layers(windows: Sequence[int], longest: int, settings: EngineSettings) -> LayerGroups:
    """The groups of a model with these windows (0: none), whose sequences have `longest` tokens at most.

    A window that no sequence outgrows counts as none. With `attention_window` all layers have a window, in one group.
    """
    size = settings.block_size
    seen = [window or settings.attention_window for window in windows]
    full = tuple(layer for layer, window in enumerate(seen) if not window or window >= longest)
    windowed = tuple(layer for layer in range(len(seen)) if layer not in full)
    everything = tuple(range(len(seen)))
    if not full:
        return LayerGroups(len(seen), (LayerGroup(everything, Window(size, max(seen), settings.sink_tokens)),))
    count = choose_block_layers(len(full), len(windowed)) if not settings.attention_window else None
    if count is None:
        return LayerGroups(len(seen), (LayerGroup(everything, Window(size)),))
    kinds = ((full, Window(size)), (windowed, Window(size, max(seen[layer] for layer in windowed))))
    groups = [
        LayerGroup(layers[first : first + count], window)
        for layers, window in kinds
        for first in range(0, len(layers), count)
    ]
    return LayerGroups(count, tuple(groups))


def choose_block_layers(full: int, windowed: int) -> int | None:
    """Layers in a block of a model with these numbers of layers of either kind, by the rule above; None: all layers."""
    choices = []
    for count in range(1, max(full, windowed) + 1):
        full_groups, windowed_groups = -(-full // count), -(-windowed // count)
        groups = full_groups + windowed_groups
        lost = groups * count - full - windowed
        saves = full_groups * count < full + windowed
        if windowed and saves and groups <= MAX_GROUPS and lost * _PLACES_PER_LOST <= groups * count:
            choices.append((full_groups * count, groups, count))
    return min(choices)[2] if choices else None


# --- pools -------------------------------------------------------------------------------------------

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


# --- how large it is ---------------------------------------------------------------------------------

_MIB = 1 << 20
CPU_POOL_BYTES = 1 << 30


def count_pool_blocks(settings: EngineSettings, block_bytes: int, device: torch.device, tail_bytes: int = 0) -> int:
    """Number of blocks of the KV pool. Call it after the weights are loaded, since they take their memory first.

    `tail_bytes`, for tokens outside of blocks, are taken off the pool's memory; they come on top of `pool_blocks`.
    Raises ConfigError when the pool would hold no block or there is not enough memory.
    """
    wanted = settings.pool_blocks * block_bytes or settings.kv_cache_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        wanted = wanted or int(total * settings.gpu_memory_utilization) - (total - free)
        remedy = "raise gpu_memory_utilization, set kv_cache_memory or serve a smaller model"
    else:
        free = available_bytes()
        wanted = wanted or CPU_POOL_BYTES
        remedy = "raise kv_cache_memory"
    if not settings.pool_blocks:
        wanted -= tail_bytes
    if wanted < block_bytes:
        raise ConfigError(
            f"the KV pool would have {format_bytes(max(wanted, 0))}, and one block takes {format_bytes(block_bytes)}: "
            f"{remedy}"
        )
    if wanted > free:
        raise ConfigError(
            f"the KV pool takes {format_bytes(wanted)} of memory and {format_bytes(free)} are free: "
            "lower kv_cache_memory"
        )
    return wanted // block_bytes


def fit_model_len(
    settings: EngineSettings, allowed: int, block_bytes: int, num_blocks: int, most_blocks: Callable[[int], int]
) -> int:
    """The longest sequence that the engine serves: what the model allows, or less if the pool holds less.

    `most_blocks` gives the most blocks that a sequence of that many tokens holds. Raises ConfigError when the pool
    does not hold the settings' `max_model_len`, or no sequence at all.
    """
    if most_blocks(allowed) <= num_blocks:
        return allowed
    size = settings.block_size
    lengths = range(size, allowed + size, size)
    capacity = bisect_right(lengths, num_blocks, key=most_blocks) * size
    if 0 < capacity >= settings.max_model_len:
        return capacity
    needed = most_blocks(max(settings.max_model_len, 1))
    wanted = str(needed) if settings.pool_blocks else f"{-(-needed * block_bytes // _MIB)}MiB"
    raising = f"raise {pool_setting(settings)} to {wanted}"
    if not capacity:
        raise ConfigError(
            f"the KV pool has {num_blocks} blocks, and a sequence of one token takes {most_blocks(1)}, one for each "
            f"group of layers: {raising}"
        )
    raise ConfigError(
        f"max_model_len is {settings.max_model_len} and the KV pool holds {capacity} tokens: set max_model_len to "
        f"{capacity} at most, or {raising}"
    )


def pool_setting(settings: EngineSettings) -> str:
    """The setting that determines the size of the pool."""
    return "pool_blocks" if settings.pool_blocks else "kv_cache_memory"
