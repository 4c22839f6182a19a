"""Tiny models with random weights, saved once per test run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

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


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """`save_model("LlamaConfig", option=...)` writes a model folder, once for equal options."""
    saved: dict[str, Path] = {}

    def save(config_class: str, **options: Any) -> Path:
        name = f"{config_class}{sorted(options.items(), key=str)}"
        if name not in saved:
            torch.manual_seed(len(config_class))
            config = getattr(transformers, config_class)(**{**COMMON, **options})
            folder = tmp_path_factory.mktemp(config_class)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():  # what is 0 at the start (sinks, biases) must count too
                    if not parameter.any():
                        parameter.normal_(std=0.3)
            model.save_pretrained(folder, safe_serialization=True)
            saved[name] = folder
        return saved[name]

    return save


@pytest.fixture(scope="session")
def llama(save_model: SaveModel) -> Path:
    return save_model("LlamaConfig")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that depend on nothing but the arguments, without the special ones."""
    return [random.Random(f"{seed}/{position}").randrange(3, VOCABULARY) for position in range(length)]
