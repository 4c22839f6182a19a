"""Experts divided among the ranks of an engine, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, save_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONG = prompt(700, "parallel")
FULL = 700 // BLOCK * BLOCK


def test_divided_experts_give_the_same_tokens_from_the_cache(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Each rank has half of the experts whole, and half of the heads."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **experts)
    right = start(model=model).generate([LONG], 16)[0][0]
    with launch("64MiB", region="32MiB") as daemon:
        sizes = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        engine = start(daemon.address, {"module": "experts_on_cpu"}, model=model, **sizes)
        assert engine.generate([LONG], 16) == ([right], [0])
        engine.await_hits(LONG)
        assert engine.regenerate([LONG], 16) == ([right], [FULL])
        engine.close()
