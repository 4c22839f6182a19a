"""What changes K and V without changing weights or config: it is in the form of every block. With vLLM's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm_engines import BLOCK, Engine, prompt, save_model, stored_blocks, wait_until

import tiercache
from tiercache.connectors.vllm.built import describe_built

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


def test_engines_with_other_factors_of_longrope_do_not_meet(
    start: Callable[..., Engine], daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    """vLLM takes the long factors where requests may be longer than the model was trained for, for short ones too."""
    folder = save_model(
        tmp_path / "phi",
        "Phi3Config",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=512,
        partial_rotary_factor=1.0,
    )
    ids, before = prompt(400, "phi"), stored_blocks(daemon)
    full = len(ids) // BLOCK * BLOCK
    long, short = (start(str(daemon.address), model=folder, max_model_len=length) for length in (2048, 512))
    (first,) = long.generate([ids])[0]
    long.await_hits(ids)
    (other,) = short.generate([ids])[0]
    assert other != first
    assert short.counts()["loaded_blocks"] == 0
    wait_until(lambda: stored_blocks(daemon) == before + 2 * full // BLOCK)
    assert short.regenerate([ids]) == ([other], [full])
