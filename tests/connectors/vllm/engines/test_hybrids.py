"""Models whose layers do not all keep K and V of every token, on real vLLM: recurrent states, blocks of two sizes.

Tokens are right if they are those that the same engine computed before there was a daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import (
    Engine,
    flush,
    launch,
    offloading_config,
    prompt,
    save_model,
    statistics,
    stored_blocks,
    wait_until,
)

import tiercache
from tiercache.protocol.messages import SpecList, Specs
from tiercache.protocol.namespaces import NamespaceSpec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]


@dataclass(frozen=True)
class Kind:
    """A family of models: how to make a small one."""

    config: str
    options: dict[str, Any]
    dtype: str = "float32"
    state: bool = True

    def save(self, folder: Path) -> str:
        # Gates multiply what others amplify: with larger weights rounding decides the tokens.
        return save_model(folder, self.config, **{"initializer_range": 0.1, **self.options})


KINDS = {
    "qwen3_next": Kind(
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        dtype="bfloat16",
    ),
    "gemma4": Kind(
        "Gemma4TextConfig",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 100,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
        },
        state=False,
    ),
}
LONG = prompt(700, "hybrid")
"""Longer than a step of most engines here."""


class Case:
    """An engine that lives through daemons at one place, and what it computes without one."""

    def __init__(self, kind: Kind, engine: Engine, run_dir: Path) -> None:
        self.kind, self.engine, self.run_dir = kind, engine, run_dir
        self.unit = int(engine.ask("check")["block_size"])
        """Tokens of a block of the cache: vLLM chooses them, for some models by the kind of CPU."""
        self._right: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def compute(self, *prompts: list[int], tokens: int = 8) -> None:
        """Have the right tokens of these prompts, if they are not known yet. There must be no daemon."""
        for ids in prompts:
            if (tuple(ids), tokens) not in self._right:
                [self._right[tuple(ids), tokens]] = self.engine.regenerate([ids], tokens)[0]

    def right(self, ids: list[int], tokens: int = 8) -> list[int]:
        return self._right[tuple(ids), tokens]

    def cached(self, ids: list[int], tokens: int = 8, *, compare: bool = True) -> int:
        """Ask when only the cache can have a prompt; the tokens must be right. How many it had."""
        [answer], [cached] = self.engine.regenerate([ids], tokens)
        assert not compare or answer == self.right(ids, tokens), (len(ids), cached)
        return cached

    def usable(self, ids: list[int]) -> int:
        """Most tokens of a prompt that can come from the cache."""
        return (len(ids) - self.kind.state) // self.unit * self.unit

    def launch(self, **options: Any) -> tiercache.LaunchedDaemon:
        daemon = launch("64MiB", region="16MiB", run_dir=self.run_dir, **options)
        wait_until(lambda: self.engine.ask("check")["available"])
        return daemon

    def store(self, *prompts: list[int], tokens: int = 8) -> None:
        """Ask until prompts come back as far as they can."""
        for ids in prompts:
            wait_until(lambda ids=ids: self.cached(ids, tokens) == self.usable(ids))


def flush_kind(daemon: tiercache.LaunchedDaemon, state: bool) -> int:
    """Have the daemon forget what is windowed, such as states, or all that is not. How many blocks."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        numbers = [space["id"] for space in client.stats()["namespaces"]]
        found = client.call(Specs, namespaces=numbers)
        assert isinstance(found, SpecList)
        specs = [NamespaceSpec.received(spec) for spec in found.specs.values()]
        return client.flush(namespaces=[spec for spec in specs if bool(spec.window_blocks) == state])


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def saved(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> str:
    return kind.save(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def case(kind: Kind, saved: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("case")
    settings = {"request_timeout_s": 2.0}
    engine = Engine(saved, folder / "log", str(folder / "d"), settings, dtype=kind.dtype)
    yield Case(kind, engine, folder / "d")
    engine.close()


def test_prompts_of_every_length_come_back_up_to_their_last_token(case: Case) -> None:
    unit = case.unit
    lengths = {unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit - 1, 500, 3 * unit + unit // 2, 512, 640, 700}
    prompts = [LONG[:length] for length in sorted(lengths, reverse=True)]
    case.compute(*prompts)
    with case.launch():
        assert case.cached(LONG) == 0
        case.store(LONG)
        for ids in prompts:  # with the states of others, or without
            assert case.cached(ids) <= case.usable(ids)
        case.store(*prompts)
        assert case.engine.ask("check")["idle"]


@pytest.mark.parametrize("state", [True, False])
def test_one_kind_of_blocks_is_lost(case: Case, state: bool) -> None:
    """Without states there is no hit, and without the rest neither; what is computed then is stored again."""
    case.compute(LONG)
    with case.launch() as daemon:
        case.store(LONG)
        assert flush_kind(daemon, state)
        assert case.cached(LONG) == 0
        case.store(LONG)


def test_requests_that_are_preempted(case: Case, saved: str, start: Start) -> None:
    """A pool is too small for all: requests lose their blocks and states in mid answer, and begin again."""
    kind, unit = case.kind, case.unit
    prompts = [LONG[: unit + 9 * number] + prompt(20, str(number)) for number in range(6)]
    tokens, exact = 2 * unit, 2 * unit if kind.dtype == "float32" else 4
    case.compute(*prompts, tokens=tokens)
    turns = [ids + case.right(ids, tokens) for ids in prompts]
    case.compute(*turns)
    with case.launch() as daemon:
        options = {"model": saved, "dtype": kind.dtype, "max_num_batched_tokens": 200}
        engine = start(daemon.address, num_gpu_blocks_override=20, max_model_len=6 * unit, **options)
        for _ in range(2):
            answers, _ = engine.regenerate(prompts, tokens)
            assert [answer[:exact] for answer in answers] == [case.right(ids, tokens)[:exact] for ids in prompts]
            assert engine.ask("check")["preemptions"]
        assert engine.counts()["loaded_blocks"]
        engine.close()
        hits = [case.cached(ids, compare=kind.dtype == "float32") for ids in turns]
        assert any(hit > len(ids) for hit, ids in zip(hits, prompts, strict=True)), hits  # blocks of answers are there


def test_below_the_offloading_of_vllm(case: Case, saved: str, start: Start) -> None:
    kind = case.kind
    prompts = [LONG, LONG[:500], LONG[: 3 * case.unit], LONG[: 3 * case.unit + 1]]
    case.compute(*prompts)
    with launch("64MiB", region="16MiB") as daemon:
        tier = {"address": str(daemon.address), "request_timeout_s": 5.0}
        config = offloading_config(tier, rows=64, row=512 << 10, answers=True)
        engine = start(model=saved, dtype=kind.dtype, kv_transfer_config=config)

        def found(ids: list[int]) -> bool:
            """Whether a prompt comes back, but for a part of its last block: vLLM itself decides where a hit ends."""
            [answer], [cached] = engine.regenerate([ids], 8)
            assert answer == case.right(ids), (len(ids), cached)
            return case.usable(ids) - (0 if kind.state else case.unit) <= cached < len(ids)

        def whole(blocks: int) -> bool:
            """Whether every part of the model has so many blocks. What waits for a step of vLLM gets one."""
            engine.generate([[5, 6, 7]], 1)
            return all(space["blocks"] >= blocks for space in statistics(daemon)["namespaces"])

        for ids in prompts:
            wait_until(lambda ids=ids: found(ids))
        assert stored_blocks(daemon)
        assert all(found(ids) for ids in prompts)
        if not kind.state:  # an answer is stored as it grows, in pieces where blocks are of two sizes
            flush(daemon)
            engine.regenerate([LONG[: case.unit - 7]], 3 * case.unit)
            wait_until(lambda: whole(3))
        engine.close()
