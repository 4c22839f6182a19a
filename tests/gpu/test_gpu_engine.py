"""The engine on a real device over a real daemon: the text of `generate()`, and loaded bits equal to computed ones."""

from __future__ import annotations

import os
import random
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
from transformers import AutoModelForCausalLM, LlamaConfig

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

VOCABULARY = 128
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that depend on nothing but the arguments, without the special ones."""
    return [random.Random(f"{seed}/{position}").randrange(3, VOCABULARY) for position in range(length)]


PROMPT = prompt_of(120)  # chunks end at 32, 64, 96, 112, 120: 14 blocks of 8 can be reused


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama of random weights, large enough that greedy text varies."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("64MiB") as launched:
        yield launched


def settings_for(device: str, **others: Any) -> EngineSettings:
    fields = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "device": device.partition(":")[0]}
    return EngineSettings(**{**fields, **others})


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """Logits of every pass from here on."""
    recorded: list[torch.Tensor] = []
    forward = engine._model.forward

    def record(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        recorded.append(logits.float().cpu())
        return logits

    engine._model.forward = record  # type: ignore[method-assign]
    return recorded


def test_greedy_text_is_that_of_generate(llama: Path, device: str) -> None:
    prompts = [PROMPT, prompt_of(45, seed=1), prompt_of(7, seed=2)]
    with Engine(llama, settings_for(device)) as engine:
        assert engine.pool.device == torch.device(device)
        outputs = engine.generate(prompts, GREEDY)
    model = AutoModelForCausalLM.from_pretrained(llama).to(device).eval()
    model.generation_config.eos_token_id = None
    for prompt, output in zip(prompts, outputs, strict=True):
        inputs = torch.tensor([prompt], device=device)
        mask = torch.ones_like(inputs)
        expected = model.generate(inputs, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert output.tokens == expected[0, len(prompt) :].tolist()


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
