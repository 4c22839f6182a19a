"""What changes K and V without changing weights or config: it is in the form of every block. With vLLM's modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from tiercache.connectors.vllm.weights import describe_built

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def no_memory_of_rotary_embeddings() -> Iterator[None]:
    rotary_embedding._ROPE_DICT.clear()
    yield
    rotary_embedding._ROPE_DICT.clear()


def rotary(parameters: dict[str, Any], length: int, folder: str) -> torch.nn.Module:
    """As vLLM builds it for an engine with requests of that length."""
    rotary_embedding._ROPE_DICT.clear()
    config = VllmConfig(
        model_config=ModelConfig(folder, max_model_len=length, skip_tokenizer_init=True, dtype="float32"),
        device_config=DeviceConfig("cpu"),
    )
    with set_current_vllm_config(config):
        built: torch.nn.Module = rotary_embedding.get_rope(32, 2048, True, parameters, torch.float32)
    return built


def test_tables_of_positions_are_told_apart(model: str) -> None:
    default = {"rope_type": "default", "rope_theta": 10000.0}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    kinds: list[tuple[dict[str, Any], int]] = [
        (default, 2048),
        ({**default, "rope_theta": 20000.0}, 2048),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 2048),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, 2048),
        ({**yarn, "factor": 2.0}, 2048),
        ({**yarn, "factor": 4.0}, 2048),
        ({**yarn, "factor": 4.0, "attention_factor": 0.5}, 2048),
        (LONGROPE, 2048),
        (LONGROPE, 512),
    ]
    described = [describe_built([rotary(*kind, model)]) for kind in kinds]
    assert len(set(described)) == len(kinds)
    assert describe_built([rotary(LONGROPE, 1024, model)]) == described[-2], "the factors are the same"
    assert describe_built([rotary(default, 512, model)]) == described[0]
