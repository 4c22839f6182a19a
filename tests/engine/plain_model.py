"""A model that can be checked in the head: K is the token itself, the next token a hash of all K before it.

Whatever block is stale, torn, swapped or shared wrongly gives other tokens than `continuation`, or, when they are
sampled, tokens that are not among the two `choices`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tiercache.engine import Engine, EngineSettings
from tiercache.engine.kv_pool import KVPool
from tiercache.engine.layer_groups import LayerGroups
from tiercache.engine.model import ModelShape
from tiercache.protocol.keys import content_id
from tiercache.protocol.namespaces import NamespaceSpec

VOCABULARY = 50


def choices(context: Sequence[int]) -> tuple[int, int]:
    """The likeliest token after `context`, and another one."""
    likeliest = zlib.crc32(bytes(context)) % (VOCABULARY - 1)
    return 1 + likeliest, 1 + (likeliest + 7) % (VOCABULARY - 1)


def seen(tokens: Sequence[int] | range, window: int = 0, sinks: int = 0) -> list[int]:
    """The tokens that the last of `tokens` attends to: all of them, or a window and sinks."""
    first = max(0, len(tokens) - window) if window else 0
    return [*tokens[: min(sinks, first)], *tokens[first:]]


def context_of(tokens: Sequence[int] | range, sees: Sequence[tuple[int, int]]) -> list[int]:
    """What the last of `tokens` sees in layers with these windows and sinks, one kind after the other."""
    return [token for window, sinks in sees for token in seen(tokens, window, sinks)]


def continuation(prompt: Sequence[int], count: int, window: int = 0, sinks: int = 0) -> list[int]:
    """The continuation of `prompt` by a model that forgets only tokens outside its window."""
    return mixed_continuation(prompt, count, [(window, sinks)])


def mixed_continuation(prompt: Sequence[int], count: int, sees: Sequence[tuple[int, int]]) -> list[int]:
    """The same of a model whose groups of layers have different windows."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choices(context_of(tokens, sees))[0])
    return tokens[len(prompt) :]


class PlainModel:
    """Stands in for `HostedModel`. Every group of layers has the tokens, in its first layer."""

    def __init__(self, _: Any, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.passes: list[list[tuple[int, int]]] = []
        self.sees: list[tuple[int, int]] = []

    def new_pool(self, num_blocks: int, block_size: int, *rest: Any) -> KVPool:
        groups: LayerGroups = rest[-1]
        layout = self._shape.kv_layout(block_size, layers=groups.block_layers)
        return KVPool(layout, num_blocks, 0, self._device, groups.places)

    def prepare(self, *_: Any) -> None:
        """Nothing to be made ready."""

    def forward(self, batch: Any, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        self.passes.append([(segment.start, segment.end) for segment in batch.segments])
        slots = batch.pool.blocks[:, 0, 0, :, 0, 0]
        size = slots.shape[1]
        logits = torch.full((len(rows), VOCABULARY), -1e9)
        for number, segment in enumerate(batch.segments):
            last = segment.row + segment.end - segment.start - 1
            context: list[int] = []
            for group, sees in zip([batch.segments, *batch.others], self.sees, strict=True):
                table = group[number].block_table
                assert group[number][:3] == segment[:3]
                for position in range(segment.start, segment.end):
                    slots[table[position // size], position % size] = tokens[segment.row + position - segment.start]
                places = seen(range(segment.start + 1), *sees) + seen(range(segment.end), *sees)
                assert all(table[place // size] >= 0 for place in places), "a block that is needed has gone"
                places = seen(range(segment.end), *sees) if last in rows else []
                context += [int(slots[table[place // size], place % size]) for place in places]
            if last in rows:
                logits[list(rows).index(last), list(choices(context))] = torch.tensor([1.1, 1.0])
        return logits


@contextmanager
def plain_engine(
    connect: Any = None,
    max_context: int = 512,
    always_load: bool = True,
    window: int = 0,
    sinks: int = 0,
    windows: Sequence[int] = (),
    **settings: Any,
) -> Iterator[Engine]:
    """An engine that serves a `PlainModel`, on blocks of 2 tokens and chunks of 4 unless told otherwise.

    Unless it is 0, `window` is the model's sliding window, or with `sinks` its `attention_window`; `windows` are those
    of its layers, where they are not one. Computing takes it microseconds; unless it is to `always_load`, it soon finds
    loads to be too slow.
    """
    small = {"block_size": 2, "chunk_size": 4, "pool_blocks": 16, "max_num_seqs": 4, "device": "cpu"}
    if sinks:
        small |= {"attention_window": window, "attention_sinks": sinks}
    chosen = EngineSettings(**{**small, **settings})
    size = chosen.block_size
    layers = tuple(windows) or (0 if sinks else window,)
    shape = ModelShape(len(layers), 1, 1, torch.float32, VOCABULARY, max_context, layers, frozenset())
    namespaces = [
        NamespaceSpec(
            engine="plain/1",
            layout="bytes",
            dtype="float32",
            block_size=size,
            group=f"{group.layers}",
            block_bytes=shape.kv_layout(size, layers=len(group.layers)).block_bytes,
            window_blocks=group.window.blocks,
        )
        for group in shape.groups(chosen).groups
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.engine.engine.read_shape", lambda *_: shape)
        patch.setattr("tiercache.engine.engine.identify_model", lambda *_: (namespaces, content_id("plain")))
        patch.setattr("tiercache.engine.engine.file_states", lambda *_: [])
        patch.setattr("tiercache.engine.engine.HostedModel", PlainModel)
        patch.setattr("tiercache.engine.engine.check_model", lambda *_: None)
        patch.setattr("tiercache.engine.engine.find_streaming", lambda *_: None)
        patch.setattr("tiercache.engine.engine._IDLE_WAIT_S", 0.0)
        if always_load:
            patch.setattr("tiercache.engine.cost.CostModel.note_prefill", lambda *_: None)
        with Engine("plain", chosen, connect) as engine:
            engine._model.sees = [(one.size, one.sinks) for one in engine._groups.windows]
            yield engine
