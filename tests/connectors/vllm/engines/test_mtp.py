"""Multi-token prediction on real vLLM: the layer that drafts has KV of its own, in the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm_engines import BLOCK, COMMON, Engine, launch, prompt, statistics, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
LONG = prompt(700, "mtp")
PARTED = LONG[: 12 * BLOCK] + prompt(60, "another end")
"""It parts from LONG where a block ends."""


def save_mimo(folder: Path) -> str:
    """A random MiMo: a Qwen 2 with one more layer, which drafts a token from the one before and the model's state."""
    torch.manual_seed(1)
    config = transformers.Qwen2Config(**COMMON, num_nextn_predict_layers=1)
    weights = dict(transformers.Qwen2ForCausalLM(config).state_dict())
    drafter, size = "model.mtp_layers.0.", config.hidden_size
    one = transformers.Qwen2Model(transformers.Qwen2Config(**{**COMMON, "num_hidden_layers": 1})).state_dict()
    layer = "layers.0."
    weights |= {drafter + name[len(layer) :]: weight for name, weight in one.items() if name.startswith(layer)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{drafter}{norm}.weight": torch.ones(size) for norm in norms}
    weights[f"{drafter}input_proj.weight"] = torch.randn(size, 2 * size)
    config.architectures = ["MiMoForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def answers(engine: Engine, ids: list[int]) -> tuple[list[int], int, list[int]]:
    """The tokens of an answer, how many tokens of the prompt were cached, and the tokens that were drafted."""
    engine.forget()
    engine.ask("drafts")
    [tokens], [cached] = engine.generate([ids], 24)
    return tokens, cached, engine.ask("drafts")["tokens"]


def test_blocks_hold_the_kv_of_multi_token_prediction_too(start: Start, tmp_path: Path) -> None:
    """With loaded blocks the same tokens are drafted as without a cache: a layer without its KV drafts others."""
    model, run_dir = save_mimo(tmp_path / "model"), tmp_path / "run"
    config = {"method": "mtp", "num_speculative_tokens": 1}
    engine = start(str(run_dir), model=model, speculative_config=config)
    right, _, drafted = answers(engine, LONG)
    right_of_parted, _, _ = answers(engine, PARTED)
    assert len(drafted) > 12
    with launch("64MiB", region="32MiB", run_dir=run_dir) as daemon:
        wait_until(lambda: engine.ask("check")["available"])
        engine.await_hits(LONG)
        assert answers(engine, LONG) == (right, 700 // BLOCK * BLOCK, drafted)
        cold = start(str(run_dir), model=model, speculative_config=config)
        assert answers(cold, LONG) == (right, 700 // BLOCK * BLOCK, drafted)
        # Where a block ends, the drafter's KV is of the token that came next: drafts may be others here.
        assert answers(cold, PARTED)[:2] == (right_of_parted, 12 * BLOCK)
        assert {space["block_bytes"] for space in statistics(daemon)["namespaces"]} == {5 * 2 * 2 * 32 * BLOCK * 4}
