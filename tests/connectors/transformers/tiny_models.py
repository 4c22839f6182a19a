"""Tiny transformers models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tiercache.connectors.transformers_cache import PrefixCache

torch.set_num_threads(1)

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large, so that the logits of a random model differ
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Open = Callable[..., PrefixCache]


def tiny_model(config_class: str, seed: int = 1, **options: Any) -> Any:
    """A random model that transformers makes from a config; the same for the same arguments."""
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**COMMON, **options})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # what is 0 at the start must count too
            if not parameter.any():
                parameter.normal_(std=0.3)
    return model.eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """[1, tokens] ids that are not special tokens."""
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(target: Any, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    options.setdefault("attention_mask", torch.ones_like(ids))
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    output = target.generate(input_ids=ids, **{**settings, **options})
    return list(output[:, ids.shape[1] :].tolist())
