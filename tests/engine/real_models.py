"""Tiny models with random weights for transformers' own code, prompts for them, and what they say."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    # Large, so that the logits of a random model differ and greedy text does not repeat one token.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SaveModel = Callable[..., Path]
"""`save_model("LlamaConfig", option=...)` writes a model folder, once for equal options."""


def random_model(config_class: str, seed: int, **options: Any) -> Any:
    """A random model that transformers makes from a config; the same for the same arguments."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**{**COMMON, **options}))
    with torch.no_grad():
        for parameter in model.parameters():  # what is 0 at the start (sinks, biases) must count too
            if not parameter.any():
                parameter.normal_(std=0.3)
    return model


def model_saver(new_folder: Callable[[str], Path]) -> SaveModel:
    saved: dict[str, Path] = {}

    def save(config_class: str, **options: Any) -> Path:
        name = f"{config_class}{sorted(options.items(), key=str)}"
        if name not in saved:
            folder = new_folder(config_class)
            random_model(config_class, len(config_class), **options).save_pretrained(folder, safe_serialization=True)
            saved[name] = folder
        return saved[name]

    return save


def small_engine(model_dir: Path, connect: Any = None, **settings: Any) -> Engine:
    """An engine on blocks of 8 tokens and chunks of 32 that loads all hits, however long that takes."""
    small = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 72}
    patient = {"always_load": True, "load_timeout_s": 60.0}
    return Engine(model_dir, EngineSettings(**{**small, **patient, **settings}), connect)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that depend on nothing but the arguments, without the special ones."""
    return [random.Random(f"{seed}/{position}").randrange(3, VOCABULARY) for position in range(length)]


@functools.cache
def _model(folder: Path, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(folder: Path, prompt: list[int], count: int, device: str = "cpu") -> list[int]:
    """The tokens that transformers generates."""
    inputs = torch.tensor([prompt], device=device)
    out = _model(folder, device).generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """The logits of every forward pass from here on, as the engine sees them, on the CPU."""
    seen: list[torch.Tensor] = []
    forward = engine._model.forward

    def recording(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        seen.append(logits.float().cpu())
        return logits

    engine._model.forward = recording  # type: ignore[method-assign]
    return seen


def blocks_by_key(engine: Engine) -> dict[bytes, torch.Tensor]:
    """What the pool has in its prefix cache, of the first group of layers."""
    return {key: engine.pool.blocks[block_id].clone() for key, block_id in engine._blocks._cached[0].items()}


def has_graph(engine: Engine, rows: int) -> bool:
    """True if decoding of so many rows is recorded as a graph."""
    graphs = engine._model._graphs
    assert graphs is not None
    return graphs._recordings[rows].graph is not None


def without_graphs(engine: Engine) -> None:
    engine._model._graphs = None


def module_of(engine: Engine) -> torch.nn.Module:
    """transformers' model in an engine."""
    return engine._model.module
