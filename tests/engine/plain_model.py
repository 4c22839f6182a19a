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

from tiercache.engine import Engine, EngineSettings, RequestOutput, SamplingParams
from tiercache.engine.kv_pool import KVPool, LayerGroups
from tiercache.engine.model import ModelShape
from tiercache.engine.sequence import Sequence as EngineSequence
from tiercache.engine.settings import Clock
from tiercache.protocol.keys import KeyChain, content_id
from tiercache.protocol.namespaces import NamespaceSpec

VOCABULARY = 50
MOST_STEPS = 5000


class FakeClock(Clock):
    """Time that passes when somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.time_s = 1.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


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


def continuation(prompt: Sequence[int], count: int, sees: Sequence[tuple[int, int]] = ((0, 0),)) -> list[int]:
    """The greedy continuation of `prompt` by a model whose groups of layers have these windows and sinks."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choices(context_of(tokens, sees))[0])
    return tokens[len(prompt) :]


class PlainModel:
    """Stands in for `HostedModel`. Every group of layers has the tokens, in its first layer.

    Attributes:
        passes: the chunks `[start, end)` of each forward pass.
        token_s: what computing a token takes on `clock`.
    """

    def __init__(self, _: Any, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.passes: list[list[tuple[int, int]]] = []
        self.sees: list[tuple[int, int]] = []
        self.token_s = 0.0
        self.clock = FakeClock()
        self.check_write: Any = lambda block_id: None

    def new_pool(self, num_blocks: int, block_size: int, *rest: Any) -> KVPool:
        groups: LayerGroups = rest[-1]
        layout = self._shape.kv_layout(block_size, layers=groups.block_layers)
        return KVPool(layout, num_blocks, 0, self._device, groups.places)

    def prepare(self, *_: Any) -> None:
        """Nothing to be made ready."""

    def forward(self, batch: Any, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        self.passes.append([(segment.start, segment.end) for segment in batch.segments])
        self.clock.sleep(self.token_s * len(tokens))
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
                    self.check_write(table[position // size])
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
    *,
    clock: FakeClock | None = None,
    token_s: float = 0.0,
    max_context: int = 512,
    window: int = 0,
    sinks: int = 0,
    windows: Sequence[int] = (),
    **settings: Any,
) -> Iterator[Engine]:
    """An engine that serves a `PlainModel`, on blocks of 2 tokens and chunks of 4 unless told otherwise.

    Unless it is 0, `window` is the model's sliding window, or with `sinks` its `attention_window`; `windows` are those
    of its layers, where they are not one. Time is that of `clock`, on which a token takes `token_s` to compute. All
    hits are loaded unless the settings say otherwise.
    """
    small = {"block_size": 2, "chunk_size": 4, "pool_blocks": 16, "max_num_seqs": 4, "device": "cpu"}
    if sinks:
        small |= {"attention_window": window, "attention_sinks": sinks}
    chosen = EngineSettings(**{"always_load": True, **small, **settings})
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
    clock = clock or FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.engine.engine.read_shape", lambda *_: shape)
        patch.setattr("tiercache.engine.engine.identify_model", lambda *_: (namespaces, content_id("plain")))
        patch.setattr("tiercache.engine.engine.file_states", lambda *_: [])
        patch.setattr("tiercache.engine.engine.HostedModel", PlainModel)
        patch.setattr("tiercache.engine.engine.check_model", lambda *_: None)
        patch.setattr("tiercache.engine.engine.find_streaming", lambda *_: None)
        engine = Engine("plain", chosen, connect, clock)
    model: Any = engine._model
    model.clock, model.token_s = clock, token_s
    model.sees = [(one.size, one.sinks) for one in engine._groups.windows]
    model.check_write = lambda block_id: check_write(engine, block_id)
    with engine:
        yield engine


def check_write(engine: Engine, block_id: int) -> None:
    """Whoever computes into a block owns it alone, and nobody finds it by a key."""
    assert engine._blocks.references(block_id) == 1, f"block {block_id} is computed into and has other owners"
    assert engine._blocks._keys[block_id] is None, f"block {block_id} is computed into and has a key"


def plain_prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens for a `PlainModel`."""
    return [1 + (seed * 17 + position * position) % 48 for position in range(length)]


def greedy(count: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, n=n, ignore_eos=True)


def said(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The tokens that the model of a `plain_engine` generates without an engine."""
    return continuation(prompt, count, engine._model.sees)  # type: ignore[attr-defined]


def sequence_of(engine: Engine, request_id: int, index: int = 0) -> EngineSequence:
    return next(one for one in engine._sequences[request_id] if one.index == index)


def chain_of(engine: Engine, prompt: list[int]) -> KeyChain:
    """The keys of a prompt."""
    request_id = engine.add_request(prompt, greedy(1))
    chain = sequence_of(engine, request_id).chain
    engine.abort(request_id)
    return chain


class Watch:
    """Runs an engine with its books checked after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self) -> dict[int, list[RequestOutput]]:
        """All requests to their end; their outputs in the order in which they ended."""
        outputs: dict[int, list[RequestOutput]] = {}
        for _ in range(MOST_STEPS):
            if not self.engine.unfinished:
                return outputs
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
        raise AssertionError("the engine does not come to an end")

    def step(self) -> list[RequestOutput]:
        """One step; what has ended in it."""
        outputs = [step.output for step in self.engine.step() if step.output is not None]
        self.engine.check_integrity()  # that no sequence holds more than it may, among others
        return outputs

    def serve(self, prompt: list[int], count: int) -> RequestOutput:
        request_id = self.engine.add_request(prompt, greedy(count))
        return self.run()[request_id][0]
