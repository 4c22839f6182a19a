"""What tiny models with random weights are made of, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

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


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that depend on nothing but the arguments, without the special ones."""
    return [random.Random(f"{seed}/{position}").randrange(3, VOCABULARY) for position in range(length)]
