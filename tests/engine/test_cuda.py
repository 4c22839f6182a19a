"""The same promises on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import prompt_of
from memory_cache import MemoryCache
from test_engine import record_logits
from transformers import AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings, SamplingParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = prompt_of(120)


def test_greedy_text_is_that_of_generate_on_cuda(llama: Path) -> None:
    settings = EngineSettings(block_size=8, chunk_size=32, pool_blocks=64, device="cuda")
    with Engine(llama, settings) as engine:
        [output] = engine.generate([PROMPT], GREEDY)
    model = AutoModelForCausalLM.from_pretrained(llama).cuda().eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT], device="cuda")
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert output.tokens == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_is_computed_bit_for_bit_on_cuda(dtype: str, llama: Path) -> None:
    cache = MemoryCache()
    settings = EngineSettings(block_size=8, chunk_size=32, pool_blocks=64, device="cuda", dtype=dtype)
    with Engine(llama, settings, cache.connect) as engine:
        logits = record_logits(engine)
        [cold] = engine.generate([PROMPT], GREEDY)
        cold_logits = list(logits[-12:])
        engine.reset_pool()
        [warm] = engine.generate([PROMPT], GREEDY)
    assert warm.external_hit_tokens == 112
    assert warm.tokens == cold.tokens
    for ours, theirs in zip(logits[-12:], cold_logits, strict=True):
        assert torch.equal(ours, theirs)
