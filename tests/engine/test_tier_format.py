"""Blocks that are smaller in the cache than in the pool, or in both: through the stage, and under pressure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cache import MemoryCache
from plain_model import Watch, greedy
from real_models import SaveModel, blocks_by_key, prompt_of, small_engine

from tiercache.engine import Engine, SamplingParams
from tiercache.engine.tier_format import StagedCache
from tiercache.errors import DaemonUnavailable

pytestmark = pytest.mark.engine
FEW: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 0}
PROMPT = prompt_of(150)  # 18 blocks of 8 that can be reused


@pytest.fixture
def small_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 8 blocks, so that transfers go in pieces."""
    monkeypatch.setattr("tiercache.engine.tier_format._STAGE_BYTES", 0)
    monkeypatch.setattr("tiercache.engine.tier_format._LEAST_STAGE_BLOCKS", 8)


def check_end(engine: Engine, cache: MemoryCache) -> None:
    """Nothing is left in the stage, and no lease."""
    cache.behave()
    assert engine.drain()
    engine.check_integrity()
    assert engine._cache is not None
    for staged in engine._cache._caches:
        assert isinstance(staged, StagedCache)
        staged.check_integrity()
        assert staged.room() == 8
    assert cache.leases == set()


@pytest.mark.parametrize(("name", "bound"), [("fp8", 0.04), ("int8", 0.01), ("int4", 0.12)])
@pytest.mark.usefixtures("small_stage")
def test_a_raw_pool_stores_small_blocks_and_loads_them(name: str, bound: float, llama: Path) -> None:
    cache = MemoryCache()
    with small_engine(llama, cache.connect, tier_dtype=name) as engine:
        Watch(engine).serve(PROMPT, 2)
        engine.drain()
        computed = blocks_by_key(engine)
        sizes = {block.numel() * block.itemsize for block in cache.blocks.values()}
        assert sizes == {engine.namespaces[0].block_bytes}
        assert engine.namespaces[0].block_bytes < engine.pool.layout.block_bytes / 2
        engine.reset_pool()
        assert Watch(engine).serve(PROMPT, 2).external_hit_tokens == 144
        assert engine.stats()["loaded"] == 18
        loaded = blocks_by_key(engine)
        for key in computed.keys() & loaded.keys():
            assert not torch.equal(loaded[key], computed[key])
            assert (loaded[key] - computed[key]).norm() < bound * computed[key].norm()
        check_end(engine, cache)


@pytest.mark.usefixtures("small_stage")
def test_a_load_that_comes_short_is_computed(llama: Path) -> None:
    cache = MemoryCache()
    with small_engine(llama, cache.connect, tier_dtype="int8") as engine:
        cold = Watch(engine).serve(PROMPT, 6)
        engine.reset_pool()
        cache.good_blocks = 5  # of each piece; the others are spoilt
        assert Watch(engine).serve(PROMPT, 6).external_hit_tokens == 32
        cache.refuse = True
        engine.reset_pool()
        without = Watch(engine).serve(PROMPT, 6)
        assert (without.external_hit_tokens, without.tokens) == (0, cold.tokens)
        check_end(engine, cache)


@pytest.mark.parametrize("refused", ["load_async", "match"])
@pytest.mark.usefixtures("small_stage")
def test_a_cache_that_fails_between_two_pieces_costs_the_rest(
    llama: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DaemonUnavailable("it has gone")

    cache = MemoryCache()
    with small_engine(llama, cache.connect, tier_dtype="int8") as engine:
        engine.generate([PROMPT], greedy(1))
        engine.reset_pool()
        cache.hold_transfers = True
        request_id = engine.add_request(PROMPT, greedy(1))
        engine.step()
        assert engine.stats()["loading"] == 1
        cache.hold_transfers = False
        with monkeypatch.context() as patch:
            patch.setattr(cache, refused, refuse)
            cache.finish_all()
            [output] = Watch(engine).run()[request_id]
        assert 0 < output.external_hit_tokens < 144
        check_end(engine, cache)


@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.usefixtures("small_stage")
def test_a_slow_match_between_two_pieces_holds_up_no_step(llama: Path, aborted: bool) -> None:
    cache = MemoryCache()
    with small_engine(llama, cache.connect, tier_dtype="int8") as engine:
        engine.generate([PROMPT], greedy(1))
        engine.reset_pool()
        cache.hold_transfers = True
        request_id = engine.add_request(PROMPT, greedy(1))
        engine.step()
        cache.hold_transfers, cache.hold_lookups = False, True
        cache.finish_all()
        for _ in range(3):
            engine.step()
        assert (engine.stats()["loading"], len(cache.lookups), len(cache.leases)) == (1, 1, 1)
        if aborted:
            engine.abort(request_id)
        cache.behave()
        outputs = Watch(engine).run()
        assert [output.external_hit_tokens for [output] in outputs.values()] == ([] if aborted else [144])
        check_end(engine, cache)


# --- small blocks in the pool too


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("int4", marks=pytest.mark.stress)])
@pytest.mark.parametrize("config", ["LlamaConfig", pytest.param("Gemma2Config", marks=pytest.mark.stress)])
@pytest.mark.parametrize("write", ["through", "back"])
def test_what_a_tight_pool_forgets_and_finds_again_changes_no_token(
    kv_cache_dtype: str, config: str, write: str, save_model: SaveModel
) -> None:
    """Forks, shared beginnings that end within a block, preemptions, and loads that come short in turns."""
    options = {"sliding_window": 20, "num_hidden_layers": 4, "query_pre_attn_scalar": 16} if config[0] == "G" else {}
    folder, cache = save_model(config, **options), MemoryCache()
    asked = [
        (prompt_of(beginning, seed=1) + prompt_of(tail, seed=number), n, count)
        for number, (beginning, tail, n, count) in enumerate(
            ((40, 9, 3, 30), (24, 5, 1, 40), (8, 3, 2, 40), (40, 13, 1, 20))
        )
    ]
    params = [SamplingParams(n=n, max_tokens=count, temperature=1.0, seed=7, ignore_eos=True) for _, n, count in asked]
    with small_engine(folder, kv_cache_dtype=kv_cache_dtype, pool_blocks=200, **FEW) as roomy:
        expected = []
        for (prompt, _, _), own in zip(asked, params, strict=True):
            expected.append([one.tokens for one in roomy.generate([prompt], own)])
            roomy.reset_pool()
    tight = 13 if config[0] == "L" else 26
    with small_engine(
        folder, cache.connect, kv_cache_dtype=kv_cache_dtype, pool_blocks=tight, write=write, clean_blocks=2, **FEW
    ) as engine:
        for good in (1 << 30, 3):
            cache.good_blocks = good
            ids = [engine.add_request(prompt, own) for (prompt, _, _), own in zip(asked, params, strict=True)]
            outputs = Watch(engine).run()
            found = [sorted(outputs[one], key=lambda output: output.index) for one in ids]
            assert [[one.tokens for one in forks] for forks in found] == expected
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["load_misses"] > 0
