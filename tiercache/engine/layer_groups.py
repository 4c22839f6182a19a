"""Layer groups: which layers share a block. All, or those of one kind if a model mixes windowed and full attention.

    a model of 26 layers, every sixth without a window: 7 groups, blocks of 4 layers

    group   0  without a window     5 11 17 23    keeps all of its blocks
            1  window of 512        0  1  2  3    gives back what has left the window
            2                       4  6  7  8
            6                      24 25  -  -    two places of each block are unused

A block of the KV pool holds `block_size` tokens of the layers of *one* group, and all groups have blocks of equal size.
So any block may serve any group: one pool, one free list, and sequences that grow can use what the windows give
back. (Idea: the hybrid KV cache manager of vLLM.) A sequence has a block table for each group. If all layers are of one
kind there is one group, and a block has all layers.
The number of layers in a block decides how much memory is lost to places without a layer, and how many tables there are
to keep. In a group without a window such places are lost for every token, in others for a window's. So of all sizes
that lose at most a fifth of the places and make at most `MAX_GROUPS` groups, the one that loses least without a window
is taken; of equals that with the fewest groups. If there is none, or nothing would be saved, blocks have all layers and
nothing is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercache.engine.settings import EngineSettings
from tiercache.engine.window import Window

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
