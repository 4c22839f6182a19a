"""The engine on a real device over a real daemon: the text of `generate()`, and loaded bits equal to computed ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("xxhash")

import torch
from real_models import (
    SaveModel,
    generated,
    has_graph,
    model_saver,
    module_of,
    prompt_of,
    record_logits,
    without_graphs,
)

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = prompt_of(120)  # chunks end at 32, 64, 96, 112, 120: 14 blocks of 8 can be reused


@pytest.fixture(scope="module")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    return model_saver(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def llama(save_model: SaveModel) -> Path:
    return save_model("LlamaConfig")


@pytest.fixture(scope="module")
def mixed(save_model: SaveModel) -> Path:
    """A Qwen whose last two layers have a window: two groups of layers."""
    windows = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 20}
    return save_model("Qwen2Config", num_hidden_layers=4, **windows)


@pytest.fixture
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("64MiB") as launched:
        yield launched


def settings_for(device: str, **others: Any) -> EngineSettings:
    fields = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "device": device.partition(":")[0]}
    return EngineSettings(**{**fields, "always_load": True, "load_timeout_s": 60.0, **others})


@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_greedy_text_is_that_of_generate(name: str, device: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    prompts = [PROMPT, prompt_of(45, seed=1), prompt_of(7, seed=2)]
    with Engine(folder, settings_for(device, pool_blocks=128)) as engine:
        assert engine.pool.blocks.device == torch.device(device)
        outputs = engine.generate(prompts, GREEDY)
    assert [output.tokens for output in outputs] == [generated(folder, prompt, 12, device) for prompt in prompts]


@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_steps_of_decoding_are_replayed_as_graphs(
    name: str, device: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    prompts = [prompt_of(length, seed=length) for length in (120, 45, 7, 60, 31)]
    with Engine(request.getfixturevalue(name), settings_for(device, pool_blocks=128)) as engine:
        recorded = [output.tokens for output in engine.generate(prompts, GREEDY)]
        assert has_graph(engine, 8)
        without_graphs(engine)
        engine.reset_pool()
        assert [output.tokens for output in engine.generate(prompts, GREEDY)] == recorded
    assert not caplog.records


def test_what_cannot_be_captured_runs_kernel_by_kernel(
    llama: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(llama, settings_for(device)) as engine:
        [expected] = engine.generate([PROMPT], GREEDY)
    with Engine(llama, settings_for(device)) as engine:
        # A model that looks at its numbers on the host cannot be recorded.
        module_of(engine).register_forward_hook(lambda module, inputs, output: output.logits.sum().item() and None)
        stream = torch.cuda.current_stream()
        [found] = engine.generate([PROMPT], GREEDY)
        [again] = engine.generate([PROMPT], GREEDY)
        assert torch.cuda.current_stream() == stream
    assert found.tokens == again.tokens == expected.tokens
    assert len([record for record in caplog.records if "without CUDA graphs" in record.message]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_engine_loads_what_the_first_one_computed(
    dtype: str, llama: Path, device: str, daemon: tiercache.LaunchedDaemon
) -> None:
    connect = connect_to(daemon.address, required=True)
    with Engine(llama, settings_for(device, dtype=dtype), connect) as engine:
        logits = record_logits(engine)
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        assert engine.stats()["stored"] == 14
        engine.check_integrity()
    with Engine(llama, settings_for(device, dtype=dtype), connect) as engine:
        warm_logits = record_logits(engine)
        [warm] = engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
    assert (cold.external_hit_tokens, warm.external_hit_tokens) == (0, 112)
    assert warm.tokens == cold.tokens
    assert len(warm_logits) == 12
    for ours, theirs in zip(warm_logits, logits[-12:], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("write", ["through", "back"])
def test_many_requests_in_a_small_pool_are_what_they_are_alone(
    write: str, llama: Path, device: str, daemon: tiercache.LaunchedDaemon
) -> None:
    """Blocks go out and come back while others are computed, into places that were just read."""
    prompts = [prompt_of(120, seed=seed) for seed in range(6)]
    with Engine(llama, settings_for(device)) as engine:
        alone = [engine.generate([prompt], GREEDY)[0].tokens for prompt in prompts]
    settings = settings_for(device, pool_blocks=40, write=write, clean_blocks=8)
    with Engine(llama, settings, connect_to(daemon.address, required=True)) as engine:
        for _ in range(3):
            assert [output.tokens for output in engine.generate(prompts, GREEDY)] == alone
            engine.check_integrity()
        assert engine.stats()["loaded"] > 0


def test_killing_the_daemon_fails_no_request(llama: Path, device: str, daemon: tiercache.LaunchedDaemon) -> None:
    with Engine(llama, settings_for(device), connect_to(daemon.address, required=True)) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        engine.reset_pool()
        os.kill(daemon.pid, signal.SIGKILL)
        [again] = engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
    assert again.tokens == cold.tokens
