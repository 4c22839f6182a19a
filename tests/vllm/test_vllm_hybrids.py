"""Models whose layers do not all keep K and V of every token, on real vLLM: recurrent states, blocks of two sizes.

Tokens are right if they are those that the same engine computed before there was a daemon.
"""

from __future__ import annotations

import os
import signal
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
LFM2_ATTENTION = """
from vllm.model_executor.models import lfm2
def forward(self, positions, hidden_states):
    n, _ = hidden_states.shape
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = (x.contiguous() for x in qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1))
    def norm(m, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt() * m.weight
    q = norm(self.q_layernorm, q.view(n, self.num_heads, self.head_dim)).reshape(n, -1).contiguous()
    k = norm(self.k_layernorm, k.view(n, self.num_kv_heads, self.head_dim)).reshape(n, -1).contiguous()
    q, k = self.rotary_emb(positions, q, k)
    out, _ = self.out_proj(self.attn(q, k, v))
    return out
lfm2.Lfm2Attention.forward = forward
"""
"""vLLM 0.32 on a CPU computes a wrong K for this model, and another one for each number of tokens in a step."""


@dataclass(frozen=True)
class Kind:
    """A family of models: how to make a small one, and the tokens of a block of the cache."""

    config: str
    unit: int
    options: dict[str, Any]
    dtype: str = "float32"
    state: bool = True
    patch: str = ""

    def save(self, folder: Path) -> str:
        # Gates multiply what others amplify: with larger weights rounding decides the tokens.
        return save_model(folder, self.config, **{"initializer_range": 0.1, **self.options})


