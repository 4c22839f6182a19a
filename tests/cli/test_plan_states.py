"""`tiercache plan` for models with recurrent layers: their states, weights, work and blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiercache.cli.main import main
from tiercache.errors import ConfigError
from tiercache.plan.model import load_model, read_config
from tiercache.plan.sizes import Form, usual_block_size

KIB = 1024
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
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("more", "states"),
    [
        (DELTA, "sss-"),
        ({**DELTA, "full_attention_interval": 2}, "s-s-"),
        ({**DELTA, "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}, "ss--"),
        ({"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"]}, "s-ss"),
        ({"conv_L_cache": 3, "full_attn_idxs": [1, 2]}, "s--s"),
        ({**MAMBA, "attn_layer_period": 3, "attn_layer_offset": 1}, "s-ss"),
        ({**MAMBA, "mamba_n_heads": 8, "attn_layer_indices": [3]}, "sss-"),
        ({**MAMBA, "mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba", "mamba"]}, "s-ss"),
        ({**MAMBA, "mamba_n_heads": 8, "layers_block_type": ["linear_attention", "attention"] * 2}, "s-s-"),
        ({**MAMBA, "layer_types": ["attention"] * 4}, "----"),
    ],
)
def test_which_layers_keep_a_state(more: dict[str, Any], states: str) -> None:
    layers = read_config("small", {**SMALL, **more}).layers
    assert "".join("-" if layer.state is None else "s" for layer in layers) == states
    assert all(layer.attention_flops_per_token_pair == 0 for layer in layers if layer.state is not None)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({**DELTA, "linear_key_head_dim": 0}, ["linear_key_head_dim is 0"]),
        ({**DELTA, "mamba_ssm_dtype": "int3"}, ["mamba_ssm_dtype is int3", "bfloat16"]),
        ({"layer_types": ["mlp", "full_attention"] * 2}, ["of mlp", "not known here"]),
        ({"hybrid_override_pattern": "M*-M"}, ["hybrid_override_pattern", "not known here"]),
        ({"mamba_d_ssm": 128, "mamba_d_state": 16}, ["mamba_d_state", "not known here"]),
        ({"conv_L_cache": 3, "layer_types": ["conv"] * 4}, ["none of its layers has attention"]),
        ({"conv_L_cache": 3, "full_attn_idxs": [1.5]}, ["full_attn_idxs", "whole numbers"]),
    ],
)
def test_other_recurrent_layers_and_wrong_fields_are_refused(more: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config("small", {**SMALL, **more})
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize(
    ("more", "of_one", "of_two"),
    [
        (DELTA, 96 * 3 * 2 + 4 * 8 * 16 * 2, 48 * 3 * 2 + 2 * 8 * 16 * 2),
        ({**DELTA, "mamba_ssm_dtype": "float32"}, 96 * 3 * 2 + 4 * 8 * 16 * 4, 48 * 3 * 2 + 2 * 8 * 16 * 4),
        ({"conv_L_cache": 3, "full_attn_idxs": [3]}, 64 * 2 * 2, 32 * 2 * 2),
        ({**MAMBA, "attn_layer_indices": [3]}, 128 * (3 + 8) * 2, 64 * (3 + 8) * 2),
        # The single group of the convolution is on both GPUs.
        ({**MAMBA, "mamba_n_heads": 8, "attn_layer_indices": [3]}, (144 * 3 + 1024) * 2, (80 * 3 + 512) * 2),
    ],
)
def test_bytes_of_a_state_are_those_of_vllm(more: dict[str, Any], of_one: int, of_two: int) -> None:
    model = read_config("small", {**SMALL, **more})
    assert (model.state_gpu_bytes(1), model.state_gpu_bytes(2)) == (3 * of_one, 3 * of_two)
    assert Form(model, "auto", 16, 1).token_bytes == 2 * 64 * 2  # of the layer that has attention


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_next", {"num_experts": 8}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {"num_experts": 8}),
        ("lfm2", {"full_attn_idxs": [1, 3]}),
        ("lfm2_moe", {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 2}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 0}),
        ("bamba", {"attn_layer_indices": [1]}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}),
    ],
)
def test_weights_are_those_of_transformers(family: str, more: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, num_hidden_layers=4, **more)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in built.parameters() if weight.ndim > 1)  # no norms, no biases
    assert read_config(family, config.to_dict()).parameters == matrices


def test_work_of_recurrent_layers_grows_with_the_tokens_only() -> None:
    model = read_config("small", {**SMALL, **DELTA})
    recurrent = 2 * model.active_parameters + 3 * 6 * 4 * 8 * 16
    assert model.prefill_flops(1000) == 1000 * recurrent + 4 * 64 * 1000 * 1001 / 2


@pytest.mark.parametrize(("dtype", "gpus", "tokens"), [("auto", 1, 544), ("auto", 2, 544), ("fp8", 1, 1072)])
def test_the_block_that_vllm_chooses(dtype: str, gpus: int, tokens: int) -> None:
    assert usual_block_size(load_model("Qwen3-Next-80B-A3B"), dtype, gpus) == tokens
    assert usual_block_size(load_model("Qwen3-8B"), dtype, gpus) == 16


def tree(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_with_states(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Qwen3-Next-80B-A3B", "--gpu", "B200", "--dram", "64GiB", "--shared", "1TiB", "--length", "5440"]
    found = tree(capsys, *arguments)
    state_bytes = 36 * (32 * 128 * 128 + 3 * 8192) * 2
    state = found["state"]
    assert (state["bytes"], state["gpu_bytes"], state["as_tokens"]) == (state_bytes, state_bytes, 1608)
    assert state_bytes <= state["tier_bytes"] < state_bytes + (1 << 21)
    assert (found["kv"]["block_size"], found["kv"]["token_bytes"]) == (544, 24 * KIB)
    one_bytes = 5440 * 24 * KIB + state_bytes
    [sequence], [load] = found["sequences"], found["loads"]
    assert sequence["bytes"] == load["bytes"] == one_bytes
    assert sequence["in_gpu"] == found["gpu"]["pool_bytes"] // one_bytes
    stored_bytes = 10 * found["kv"]["tier_block_bytes"] + state["tier_bytes"]
    assert (sequence["in_dram"], sequence["in_shared"]) == ((64 << 30) // stored_bytes, (1 << 40) // stored_bytes)
    assert tree(capsys, *arguments, "--block-size", "1088")["kv"]["block_size"] == 1088
    assert main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("36 layers keep a state", "37.7 MiB, as much as the KV of 1,608 tokens", "544 tokens: "):
        assert words in out
    assert tree(capsys, "Qwen3-8B")["state"] is None
