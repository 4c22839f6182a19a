"""The engine over the Triton kernels, in Triton's interpreter.

Not collected by itself: TRITON_INTERPRET=1 must be set before the kernels are decorated, so
`tests/kernels/test_kernels_interpreted.py` runs this file in a process of its own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import SaveModel, prompt_of

from tiercache.engine import Engine, EngineSettings, SamplingParams
from tiercache.engine.attention import GroupedPass
from tiercache.engine.cuda_attention import KernelPass
from tiercache.engine.decode_graphs import DecodeGraphs
from tiercache.engine.torch_attention import TorchPass

pytestmark = [pytest.mark.engine, pytest.mark.kernels]
assert os.environ.get("TRITON_INTERPRET") == "1", (
    "run by tests/kernels/test_kernels_interpreted.py, with TRITON_INTERPRET=1"
)

# All is small, for the interpreter takes milliseconds for a program: of 29 tokens the last chunk begins in block 3,
# and decoding fills it up. The third prompt is the beginning of the first.
SMALL: dict[str, Any] = {"block_size": 8, "chunk_size": 16, "pool_blocks": 40}
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [prompt_of(29, seed=1), prompt_of(7, seed=2), prompt_of(29, seed=1)[:18]]
SHORT = [prompt_of(6, seed=1), prompt_of(3, seed=2), prompt_of(5, seed=3)]
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "small-llama": ("LlamaConfig", {"num_hidden_layers": 1, **FEW_HEADS}),
    "gemma2-window-softcap": (
        "Gemma2Config",
        {
            "num_hidden_layers": 2,
            **FEW_HEADS,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "mistral-window": ("MistralConfig", {"num_hidden_layers": 1, **FEW_HEADS, "sliding_window": 9}),
}


def generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    tokens = [output.tokens for output in engine.generate(prompts, GREEDY)]
    engine.check_integrity()
    return tokens


def torch_tokens(
    folder: Path, settings: EngineSettings, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """The tokens of the engine with torch's attention."""
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        passes: list[object] = []
        with Engine(folder, settings) as engine:
            work_of(engine, passes)
            tokens = generate(engine, prompts)
    assert set(passes) == {TorchPass}
    return tokens


def work_of(engine: Engine, passes: list[object]) -> None:
    """Note what attends in each pass from here on."""
    forward = engine._model.forward

    def noted(batch: Any, *arguments: Any) -> torch.Tensor:
        parts = batch.work.parts if isinstance(batch.work, GroupedPass) else [batch.work]
        passes.extend(type(part) for part in parts)
        return forward(batch, *arguments)

    engine._model.forward = noted  # type: ignore[method-assign]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are taken as they are: trying them takes longer than the test."""
    monkeypatch.setattr("tiercache.engine.engine.check_model", lambda model: None)


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "exact"),
    [
        pytest.param("llama", "auto", False, marks=pytest.mark.stress),
        pytest.param("gemma2-window-softcap", "auto", True, marks=pytest.mark.stress),
        ("small-llama", "int4", True),
        pytest.param("small-llama", "fp8", True, marks=pytest.mark.stress),
        pytest.param("small-llama", "int8", False, marks=pytest.mark.stress),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_tokens_are_those_of_the_torch_path(
    model: str, kv_cache_dtype: str, exact: bool, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, options = MODELS[model]
    folder = save_model(config_class, **options)
    settings = EngineSettings(**SMALL, exact=exact, kv_cache_dtype=kv_cache_dtype)
    passes: list[object] = []
    with Engine(folder, settings) as engine:
        work_of(engine, passes)
        tokens = generate(engine, PROMPTS)
    assert set(passes) == {KernelPass}
    assert tokens == torch_tokens(folder, settings, PROMPTS, monkeypatch)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("int8", marks=pytest.mark.stress)])
@pytest.mark.usefixtures("unchecked")
def test_blocks_that_have_left_the_window_are_not_read(
    kv_cache_dtype: str, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, options = MODELS["mistral-window"]
    folder, settings = save_model(config_class, **options), EngineSettings(**SMALL, kv_cache_dtype=kv_cache_dtype)
    expected = torch_tokens(folder, settings, PROMPTS[:1], monkeypatch)
    with Engine(folder, settings) as engine:
        # In the tables a block of their place that spoils whatever it is weighed into.
        bad = torch.full_like(engine.pool.blocks[:1], 255 if kv_cache_dtype == "int8" else float("nan"))
        for module in ("blocks", "sequence"):
            monkeypatch.setattr(f"tiercache.engine.{module}.NO_BLOCK", len(engine.pool.blocks))
        engine.pool.blocks = torch.cat([engine.pool.blocks, bad])
        assert generate(engine, PROMPTS[:1]) == expected


class Replayed(DecodeGraphs):
    """Graphs that are run once more instead of being replayed: the tables and places are the graph's."""

    class Graph:
        def __init__(self, run: Any) -> None:
            self.replay = run
            self.replays = 0

    def _record(self, recording: Any) -> bool:
        def run() -> None:
            recording.logits = self._run(recording.batch, recording.tokens, recording.kept)
            recording.graph.replays += 1

        recording.graph = self.Graph(run)
        return True


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"),
    [
        ("small-llama", "int8"),
        pytest.param("gemma2-window-softcap", "int8", marks=pytest.mark.stress),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_tables_that_stay_in_place_serve_every_step(
    model: str, kv_cache_dtype: str, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(MODELS[model][0], **MODELS[model][1])
    settings = EngineSettings(**SMALL, kv_cache_dtype=kv_cache_dtype)
    expected = torch_tokens(folder, settings, SHORT, monkeypatch)
    with Engine(folder, settings) as engine:
        graphs = Replayed(engine._model._run, max_rows=3, longest=64)
        engine._model._graphs = graphs
        # Three sequences in a bucket of four, of other lengths in each step; blocks fill up meanwhile.
        assert generate(engine, SHORT) == expected
        groups = len(engine._groups.groups)
    assert len(graphs._recordings[4].tables) == groups == (1 if model == "small-llama" else 2)
    graph: Any = graphs._recordings[4].graph
    assert graph.replays >= 3


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    save_model: SaveModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(MODELS["small-llama"][0], **MODELS["small-llama"][1])
    expected = torch_tokens(folder, EngineSettings(**SMALL), SHORT[:1], monkeypatch)
    with Engine(folder, EngineSettings(**SMALL)) as engine:  # checked, by the kernels
        engine._model._graphs = DecodeGraphs(engine._model._run, max_rows=3, longest=64)  # and there is no CUDA
        with caplog.at_level(logging.WARNING):
            assert generate(engine, SHORT[:1]) == expected
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "decode runs without CUDA graphs, kernel by kernel"
    ]
