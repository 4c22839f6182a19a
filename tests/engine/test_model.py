"""Real model code: the engine says what transformers says, however it is computed, or the model is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cache import MemoryCache
from plain_model import Watch, greedy
from real_models import SaveModel, blocks_by_key, generated, prompt_of, record_logits, small_engine
from transformers import AutoConfig, AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings, describe_model, engine
from tiercache.engine.model import HostedModel, can_pack, pack_linears
from tiercache.errors import ConfigError, ModelRefused

pytestmark = pytest.mark.engine
SETTINGS = EngineSettings(block_size=8, chunk_size=32, pool_blocks=64)
PROMPT = prompt_of(100, seed=1)  # chunks end at 32, 64, 96, 100: 12 blocks of 8 that can be reused
PROMPTS = [PROMPT, prompt_of(31, seed=2), PROMPT[:67], prompt_of(9, seed=4)]
COUNT = 20
FEW: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 0}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SLIDING = {"sliding_window": 20, "query_pre_attn_scalar": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, **PLAIN_ROPE}

SERVED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    # name: class, options, layers of each group
    "llama": ("LlamaConfig", {}, [3]),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}, [3]),
    "gemma2-window-softcap": (
        "Gemma2Config",
        {**SLIDING, "num_hidden_layers": 4, "attn_logit_softcapping": 5.0},
        [2, 2],
    ),
    "gemma3-window": (
        "Gemma3TextConfig",
        {**SLIDING, "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
        [1] * 6,
    ),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}, [3]),
    "gpt2": ("GPT2Config", {"n_inner": 96, "num_key_value_heads": 4}, [3]),
    "gpt-oss-window-sinks": ("GptOssConfig", {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 20}, [2, 2]),
    "places-without-a-layer": (
        "Qwen2Config",
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
        [2, 2, 1],
    ),
}


OFTEN = {"llama", "gemma2-window-softcap", "places-without-a-layer"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.stress) for name in SERVED]
)
def test_greedy_text_is_that_of_generate(name: str, save_model: SaveModel) -> None:
    config_class, options, groups = SERVED[name]
    folder, cache = save_model(config_class, **options), MemoryCache()
    expected = [generated(folder, prompt, COUNT) for prompt in PROMPTS]
    with small_engine(folder, exact=False, enable_chunked_prefill=False, pool_blocks=300) as engine:
        assert [len(group.layers) for group in engine._groups.groups] == groups
        assert [Watch(engine).serve(prompt, COUNT).tokens for prompt in PROMPTS] == expected
    with small_engine(folder, cache.connect, pool_blocks=300) as engine:
        cold = Watch(engine).serve(PROMPT, COUNT)
        warm = Watch(engine).serve(PROMPT, COUNT)
        engine.reset_pool()
        engine.pool.blocks.fill_(float("nan"))  # what is in places that were not written must not matter
        ids = [engine.add_request(prompt, greedy(COUNT)) for prompt in PROMPTS]
        outputs = Watch(engine).run()
        together = [outputs[one][0] for one in ids]
        # A pool that holds the longest request alone, and little more.
        most = engine._groups.most_blocks(len(PROMPT) + COUNT, engine.settings)
    assert cold.tokens == warm.tokens == expected[0]
    assert [one.tokens for one in together] == expected
    assert (cold.pool_hit_tokens, warm.pool_hit_tokens, together[0].external_hit_tokens) == (0, 96, 96)
    with small_engine(folder, cache.connect, pool_blocks=most + 2, **FEW) as tight:
        ids = [tight.add_request(prompt, greedy(COUNT)) for prompt in [*PROMPTS[::-1], prompt_of(90, seed=9)]]
        outputs = Watch(tight).run()
        assert [outputs[one][0].tokens for one in ids[:4]] == expected[::-1]
    assert not cache.leases


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [("auto", "float32"), ("auto", "bfloat16"), ("fp8", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16")],
)
def test_warm_is_cold_bit_for_bit(kv_cache_dtype: str, dtype: str, llama: Path) -> None:
    """From the pool, and from the cache in another engine."""
    cache = MemoryCache()
    with small_engine(llama, cache.connect, dtype=dtype, kv_cache_dtype=kv_cache_dtype) as engine:
        logits = record_logits(engine)
        cold = Watch(engine).serve(PROMPT, 6)
        warm = Watch(engine).serve(PROMPT, 6)
        assert len(logits) == 4 - 1 + 6 + 6  # the last of the prompt's chunks gives the first token
    with small_engine(llama, cache.connect, dtype=dtype, kv_cache_dtype=kv_cache_dtype) as engine:
        loaded_logits = record_logits(engine)
        loaded = Watch(engine).serve(PROMPT, 6)
        assert engine.stats()["loaded"] == 12
    assert (warm.pool_hit_tokens, loaded.external_hit_tokens) == (96, 96)
    assert cold.tokens == warm.tokens == loaded.tokens
    assert torch.equal(torch.stack(logits[3:9]), torch.stack(logits[9:]))
    assert torch.equal(torch.stack(logits[3:9]), torch.stack(loaded_logits))


def test_equal_keys_have_equal_bytes_whatever_else_runs(llama: Path) -> None:
    shared = prompt_of(90)
    prompts = [shared, shared[:40], shared[:70] + prompt_of(30, seed=1), shared[:33], shared + prompt_of(50, seed=2)]
    alone: dict[bytes, torch.Tensor] = {}
    for prompt in prompts:
        with small_engine(llama) as engine:
            engine.generate([prompt], greedy(3))
            for key, block in blocks_by_key(engine).items():
                assert torch.equal(alone.setdefault(key, block), block)
    for order in (prompts, prompts[::-1]):
        with small_engine(llama) as engine:
            engine.generate(order, greedy(3))
            together = blocks_by_key(engine)
        assert together.keys() == alone.keys()
        assert all(torch.equal(block, alone[key]) for key, block in together.items())


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
        Engine(folder, SETTINGS)
    assert "\n" not in str(refusal.value)


def test_a_window_that_only_the_config_knows_is_refused(llama: Path, tmp_path: Path) -> None:
    # Longer than what is tried at load: only the comparison with the config can tell.
    folder = copy_with(llama, tmp_path, sliding_window=1024)
    with pytest.raises(ModelRefused, match="window of 1024 in layer 0 by its config and of 0 by its code"):
        Engine(folder, SETTINGS)


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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelRefused, match="t5 is an encoder-decoder"):
        describe_model(tmp_path)


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
        Engine(folder, SETTINGS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_overwritten_in_their_files_change_nothing_in_an_engine(
    dtype: str, llama: Path, tmp_path: Path
) -> None:
    """transformers maps them from the files: what an engine computes would be stored under the name of the others."""
    folder = copy_with(llama, tmp_path)
    AutoModelForCausalLM.from_pretrained(llama, dtype=dtype).save_pretrained(folder)
    others = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    others.save_pretrained(tmp_path / "others")
    params = greedy(12)
    prompts = [prompt_of(41, seed=number) for number in range(3)]
    with Engine(folder, SETTINGS) as engine:
        before = [output.tokens for output in engine.generate(prompts, params)]
    with Engine(folder, SETTINGS) as engine:
        with (folder / "model.safetensors").open("r+b") as file:  # in place, as some programs copy
            file.write((tmp_path / "others" / "model.safetensors").read_bytes())
        assert [output.tokens for output in engine.generate(prompts, params)] == before
    with Engine(folder, SETTINGS) as engine:
        assert [output.tokens for output in engine.generate(prompts, params)] != before


def test_a_model_is_described_by_its_content_and_by_what_changes_blocks(llama: Path, tmp_path: Path) -> None:
    small = {"block_size": 8, "chunk_size": 32}

    def described(**changes: Any) -> tuple[Any, bytes]:
        [space], root = describe_model(llama, EngineSettings(**{**small, **changes}))
        return space, root

    namespace, root = described()
    assert namespace.block_bytes == 3 * 2 * 8 * 2 * 16 * 4
    assert (namespace.layers, namespace.kv_heads, namespace.head_dim) == (3, 2, 16)
    moved = copy_with(llama, tmp_path)
    assert describe_model(moved, EngineSettings(**small)) != ([namespace], root)  # copy_with wrote another config.json
    shutil.copy(llama / "config.json", moved)
    assert describe_model(moved, EngineSettings(**small)) == ([namespace], root)
    window, sinks = {"attention_window": 20}, {"attention_window": 20, "attention_sinks": 9}
    changed = ({"chunk_size": 64}, {"exact": False}, {"salt": "tenant"}, window, {"attention_window": 28}, sinks)
    roots = [root, describe_model(llama, EngineSettings(**small), epoch=1)[1]]
    roots += [described(**changes)[1] for changes in changed]
    assert len(set(roots)) == 2 + len(changed)
    windowed = described(**window, attention_sinks=5)
    assert windowed == described(**window, attention_sinks=8), "sinks are whole blocks"
    assert (windowed[0].group, windowed[0].window_blocks) == ("window", 1 + 3)
    spaces = [described(kv_cache_dtype=name)[0] for name in ("auto", "fp8", "fp8_e5m2", "int8", "int4")]
    assert len({space.fingerprint() for space in spaces}) == 5
    assert [space.quantization for space in spaces] == ["none", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
    assert described(tier_dtype="int8")[0] == spaces[3]  # the same bytes, too


def copy_with(model_dir: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder with some of its config changed."""
    folder = target / "copy"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
