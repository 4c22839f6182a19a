"""Real model code: the engine's greedy text is that of transformers, or the model is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import SaveModel, prompt_of
from transformers import AutoConfig, AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings, SamplingParams, describe_model, engine
from tiercache.engine.model import HostedModel
from tiercache.engine.packed_linear import can_pack, pack_linears
from tiercache.errors import ConfigError, ModelRefused

pytestmark = pytest.mark.engine
SMALL = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "gemma2-window-softcap": (
        "Gemma2Config",
        {"sliding_window": 20, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3-window": ("Gemma3TextConfig", {"sliding_window": 20, "query_pre_attn_scalar": 16}),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {"n_inner": 96, "num_key_value_heads": 4}),
    "gpt-oss-sinks": (
        "GptOssConfig",
        {
            "sliding_window": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_that_of_generate(name: str, exact: bool, save_model: SaveModel) -> None:
    config_class, options = SERVED[name]
    folder = save_model(config_class, **options)
    prompts = [prompt_of(75, seed=1), prompt_of(31, seed=2), prompt_of(75, seed=1)[:50]]
    # Room for the whole history of windowed layers too: each group of layers has blocks of its own.
    with Engine(folder, EngineSettings(**{**SMALL, "pool_blocks": 128}, exact=exact)) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        again = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    for prompt, output, warm in zip(prompts, outputs, again, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
        )
        assert output.tokens == expected[0, len(prompt) :].tolist()
        assert warm.tokens == output.tokens
        assert warm.pool_hit_tokens == (len(prompt) - 1) // 8 * 8


@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_layers_compute_the_same(bias: bool) -> None:
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("torch was built without oneDNN")
    torch.manual_seed(1)
    stack = torch.nn.Sequential(torch.nn.Linear(33, 50, bias=bias), torch.nn.SiLU(), torch.nn.Linear(50, 7, bias=bias))
    inputs = [torch.randn(1, rows, 33) for rows in (1, 3, 130)]
    with torch.inference_mode():
        expected = [stack(rows) for rows in inputs]
        pack_linears(stack)
        for rows, result in zip(inputs, expected, strict=True):
            torch.testing.assert_close(stack(rows), result, rtol=1e-5, atol=1e-5)
    assert stack[0].weight.shape == (50, 33)  # for code that reads it
    with torch.no_grad():
        stack[2].weight.zero_()
    assert stack(inputs[0]).any()  # the packed copy is what computes


def test_only_what_gains_is_packed() -> None:
    assert not can_pack(torch.bfloat16, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("cuda"))


HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent layers": ("Qwen3NextConfig", HYBRID, "linear_attention layers: only full and sliding"),
    "recurrent heads": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
        "FalconH1|falcon_h1",
    ),
    "alibi": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, "Mpt"),
    "values smaller than keys": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 3,
        },
        "keys of 16 and values of 8",
    ),
    "sees the future": ("BertConfig", {"num_key_value_heads": 4}, "not causal: only decoders"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")  # transformers advises kernels and decoder flags for some of these
def test_models_that_would_be_wrong_are_refused(name: str, save_model: SaveModel) -> None:
    config_class, options, text = REFUSED[name]
    folder = save_model(config_class, **options)
    with pytest.raises(ModelRefused, match=text) as refusal:
        Engine(folder, EngineSettings(**SMALL))
    assert "\n" not in str(refusal.value)


def test_chunked_attention_layers_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = copy_with(llama, tmp_path, layer_types=["chunked_attention"] * 3)
    with pytest.raises(ModelRefused, match="chunked_attention layers"):
        Engine(folder, EngineSettings(**SMALL))


def test_a_window_that_only_the_config_knows_is_refused(llama: Path, tmp_path: Path) -> None:
    # Longer than what is tried at load: only the comparison with the config can tell.
    folder = copy_with(llama, tmp_path, sliding_window=1024)
    with pytest.raises(ModelRefused, match="window of 1024 in layer 0 by its config and of 0 by its code"):
        Engine(folder, EngineSettings(**SMALL))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match="t5 is an encoder-decoder"):
        describe_model(tmp_path)


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="is not a folder"):
        Engine(tmp_path / "missing")
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        Engine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "made up"}))
    with pytest.raises(ModelRefused, match="safetensors"):
        Engine(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match="transformers cannot read"):
        Engine(tmp_path)


def test_weights_that_do_not_load_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = copy_with(llama, tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelRefused, match="transformers cannot host"):
        Engine(folder, EngineSettings(**SMALL))


def test_rope_that_grows_with_the_text_limits_the_context(llama: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    folder = copy_with(llama, tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match="max_model_len is 300"):
        describe_model(folder, EngineSettings(max_model_len=300))
    describe_model(folder, EngineSettings(max_model_len=256))


def test_files_that_change_between_their_hash_and_their_use_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_with(llama, tmp_path)
    [weights] = folder.glob("*.safetensors")

    def overwrite(*arguments: Any) -> HostedModel:
        os.utime(weights, ns=(1, 1))
        return HostedModel(*arguments)

    monkeypatch.setattr(engine, "HostedModel", overwrite)
    with pytest.raises(ModelRefused, match="changed while they were read: start again"):
        Engine(folder, EngineSettings(**SMALL))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_overwritten_in_their_files_change_nothing_in_an_engine(
    dtype: str, llama: Path, tmp_path: Path
) -> None:
    """transformers maps them from the files: what an engine computes would be stored under the name of the others."""
    folder = copy_with(llama, tmp_path)
    AutoModelForCausalLM.from_pretrained(llama, dtype=dtype).save_pretrained(folder)
    others = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    others.save_pretrained(tmp_path / "others")
    settings, params = EngineSettings(**SMALL), SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [prompt_of(41, seed=number) for number in range(3)]
    with Engine(folder, settings) as engine:
        before = [output.tokens for output in engine.generate(prompts, params)]
    with Engine(folder, settings) as engine:
        with (folder / "model.safetensors").open("r+b") as file:  # in place, as some programs copy
            file.write((tmp_path / "others" / "model.safetensors").read_bytes())
        assert [output.tokens for output in engine.generate(prompts, params)] == before
    with Engine(folder, settings) as engine:
        assert [output.tokens for output in engine.generate(prompts, params)] != before


def test_a_model_is_described_by_its_content(llama: Path, tmp_path: Path) -> None:
    settings = EngineSettings(block_size=8, chunk_size=32)
    [namespace], root = describe_model(llama, settings)
    assert namespace.block_bytes == 3 * 2 * 8 * 2 * 16 * 4
    assert (namespace.layers, namespace.kv_heads, namespace.head_dim) == (3, 2, 16)
    moved = copy_with(llama, tmp_path)
    assert describe_model(moved, settings) != ([namespace], root)  # copy_with wrote another config.json
    shutil.copy(llama / "config.json", moved)
    assert describe_model(moved, settings) == ([namespace], root)
    others = [
        describe_model(llama, EngineSettings(block_size=8, chunk_size=64))[1],
        describe_model(llama, EngineSettings(block_size=8, chunk_size=32, exact=False))[1],
        describe_model(llama, EngineSettings(block_size=8, chunk_size=32, salt="tenant"))[1],
        describe_model(llama, settings, epoch=1)[1],
    ]
    assert len({root, *others}) == 5


def copy_with(model_dir: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder with some of its config changed."""
    folder = target / "copy"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
