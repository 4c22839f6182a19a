"""Kinds of models and engines on real vLLM: a hit gives the tokens that vLLM computes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm_engines import BLOCK, COMMON, Engine, launch, prompt, save_model, statistics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FP8 = bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_supported())
"""Elsewhere vLLM has no such KV on a CPU."""


@pytest.mark.parametrize(
    ("config", "options", "engine", "token_bytes"),
    [
        ("Qwen3MoeConfig", EXPERTS, {"kv_cache_dtype": "fp8" if FP8 else "auto"}, 4 * 2 * 2 * 32 * (1 if FP8 else 4)),
        ("GptOssConfig", SINKS, {"dtype": "bfloat16"}, 2 * 2 * 2 * 32 * 2),
    ],
)
def test_hits_give_the_tokens_that_vllm_computes_itself(
    start: Start, tmp_path: Path, config: str, options: dict[str, Any], engine: dict[str, Any], token_bytes: int
) -> None:
    model = save_model(tmp_path / "model", config, **options)
    long = prompt(700, config)
    with launch("64MiB", region="32MiB", run_dir=tmp_path / "run") as daemon:
        served = start(daemon.address, model=model, **engine)
        computed = served.generate([long])
        assert computed[1] == [0]
        served.await_hits(long)
        assert served.regenerate([long]) == (computed[0], [672])
        assert served.regenerate([long[:500]])[1] == [480]
        assert not served.lines("the weights have changed"), "a first step changes tables"
        assert {space["block_bytes"] for space in statistics(daemon)["namespaces"]} == {token_bytes * BLOCK}


def save_eagle(folder: Path) -> str:
    """A random draft model of one layer, which reads the states of a model of `save_model`."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1}, architectures=["LlamaForCausalLM"])
    weights = transformers.LlamaModel(config).state_dict()
    layer = {name: weight for name, weight in weights.items() if name.startswith("layers.") and "input_" not in name}
    size = config.hidden_size
    config.save_pretrained(folder)
    save_file({**layer, "fc.weight": torch.randn(size, 2 * size)}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_blocks_hold_the_kv_of_eagle_too(start: Start, tmp_path: Path) -> None:
    """With a connector vLLM's hashes do not look ahead, as EAGLE's KV does: at the end of a block it may be that of
    another continuation, which costs accepted drafts at most."""
    model, draft = save_model(tmp_path / "model", "LlamaConfig"), save_eagle(tmp_path / "draft")
    long = prompt(700, "eagle")
    with launch("64MiB", region="32MiB", run_dir=tmp_path / "run") as daemon:
        config = {"method": "eagle", "model": draft, "num_speculative_tokens": 2}
        engine = start(daemon.address, model=model, speculative_config=config)
        computed = engine.generate([long, long[:500]], 24)[0]
        engine.await_hits(long)
        for number, tokens in enumerate((700, 500)):
            assert engine.regenerate([long[:tokens]], 24) == (computed[number : number + 1], [tokens // BLOCK * BLOCK])
        assert engine.ask("check")["drafts"] > 0
        assert {space["block_bytes"] for space in statistics(daemon)["namespaces"]} == {5 * 2 * 2 * 32 * BLOCK * 4}
