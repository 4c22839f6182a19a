"""Bytes of blocks and sequences, on the GPU and in the tiers."""

from __future__ import annotations

import pytest

from tiercache.plan.model import load_model
from tiercache.plan.sizes import Form, usual_block_size

KIB = 1024


def form(name: str, gpus: int = 1) -> Form:
    return Form(load_model(name), "auto", 16, gpus)


def test_a_window_caps_a_sequence() -> None:
    narrow = form("Mistral-7B-v0.1")
    assert narrow.sequence_gpu_bytes(4096) == 4096 * 128 * KIB
    assert narrow.sequence_gpu_bytes(32768) == narrow.sequence_gpu_bytes(5000) == (4096 + 16) * 128 * KIB
    of_a_layer = 2 * 2 * 16 * 128
    assert form("Gemma3-27B").sequence_gpu_bytes(65536) == of_a_layer * (10 * 65536 + 52 * 1040)


def test_shards() -> None:
    whole = form("Llama-3.1-70B").gpu_block_bytes
    assert form("Llama-3.1-70B", 4).gpu_block_bytes * 4 == whole
    assert form("Llama-3.1-70B", 16).gpu_block_bytes * 8 == whole  # 8 KV heads
    latent, sharded = form("DeepSeek-V3"), form("DeepSeek-V3", 8)
    assert (sharded.gpu_block_bytes, sharded.tier_block_bytes) == (latent.gpu_block_bytes, latent.tier_block_bytes)


@pytest.mark.parametrize(("dtype", "gpus", "tokens"), [("auto", 1, 544), ("auto", 2, 544), ("fp8", 1, 1072)])
def test_the_block_that_vllm_chooses(dtype: str, gpus: int, tokens: int) -> None:
    assert usual_block_size(load_model("Qwen3-Next-80B-A3B"), dtype, gpus) == tokens
    assert usual_block_size(load_model("Qwen3-8B"), dtype, gpus) == 16
