"""Kinds of models on real vLLM: experts, fp8 KV, sinks and windows, layers that draft, MLA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm_engines import BLOCK, COMMON, Engine, launch, prompt, save_model, statistics, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
AMX = bool(torch.cpu.get_capabilities().get("amx_tile", False))
"""With these instructions vLLM computes MLA on a CPU, in 16 bits, on top of a prefix too."""
FP8 = bool(AMX or torch.cpu._is_avx512_supported())
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
    with launch("64MiB", region="32MiB") as daemon:
        served = start(daemon.address, model=model, **engine)
        computed = served.generate([long])
        assert computed[1] == [0]
        served.await_hits(long)
        assert served.regenerate([long]) == (computed[0], [672])
        assert served.regenerate([long[:500]])[1] == [480]
        assert not served.lines("the weights have changed"), "a first step changes tables"
        assert {space["block_bytes"] for space in statistics(daemon)["namespaces"]} == {token_bytes * BLOCK}


def test_divided_experts_give_the_same_tokens_from_the_cache(start: Start, tmp_path: Path) -> None:
    """Each rank has half of the experts whole, and half of the heads."""
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **EXPERTS)
    long = prompt(700, "parallel")
    right = start(model=model).generate([long], 16)[0][0]
    with launch("64MiB", region="32MiB") as daemon:
        sizes = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        engine = start(daemon.address, {"module": "experts_on_cpu"}, model=model, **sizes)
        assert engine.generate([long], 16) == ([right], [0])
        engine.await_hits(long)
        assert engine.regenerate([long], 16) == ([right], [700 // BLOCK * BLOCK])
        engine.close()


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


def test_blocks_hold_the_kv_of_multi_token_prediction_too(start: Start, tmp_path: Path) -> None:
    """With loaded blocks the same tokens are drafted as without a cache: a layer without its KV drafts others."""
    model, run_dir = save_mimo(tmp_path / "model"), tmp_path / "run"
    config = {"method": "mtp", "num_speculative_tokens": 1}
    long = prompt(700, "mtp")
    parted = long[: 12 * BLOCK] + prompt(60, "another end")  # where a block ends
    engine = start(str(run_dir), model=model, speculative_config=config)

    def answer(engine: Engine, ids: list[int]) -> dict[str, Any]:
        engine.forget()
        return engine.ask("generate", prompts=[ids], max_tokens=24)

    right, right_of_parted = answer(engine, long), answer(engine, parted)
    assert len(right["drafted"]) > 12
    with launch("64MiB", region="32MiB", run_dir=run_dir) as daemon:
        wait_until(lambda: engine.ask("check")["available"])
        engine.await_hits(long)
        cold = start(str(run_dir), model=model, speculative_config=config)
        for one in (engine, cold):
            assert answer(one, long) == {**right, "cached": [700 // BLOCK * BLOCK]}
        # Where a block ends, the drafter's KV is of the token that came next: drafts may be others here.
        found = answer(cold, parted)
        assert (found["tokens"], found["cached"]) == (right_of_parted["tokens"], [12 * BLOCK])
        assert {space["block_bytes"] for space in statistics(daemon)["namespaces"]} == {5 * 2 * 2 * 32 * BLOCK * 4}


def test_mla_is_loaded_where_vllm_computes_on_top_of_it_and_else_not_at_all(start: Start, tmp_path: Path) -> None:
    """On a CPU without AMX half of a prompt would come out wrong on top of the other half."""
    heads = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 4, "first_k_dense_replace": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    more = {"num_key_value_heads": 4, "head_dim": 64, "n_group": 1, "topk_group": 1}
    model = save_model(tmp_path / "mla", "DeepseekV2Config", **heads, **experts, **more)
    long = [prompt(600, "mla")]
    if not AMX:
        engine = start("/nowhere", model=model, block_size=16, enable_prefix_caching=False)
        expected = engine.generate(long, 16)
        assert engine.generate(long, 16) == (expected[0], [0])
        (said,) = engine.lines("vLLM is served without the cache")
        assert "prefix caching is off" in said
        return
    with launch("64MiB", region="16MiB") as own:
        engine = start(own.address, model=model, dtype="bfloat16")
        assert engine.generate(long, 16)[1] == [0]
        # In 16 bits the end of a prompt comes out otherwise on top of a prefix: vLLM's own pool is the measure.
        from_pool = engine.generate(long, 16)
        wait_until(lambda: engine.regenerate(long, 16)[1] == [576])
        assert engine.regenerate(long, 16) == (from_pool[0], [576])
