"""Experts divided among the ranks of one engine, and among engines with data parallelism, on real vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from vllm_engines import BLOCK, Engine, launch, prompt, save_model, statistics, stored_blocks, wait_until
from vllm_servers import complete, metric, server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONG = prompt(700, "parallel")
FULL = 700 // BLOCK * BLOCK


def test_divided_experts_give_the_same_tokens_from_the_cache(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have half of the experts and half of the heads; engines with data parallelism all of the attention."""
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
    if vllm.__version__ >= "0.33" and len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return  # vLLM 0.33 for a CPU gives each engine a NUMA node of its own
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    parallel = ["--data-parallel-size", "2", "--enable-expert-parallel"]
    with (
        launch("64MiB", region="32MiB") as daemon,
        server(model, daemon.address, tmp_path / "log", {"module": "experts_on_cpu"}, *parallel) as url,
    ):
        answers = [complete(url, LONG, 16)]
        wait_until(lambda: stored_blocks(daemon) == (700 + 15) // BLOCK)
        answers.append(complete(url, LONG, 16, rank=1))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [right, right]
        hits = [metric(url, "vllm:external_prefix_cache_hits_total", f'engine="{rank}"') for rank in (0, 1)]
        assert hits == [0, FULL]
        assert [space["rank"] for space in statistics(daemon)["namespaces"]] == ["tp 0/1 pp 0/1"]
