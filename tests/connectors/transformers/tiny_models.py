"""Tiny transformers models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from real_models import random_model

from tiercache.connectors.transformers_cache import PrefixCache

Open = Callable[..., PrefixCache]


def tiny_model(config_class: str, seed: int = 1, **options: Any) -> Any:
    return random_model(config_class, seed, **options).eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """[1, tokens] ids that are not special tokens."""
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(target: Any, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    options.setdefault("attention_mask", torch.ones_like(ids))
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    output = target.generate(input_ids=ids, **{**settings, **options})
    return list(output[:, ids.shape[1] :].tolist())
