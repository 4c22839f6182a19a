"""What `tiercache plan` reads from a model's configuration, and the bytes of its blocks and sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiercache.errors import ConfigError
from tiercache.plan.model import load_model, read_config, record_bytes
from tiercache.plan.sizes import Form, usual_block_size

KIB = 1024


@pytest.mark.parametrize(
    ("name", "token_bytes", "billions", "active"),
    [
        ("Llama-3.1-8B", 128 * KIB, 8.03, 7.0),
        ("Llama-3.1-70B", 320 * KIB, 70.6, 68.5),
        ("Qwen3-8B", 144 * KIB, 8.19, 6.95),
        ("Qwen3-32B", 256 * KIB, 32.8, 31.2),
        ("Qwen3-30B-A3B", 96 * KIB, 30.5, 2.7),
        ("Mistral-7B-v0.1", 128 * KIB, 7.24, 7.0),
        ("Mixtral-8x7B", 128 * KIB, 46.7, 12.6),
        ("Gemma3-27B", 496 * KIB, 27.0, 25.6),
        ("gpt-oss-20b", 48 * KIB, 20.9, 3.0),
        ("gpt-oss-120b", 72 * KIB, 117, 4.55),
        ("DeepSeek-V3", 576 * 2 * 61, 671, 35.7),
        ("Qwen3-Next-80B-A3B", 24 * KIB, 79.7, 3.25),
        ("LFM2-1.2B", 12 * KIB, 1.17, 1.036),
        ("Jamba-v0.1", 16 * KIB, 51.6, 11.6),
        ("Phi-3-mini", 384 * KIB, 3.82, 3.6),
    ],
)
def test_known_models_are_as_their_cards_say(name: str, token_bytes: int, billions: float, active: float) -> None:
    model = load_model(name)
    assert Form(model, "auto", 16, 1).token_bytes == token_bytes
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("slots", "heads", "channels"), [(16, 8, 128), (32, 1, 64), (24, 3, 96), (1, 2, 256), (16, 8, 80)]
)
def test_records_are_those_of_the_kernels(slots: int, heads: int, channels: int) -> None:
    from tiercache.kernels.kv_formats import BlockFormat

    for dtype, name in (("fp8", "fp8_e4m3"), ("fp8", "fp8_e5m2"), ("int8", "int8"), ("int4", "int4")):
        assert record_bytes(dtype, slots, heads, channels) == BlockFormat(name, slots, heads, channels).record_bytes


def test_work_of_a_prompt() -> None:
    model = load_model("Llama-3.1-8B")
    assert model.prefill_flops(1) == 2 * model.active_parameters + 32 * 4 * 4096
    assert model.prefill_flops(1000) == 1000 * 2 * model.active_parameters + 32 * 4 * 4096 * 1000 * 1001 / 2
    narrow = load_model("Mistral-7B-v0.1")
    step = narrow.prefill_flops(20001) - narrow.prefill_flops(20000)
    assert step == 2 * narrow.active_parameters + 32 * 4 * 4096 * 4096


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
CONV = {"conv_L_cache": 3}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA_2 = {**MAMBA, "mamba_n_heads": 8}


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, [0, 0, 0, 0]),
        ({"sliding_window": 8}, [8, 8, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": False}, [0, 0, 0, 0]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, 0, 8, 0]),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [0, 0, 0, 8]),
    ],
)
def test_which_layers_have_a_window(more: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in read_config("small", {**SMALL, **more}).layers] == windows


@pytest.mark.parametrize(
    ("more", "states"),
    [
        (DELTA, "sss-"),
        ({**DELTA, "full_attention_interval": 2}, "s-s-"),
        ({**DELTA, "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}, "ss--"),
        ({**CONV, "layer_types": ["conv", "full_attention", "conv", "conv"]}, "s-ss"),
        ({**CONV, "full_attn_idxs": [1, 2]}, "s--s"),
        ({**MAMBA, "attn_layer_period": 3, "attn_layer_offset": 1}, "s-ss"),
        ({**MAMBA_2, "attn_layer_indices": [3]}, "sss-"),
        ({**MAMBA_2, "layer_types": ["mamba", "attention", "mamba", "mamba"]}, "s-ss"),
        ({**MAMBA_2, "layers_block_type": ["linear_attention", "attention"] * 2}, "s-s-"),
        ({**MAMBA, "layer_types": ["attention"] * 4}, "----"),
    ],
)
def test_which_layers_keep_a_state(more: dict[str, Any], states: str) -> None:
    layers = read_config("small", {**SMALL, **more}).layers
    assert "".join("-" if layer.state is None else "s" for layer in layers) == states
    assert all(layer.attention_flops_per_token_pair == 0 for layer in layers if layer.state is not None)


@pytest.mark.parametrize(
    ("more", "of_one", "of_two"),
    [
        (DELTA, 96 * 3 * 2 + 4 * 8 * 16 * 2, 48 * 3 * 2 + 2 * 8 * 16 * 2),
        ({**DELTA, "mamba_ssm_dtype": "float32"}, 96 * 3 * 2 + 4 * 8 * 16 * 4, 48 * 3 * 2 + 2 * 8 * 16 * 4),
        ({**CONV, "full_attn_idxs": [3]}, 64 * 2 * 2, 32 * 2 * 2),
        ({**MAMBA, "attn_layer_indices": [3]}, 128 * (3 + 8) * 2, 64 * (3 + 8) * 2),
        # The single group of the convolution is on both GPUs.
        ({**MAMBA_2, "attn_layer_indices": [3]}, (144 * 3 + 1024) * 2, (80 * 3 + 512) * 2),
    ],
)
def test_bytes_of_a_state_are_those_of_vllm(more: dict[str, Any], of_one: int, of_two: int) -> None:
    model = read_config("small", {**SMALL, **more})
    assert (model.state_gpu_bytes(1), model.state_gpu_bytes(2)) == (3 * of_one, 3 * of_two)
    assert Form(model, "auto", 16, 1).token_bytes == 2 * 64 * 2  # of the layer that has attention


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["num_attention_heads", "config.json of a decoder"]),
        ({**SMALL, "hidden_size": "big"}, ["hidden_size", "'big'", "whole number"]),
        ({**SMALL, "torch_dtype": "int3"}, ["int3", "bfloat16"]),
        ({**SMALL, "layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
        ({**SMALL, "layer_types": ["linear_attention", "full_attention"] * 2}, ["linear_attention", "not known here"]),
        ({**SMALL, "quantization_config": {"quant_method": "awq"}}, ["awq", "--weights"]),
        ([1], ["not a config.json", "list"]),
        ({**SMALL, **DELTA, "linear_key_head_dim": 0}, ["linear_key_head_dim is 0"]),
        ({**SMALL, **DELTA, "mamba_ssm_dtype": "int3"}, ["mamba_ssm_dtype is int3", "bfloat16"]),
        ({**SMALL, "layer_types": ["mlp", "full_attention"] * 2}, ["of mlp", "not known here"]),
        ({**SMALL, "hybrid_override_pattern": "M*-M"}, ["hybrid_override_pattern", "not known here"]),
        ({**SMALL, "mamba_d_ssm": 128, "mamba_d_state": 16}, ["mamba_d_state", "not known here"]),
        ({**SMALL, **CONV, "layer_types": ["conv"] * 4}, ["none of its layers has attention"]),
        ({**SMALL, **CONV, "full_attn_idxs": [1.5]}, ["full_attn_idxs", "whole numbers"]),
    ],
)
def test_wrong_and_unknown_configurations_are_refused(tmp_path: Path, config: Any, words: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load_model(str(tmp_path)).weights_bytes()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


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
