"""Real model code that mixes windowed and full attention says what transformers says, however it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_watch import Watch, generated, greedy
from memory_cache import MemoryCache
from random_models import SaveModel, prompt_of

import tiercache
from tiercache.engine import Engine, EngineSettings, connect_to
from tiercache.engine.model import read_shape

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
WINDOW = 20
SMALL: dict[str, Any] = {"block_size": 8, "chunk_size": 32, "pool_blocks": 300, "max_num_seqs": 4}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {"num_hidden_layers": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **PLAIN_ROPE},
    ),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3}),
}
KINDS = "sliding full sliding sliding full"
GROUPS = {"gemma2": [2, 2], "gemma3": [1] * 6, "gpt-oss": [2, 2], "qwen2": [1] * 4}
PROMPTS = [prompt_of(100, seed=1), prompt_of(31, seed=2), prompt_of(100, seed=1)[:67], prompt_of(9, seed=4)]
COUNT = 28


def folder_of(name: str, save_model: SaveModel) -> Path:
    config_class, options = MODELS[name]
    return save_model(config_class, sliding_window=WINDOW, **options)


_SAID: dict[tuple[Path, int], list[list[int]]] = {}


def said(folder: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The tokens that transformers generates after the prompts."""
    name = folder, len(prompts)
    if name not in _SAID:
        _SAID[name] = [generated(folder, prompt, COUNT) for prompt in prompts]
    return _SAID[name]


@pytest.fixture(scope="module")
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch(arena="64MiB") as daemon:
        yield daemon


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name: str, save_model: SaveModel, daemon: tiercache.LaunchedDaemon) -> None:
    folder = folder_of(name, save_model)
    expected = said(folder)
    with Engine(folder, EngineSettings(**SMALL, enable_chunked_prefill=False, exact=False)) as engine:
        assert [len(group.layers) for group in engine._groups.groups] == GROUPS[name]
        whole = [Watch(engine).serve(prompt, COUNT) for prompt in PROMPTS]
    with Engine(folder, EngineSettings(**SMALL), connect_to(daemon.address, required=True)) as engine:
        watch = Watch(engine)
        alone = watch.serve(PROMPTS[0], COUNT)
        for window, held in zip(engine._groups.windows, watch.most_in_group, strict=True):
            assert held == 16 if not window.size else 4 <= held <= 9
        warm = Watch(engine).serve(PROMPTS[0], COUNT)
        engine.drain()
        engine.reset_pool()
        ids = [engine.add_request(prompt, greedy(COUNT)) for prompt in PROMPTS]
        outputs = Watch(engine).run()
        mixed = [outputs[one][0] for one in ids]
        needed = sum(len(window.needed(12)) for window in engine._groups.windows)
        assert engine.stats()["loaded"] >= needed
    assert [one.tokens for one in whole] == expected
    assert [one.tokens for one in mixed] == expected
    assert alone.tokens == warm.tokens == expected[0]
    assert (alone.pool_hit_tokens, warm.pool_hit_tokens, mixed[0].external_hit_tokens) == (0, 96, 96)
    # In another process's life: DRAM is all that there is.
    with Engine(folder, EngineSettings(**SMALL), connect_to(daemon.address, required=True)) as engine:
        loaded = Watch(engine).serve(PROMPTS[0], COUNT)
    assert (loaded.tokens, loaded.external_hit_tokens) == (expected[0], 96)


def tight(folder: Path, spare_blocks: int, **settings: Any) -> EngineSettings:
    """A pool that holds the longest request alone, and little more."""
    chosen = EngineSettings(**{**SMALL, **settings})
    most = read_shape(folder, chosen).groups(chosen).most_blocks(len(PROMPTS[0]) + COUNT, chosen)
    return dataclasses.replace(chosen, pool_blocks=most + spare_blocks)


@pytest.mark.parametrize("name", MODELS)
def test_preempted_requests_say_the_same(name: str, save_model: SaveModel, daemon: tiercache.LaunchedDaemon) -> None:
    folder = folder_of(name, save_model)
    expected, preemptions = said(folder), 0
    for spare_blocks in (8, 2, 3, 4, 6):  # which pool is too small depends on how soon stores let go of their blocks
        with Engine(folder, tight(folder, spare_blocks), connect_to(daemon.address, required=True)) as engine:
            ids = [engine.add_request(prompt, greedy(COUNT)) for prompt in PROMPTS]
            outputs = Watch(engine).run()
            preemptions += engine.stats()["preemptions"]
        assert [outputs[one][0].tokens for one in ids] == expected
        if preemptions:
            return
    raise AssertionError("no request was preempted in any pool: the test has checked nothing")


FORMS = [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"tier_dtype": "int8"}]


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_small_blocks_say_what_they_do_in_one_group(
    forms: dict[str, str], save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = folder_of("gemma2", save_model), [(PROMPTS[0], 1), (PROMPTS[2], 1), (PROMPTS[3], 2)]

    def serve(engine: Engine) -> list[list[int]]:
        ids = [engine.add_request(prompt, greedy(COUNT, n)) for prompt, n in asked]
        outputs = Watch(engine).run()
        return [one.tokens for request_id in ids for one in outputs[request_id]]

    with monkeypatch.context() as patch:
        patch.setattr("tiercache.engine.layer_groups.choose_block_layers", lambda *_: None)
        with Engine(folder, EngineSettings(**{**SMALL, **forms})) as engine:
            assert len(engine._groups.groups) == 1
            expected = serve(engine)
    cache = MemoryCache()
    with Engine(folder, EngineSettings(**{**SMALL, **forms}), cache.connect) as engine:
        assert serve(engine) == expected
        engine.drain()
        engine.reset_pool()
        [loaded] = engine.generate([PROMPTS[0]], greedy(COUNT))
        assert loaded.external_hit_tokens == 96
        # What was made small on its way to the cache is not quite what was computed.
        assert loaded.tokens == expected[0] or "tier_dtype" in forms
    if "kv_cache_dtype" in forms:
        with Engine(folder, tight(folder, 6, **forms), cache.connect) as engine:
            assert serve(engine) == expected
            assert engine.stats()["preemptions"] > 0
    assert not cache.leases


def test_places_without_a_layer_are_not_stored(save_model: SaveModel) -> None:
    options = {"num_hidden_layers": 5, "layer_types": [f"{kind}_attention" for kind in KINDS.split()]}
    folder = save_model("Qwen2Config", sliding_window=WINDOW, use_sliding_window=True, **options)
    cache = MemoryCache()
    with Engine(folder, EngineSettings(**SMALL), cache.connect) as engine:
        assert [group.layers for group in engine._groups.groups] == [(1, 4), (0, 2), (3,)]
        assert [spec.layers for spec in engine.namespaces] == [2, 2, 1]
        block_bytes = engine.pool.layout.block_bytes
        assert [spec.block_bytes for spec in engine.namespaces] == [block_bytes, block_bytes, block_bytes // 2]
        output = Watch(engine).serve(PROMPTS[0], COUNT)
        assert output.tokens == said(folder, PROMPTS[:1])[0]
        engine.pool.blocks.fill_(float("nan"))  # what is in unwritten places must not matter
        engine.reset_pool()
        loaded = Watch(engine).serve(PROMPTS[0], COUNT)
    assert loaded.external_hit_tokens == 96
    assert loaded.tokens == output.tokens
    stored = [{(len(one.blocks), *block.shape[:1]) for block in one.blocks.values()} for one in cache.groups]
    assert stored == [{(12, 2)}, {(12, 2)}, {(12, 1)}]