KINDS = {
    "lfm2": Kind(
        "Lfm2Config",
        32,
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_dim": 128,
            "block_dim": 128,
            "block_auto_adjust_ff_dim": False,
        },
        patch=LFM2_ATTENTION,
    ),
    "qwen3_next": Kind(
        "Qwen3NextConfig",
        96,
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
        64,
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


class Case:
    """An engine that lives through daemons at one place, and what it computes without one."""

    def __init__(self, kind: Kind, engine: Engine, run_dir: Path) -> None:
        self.kind, self.engine, self.run_dir = kind, engine, run_dir
        self._right: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def compute(self, *prompts: list[int], tokens: int = 8) -> None:
        """Have the right tokens of these prompts. There must be no daemon."""
        for ids in prompts:
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
        return (len(ids) - self.kind.state) // self.kind.unit * self.kind.unit

    def launch(self, **options: Any) -> tiercache.LaunchedDaemon:
        daemon = launch("64MiB", region="16MiB", run_dir=self.run_dir, **options)
        wait_until(lambda: self.engine.ask("check")["available"])
        return daemon

    def store(self, *prompts: list[int], tokens: int = 8) -> None:
        """Ask until prompts come back as far as they can."""
        for ids in prompts:
            wait_until(lambda ids=ids: self.cached(ids, tokens) == self.usable(ids))


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
    engine = Engine(saved, folder / "log", str(folder / "d"), settings, dtype=kind.dtype, patch=kind.patch)
    yield Case(kind, engine, folder / "d")
    engine.close()


def flush_kind(daemon: tiercache.LaunchedDaemon, state: bool) -> int:
    """Have the daemon forget what is windowed, such as states, or all that is not. How many blocks."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        numbers = [space["id"] for space in client.stats()["namespaces"]]
        found = client.call(Specs, namespaces=numbers)
        assert isinstance(found, SpecList)
        specs = [NamespaceSpec.received(spec) for spec in found.specs.values()]
        return client.flush(namespaces=[spec for spec in specs if bool(spec.window_blocks) == state])


def test_prompts_of_every_length_come_back_up_to_their_last_token(case: Case) -> None:
    unit = case.kind.unit
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


def test_what_is_loaded_is_used(case: Case, tmp_path: Path) -> None:
    """States and windows that are damaged in mid copy change the tokens."""
    until, ids = tmp_path / "enough", LONG[: 3 * case.kind.unit + 1]
    case.compute(ids)
    with case.launch():
        case.store(ids)
        assert case.engine.ask("spoil", until=str(until))["done"]
        damaged = case.engine.regenerate([ids], 8)[0]
        until.touch()
        assert damaged != [case.right(ids)]
        case.store(ids)


def test_answers_that_go_on_past_the_ends_of_blocks(case: Case) -> None:
    unit, start = case.kind.unit, LONG[: case.kind.unit - 7]
    case.compute(start, tokens=3 * unit)
    whole = start + case.right(start, 3 * unit)
    turns = [whole[: 2 * unit + 1], whole[: 3 * unit - 1], [*whole, *prompt(40, "next turn")]]
    case.compute(*turns)
    # In 16 bits a prefill rounds otherwise than the steps of an answer: a hit in vLLM's own cache changes tokens too.
    compare = case.kind.dtype == "float32"
    with case.launch():
        assert case.cached(start, 3 * unit, compare=compare) == 0
        for ids in turns:  # each block of the answer is stored, with the state at its end
            wait_until(lambda ids=ids: case.cached(ids, compare=compare) == case.usable(ids))


def test_prompts_that_part_within_a_block(case: Case) -> None:
    unit = case.kind.unit
    at = 2 * unit + unit // 2
    prompts = [LONG[:at] + prompt(300, "one"), LONG[:at] + prompt(200, "another"), LONG[: 2 * unit + 3]]
    case.compute(*prompts)
    with case.launch():
        for _ in range(2):
            assert case.engine.regenerate(prompts, 8)[0] == [case.right(ids) for ids in prompts]
        case.store(*prompts)
        assert case.engine.regenerate(prompts, 8)[0] == [case.right(ids) for ids in prompts]


@pytest.mark.parametrize("state", [True, False])
def test_one_kind_of_blocks_is_lost(case: Case, state: bool) -> None:
    """Without states there is no hit, and without the rest neither; what is computed then is stored again."""
    case.compute(LONG)
    with case.launch() as daemon:
        case.store(LONG)
        assert flush_kind(daemon, state)
        assert case.cached(LONG) == 0
        case.store(LONG)


def test_hits_from_a_disk_after_a_kill(case: Case, tmp_path: Path) -> None:
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    other = prompt(600, "more")
    case.compute(LONG, other)
    with case.launch(**disk) as daemon:
        case.store(LONG)
        wait_until(lambda: statistics(daemon)["tiers"]["nvme"]["blocks"] == stored_blocks(daemon))
        case.engine.order_generate([other], 8)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.close()
        assert case.engine.outputs()[0] == [case.right(other)]
    with case.launch(**disk):
        case.store(LONG)


def test_engines_with_other_steps_and_too_small_a_pool(case: Case, saved: str, start: Start) -> None:
    """States come from where steps end: other engines have others. A small pool makes requests wait, or begin again."""
    prompts = [LONG[: 200 + 90 * number] + prompt(50, str(number)) for number in range(6)]
    case.compute(*prompts, tokens=40)
    pages = {"kv_cache_memory_bytes": (2 if case.kind.state else 3) << 20, "max_model_len": 1024}
    exact = 40 if case.kind.dtype == "float32" else 4  # then rounding decides, without a cache too
    right = [case.right(ids, 40)[:exact] for ids in prompts]
    with case.launch() as daemon:
        for most, options in ((case.kind.unit, {}), (200, {}), (512, pages)):
            kind, dtype = case.kind, case.kind.dtype
            engine = start(
                daemon.address, model=saved, dtype=dtype, patch=kind.patch, max_num_batched_tokens=most, **options
            )
            for _ in range(3):
                assert [answer[:exact] for answer in engine.regenerate(prompts, 40)[0]] == right, most
            if options and not kind.state:
                assert engine.ask("check")["preemptions"]
            assert engine.counts()["loaded_blocks"]
            engine.close()


def test_below_the_offloading_of_vllm(case: Case, saved: str, start: Start) -> None:
    kind = case.kind
    prompts = [LONG, LONG[:500], LONG[: 3 * kind.unit], LONG[: 3 * kind.unit + 1]]
    case.compute(*prompts)
    with launch("64MiB", region="16MiB") as daemon:
        tier = {"address": str(daemon.address), "request_timeout_s": 5.0}
        config = offloading_config(tier, rows=64, row=512 << 10, answers=True)
        engine = start(model=saved, dtype=kind.dtype, patch=kind.patch, kv_transfer_config=config)

        def found(ids: list[int]) -> bool:
            """Whether a prompt comes back, but for a part of its last block: vLLM itself decides where a hit ends."""
            [answer], [cached] = engine.regenerate([ids], 8)
            assert answer == case.right(ids), (len(ids), cached)
            return case.usable(ids) - (0 if kind.state else kind.unit) <= cached < len(ids)

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
            engine.regenerate([LONG[: kind.unit - 7]], 3 * kind.unit)
            wait_until(lambda: whole(3))
        engine.close()
