"""What else the KV of a block depends on: adapters, salts, embeddings, drafts, state beside attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_engines import BLOCK, COMMON, Engine, flush, launch, prompt, stored_blocks, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
LONG = prompt(320, "adapted")


def save_adapter(folder: Path, seed: int) -> str:
    """A random LoRA adapter of rank 8 for the queries and values of every layer."""
    import torch
    from safetensors.torch import save_file

    noise = torch.Generator().manual_seed(seed)
    hidden, heads = COMMON["hidden_size"], COMMON["head_dim"]
    weights = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for name, count in (("q_proj", COMMON["num_attention_heads"]), ("v_proj", COMMON["num_key_value_heads"])):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, hidden, generator=noise) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(count * heads, 8, generator=noise) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def adapting(
    model: str, daemon: tiercache.LaunchedDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One engine for all requests that are more than tokens."""
    options = {"enable_lora": True, "max_lora_rank": 8, "enable_prompt_embeds": True}
    engine = Engine(model, tmp_path_factory.mktemp("adapting") / "log", daemon.address, **options)
    yield engine
    engine.close()


def test_an_adapter_is_what_is_in_its_files(
    adapting: Engine, plain: Engine, daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    flush(daemon)
    one, other = save_adapter(tmp_path / "one", 1), save_adapter(tmp_path / "other", 2)
    base = adapting.regenerate([LONG])[0]
    assert base == plain.generate([LONG])[0]
    wait_until(lambda: stored_blocks(daemon) == 10)
    first, cached = adapting.generate([LONG], lora=["name", 1, one])
    assert (first != base, cached) == (True, [0])
    wait_until(lambda: stored_blocks(daemon) == 20)
    second, cached = adapting.regenerate([LONG], lora=["name", 2, other])  # the same name
    assert (second not in (base, first), cached) == (True, [0])
    wait_until(lambda: stored_blocks(daemon) == 30)
    assert adapting.regenerate([LONG], lora=["name", 3, one]) == (first, [320])
    assert adapting.regenerate([LONG], lora=["name", 2, other]) == (second, [320])
    assert adapting.regenerate([LONG]) == (base, [320])


def test_salts_and_embeddings_keep_requests_apart(adapting: Engine, daemon: tiercache.LaunchedDaemon) -> None:
    flush(daemon)
    expected = adapting.regenerate([LONG], salt="one")[0]
    first, cached = adapting.regenerate([LONG], embeds=1)
    assert cached == [0]
    wait_until(lambda: stored_blocks(daemon) == 20)
    assert adapting.regenerate([LONG], salt="two") == (expected, [0])
    assert adapting.regenerate([LONG]) == (expected, [0])
    second, cached = adapting.regenerate([LONG], embeds=2)
    assert (second != first, cached) == (True, [0])
    assert adapting.regenerate([LONG], salt="one") == (expected, [320])
    assert adapting.regenerate([LONG], embeds=1) == (first, [320])


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_never_stored(start: Start, plain: Engine, model: str, method: str) -> None:
    """Those of `ngram` are nearly all wrong, and those of the model itself nearly all right."""
    given = {"prompt_lookup_max": 2, "prompt_lookup_min": 1} if method == "ngram" else {"model": model}
    config = {"method": method, "num_speculative_tokens": 3, **given}
    turn = prompt(40, "drafts") * 8
    with launch("64MiB", region="16MiB") as own:
        engine = start(own.address, speculative_config=config)
        for number in range(2):
            turns = [turn, turn[: 200 + number]]
            engine.forget()
            computed = engine.ask("generate", prompts=turns, max_tokens=90)
            answer, second = computed["tokens"]
            assert len(computed["drafted"]) > 50
            assert plain.generate(turns, 90)[0] == [answer, second]
            whole = (len(turn) + 89) // BLOCK
            wait_until(lambda: engine.regenerate([turn + answer], 1)[1][0] >= whole * BLOCK)  # noqa: B023
            turn = turn + answer + prompt(20, f"drafts {number}")
        assert engine.ask("check")["idle"]
        engine.close()
