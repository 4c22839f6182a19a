"""Experts divided among the ranks of one engine, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, save_model, statistics, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
Start = Callable[..., Engine]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LONG = prompt(700, "parallel")


def test_experts_on_two_ranks_give_the_same_tokens_from_the_cache(start: Start, tmp_path: Path) -> None:
    """Each rank has half of the experts whole, and half of the heads."""
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **EXPERTS)
    right = start(model=model).regenerate([LONG], 16)[0]
    with launch("64MiB", region="32MiB") as daemon:
        sizes = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        engine = start(daemon.address, {"module": "experts_on_cpu"}, model=model, **sizes)
        assert engine.generate([LONG], 16) == (right, [0])
        engine.await_hits(LONG)
        assert engine.regenerate([LONG], 16) == (right, [700 // BLOCK * BLOCK])
        assert {space["rank"] for space in statistics(daemon)["namespaces"]} == {"tp 0/2 pp 0/1", "tp 1/2 pp 0/1"}
        ranks = engine.ask("count")
        assert len(ranks["pids"]) == 2
        wait_until(lambda: engine.generate([[5, 6, 7]]) and engine.ask("check")["jobs"] == 0)
        assert engine.ask("check")["idle"]
