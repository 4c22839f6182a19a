"""The engine over a cache: what is stored, what is loaded, and what happens when that goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_watch import record_logits, run_checked
from memory_cache import MemoryCache
from random_models import prompt_of

from tiercache.engine import Engine, EngineSettings, SamplingParams
from tiercache.errors import DaemonUnavailable, DeadlineExceeded
from tiercache.protocol.messages import Priority

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = prompt_of(120)  # chunks end at 32, 64, 96, 112, 120: 14 blocks of 8 that can be reused


def engine_on(cache: MemoryCache, model_dir: Path, **settings: Any) -> Engine:
    small = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 72}
    return Engine(model_dir, EngineSettings(**{**small, **settings}), connect=cache.connect)


def test_write_through_stores_a_chunk_in_one_call_after_its_step(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as engine:
        engine.generate([PROMPT], GREEDY)
        assert cache.store_calls == [(0, 4), (4, 4), (8, 4), (12, 2)]
        assert engine.stats()["stored"] == 14
        engine.generate([PROMPT], GREEDY)
        assert len(cache.store_calls) == 4
    assert cache.closed
    assert [cache.namespace] == engine.namespaces


@pytest.mark.parametrize("tier", [{}, {"tier_dtype": "int8"}])
def test_the_priority_of_a_request_becomes_that_of_its_hints(llama: Path, tier: dict[str, Any]) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, **tier) as engine:
        for number, priority in enumerate((0, 3, -1)):
            engine.add_request(prompt_of(20, seed=number), GREEDY, priority)
            run_checked(engine)
            engine.drain()
            said = [hint and hint.priority for hint in cache.hints]
            assert set(said) == {(None, Priority.LOW, Priority.HIGH)[number]}
            cache.hints.clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_engine_loads_them_and_computes_the_same_bits(dtype: str, llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, dtype=dtype) as first:
        cold_logits = record_logits(first)
        [cold] = first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama, dtype=dtype) as second:
        warm_logits = record_logits(second)
        [warm] = second.generate([PROMPT], GREEDY)
        assert second.stats()["loaded"] == 14
        [again] = second.generate([PROMPT], GREEDY)
    assert (warm.pool_hit_tokens, warm.external_hit_tokens) == (0, 112)
    assert (again.pool_hit_tokens, again.external_hit_tokens) == (112, 0)
    assert warm.tokens == cold.tokens == again.tokens
    for ours, theirs in zip(warm_logits[:6], cold_logits[-6:], strict=True):
        assert torch.equal(ours, theirs)
    assert cache.load_calls == [(0, 14)]
    assert not cache.leases


def test_only_what_the_pool_lacks_is_loaded(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama) as second:
        second.generate([PROMPT[:64] + prompt_of(10, seed=4)], GREEDY)
        [warm] = second.generate([PROMPT], GREEDY)
    assert cache.load_calls == [(0, 8), (8, 6)]
    assert (warm.pool_hit_tokens, warm.external_hit_tokens) == (64, 48)
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_of_a_shared_store_are_named_to_a_daemon_that_publishes_events(wanted: bool, llama: Path) -> None:
    """A store names them; the daemon has them, so that nothing is copied. Without events there is nothing to name."""
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    cache.store_calls.clear()
    cache.wants_events, cache.shared_from = wanted, 8
    with engine_on(cache, llama) as second:
        [warm] = second.generate([PROMPT], GREEDY)
        second.drain()
        assert second.stats()["stored"] == 0
        assert second.stats()["present"] == (6 if wanted else 0)
    assert (warm.external_hit_tokens, warm.tokens) == (112, cold.tokens)
    assert cache.store_calls == ([(8, 6)] if wanted else [])


@pytest.mark.parametrize(("good", "used"), [(0, 0), (3, 0), (4, 32), (9, 64), (13, 96), (14, 112)])
def test_a_short_load_is_used_up_to_an_edge_and_computed_beyond(good: int, used: int, llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    cache.good_blocks = good
    with engine_on(cache, llama) as second:
        second.add_request(PROMPT, GREEDY)
        [warm] = run_checked(second).values()
        assert second.stats()["load_misses"] == 14 - good
        [again] = second.generate([PROMPT], GREEDY)
    assert warm.external_hit_tokens == used
    assert again.pool_hit_tokens == 112
    assert warm.tokens == cold.tokens == again.tokens


def test_a_load_that_spoils_more_than_it_brings_leaves_shared_blocks_alone(llama: Path) -> None:
    """The pool has blocks up to within a chunk, the rest fails: the shared ones are not computed over."""
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama, pool_blocks=20) as second:
        second.generate([PROMPT], GREEDY)
        second.generate([prompt_of(70, seed=3)], GREEDY)  # pushes the tail of the first out of the pool
        found = len(second._blocks.find(first_chain(second), range(14)))
        assert 8 < found < 12
        cache.good_blocks = 0
        second.add_request(PROMPT, GREEDY)
        [warm] = run_checked(second).values()
        assert warm.tokens == cold.tokens
        assert warm.external_hit_tokens == 0
        assert warm.pool_hit_tokens == 64


def first_chain(engine: Engine) -> Any:
    request_id = engine.add_request(PROMPT, GREEDY)
    chain = engine._sequences[request_id][0].chain
    engine.abort(request_id)
    return chain


def test_a_waiting_load_does_not_block_others_and_is_shared(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama) as second:
        cache.hold_transfers = True
        loading = second.add_request(PROMPT, GREEDY)
        sharing = second.add_request(PROMPT[:80], GREEDY)
        computing = second.add_request(prompt_of(20, seed=5), GREEDY)
        done: dict[int, Any] = {}
        for _ in range(12):
            done |= {one.request_id: one.output for one in second.step() if one.output is not None}
            second.check_integrity()
        assert list(done) == [computing]
        cache.hold_transfers = False
        cache.finish_all()
        done |= run_checked(second)
        assert done[loading].external_hit_tokens == 112
        assert done[sharing].pool_hit_tokens == 64
    assert done[loading].tokens == cold.tokens
    assert cache.load_calls == [(0, 14)]


def test_a_load_that_is_late_is_computed_and_keeps_its_blocks(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama, load_timeout_s=0.05) as second:
        cache.hold_transfers = True
        request_id = second.add_request(PROMPT, GREEDY)
        second.step()
        [late] = cache.pending
        lent = second._sequences[request_id][0].tables[0].ids[:14]
        outputs = run_checked(second)
        assert second.stats()["loads_given_up_count"] == 1
        assert outputs[request_id].external_hit_tokens == 0
        assert outputs[request_id].tokens == cold.tokens
        held = second._offload.holds()
        assert all(held[block_id] >= 1 for block_id in lent)  # until the copies have ended
        cache.hold_transfers = False
        cache.finish_all()
        assert late.done()
        assert second.drain()
        second.check_integrity()
        [warm] = second.generate([PROMPT], GREEDY)
        assert warm.tokens == cold.tokens


def test_transfers_that_never_end_stall_the_engine_with_a_word(llama: Path) -> None:
    cache = MemoryCache()
    cache.hold_transfers = True
    with engine_on(cache, llama, pool_blocks=20) as engine:
        engine.generate([PROMPT], GREEDY)
        with pytest.raises(DeadlineExceeded, match="transfers hold the pool"):
            engine.generate([prompt_of(100, seed=1)], GREEDY, stall_timeout_s=0.1)
        engine.check_integrity()
        cache.finish_all()


def test_aborting_a_load_keeps_its_blocks_until_the_copies_end(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama, pool_blocks=20) as second:
        cache.hold_transfers = True
        request_id = second.add_request(PROMPT, GREEDY)
        second.step()
        second.abort(request_id)
        second.check_integrity()
        assert second.stats()["idle_blocks"] == 20 - 14
        assert not second.unfinished
        waiting = second.add_request(prompt_of(60, seed=2), GREEDY)
        second.step()
        assert second._sequences[waiting][0].tables[0].ids == []  # no room while the copies may still run
        cache.hold_transfers = False
        cache.finish_all()
        outputs = run_checked(second)
        assert len(outputs[waiting].tokens) == 6


def test_a_store_holds_its_blocks_beyond_the_end_of_the_request(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, pool_blocks=20) as engine:
        cache.hold_transfers = True
        engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
        assert engine.stats()["idle_blocks"] == 20 - 14
        request_id = engine.add_request(prompt_of(60, seed=2), GREEDY)
        engine.step()
        assert engine._sequences[request_id][0].tables[0].ids == []
        cache.hold_transfers = False
        cache.finish_all()
        run_checked(engine)
    with engine_on(cache, llama) as other:  # what was stored is what was computed for the first prompt
        [warm] = other.generate([PROMPT], GREEDY)
        assert warm.external_hit_tokens == 112
        cache.blocks.clear()
        other.reset_pool()
        [cold] = other.generate([PROMPT], GREEDY)
    assert warm.tokens == cold.tokens


def test_write_back_stores_chains_when_their_place_is_needed(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, write="back", pool_blocks=40, clean_blocks=8) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert cache.store_calls == []
        engine.generate([prompt_of(120, seed=1)], GREEDY)
        assert cache.store_calls == [] or cache.store_calls[0] == (0, 14)
        for seed in (2, 3):
            engine.add_request(prompt_of(120, seed=seed), GREEDY)
            run_checked(engine)
        assert engine.stats()["not_stored"] == 0
        assert (0, 14) in cache.store_calls
        [warm] = engine.generate([PROMPT], GREEDY)
        assert warm.external_hit_tokens + warm.pool_hit_tokens == 112
        assert warm.external_hit_tokens > 0
        assert warm.tokens == cold.tokens


def test_write_back_drains_everything_on_close(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, write="back") as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert cache.blocks == {}
    assert len(cache.blocks) == 14
    with engine_on(cache, llama) as other:
        [warm] = other.generate([PROMPT], GREEDY)
    assert (warm.external_hit_tokens, warm.tokens) == (112, cold.tokens)


def test_write_back_over_a_slow_cache_waits_instead_of_losing(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, write="back", pool_blocks=16, clean_blocks=0) as engine:
        engine.generate([PROMPT], GREEDY)
        cache.hold_transfers = True
        request_id = engine.add_request(prompt_of(100, seed=1), GREEDY)
        for _ in range(3):
            engine.step()
            engine.check_integrity()
        assert engine._sequences[request_id][0].tables[0].ids == []
        assert cache.store_calls == [(0, 14)]
        cache.hold_transfers = False
        cache.finish_all()
        run_checked(engine)
    assert len([call for call in cache.store_calls if call == (0, 14)]) == 1


def test_a_failing_cache_fails_no_request(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as engine:
        [before] = engine.generate([PROMPT], GREEDY)
        engine.reset_pool()
        cache.refuse = True
        [during] = engine.generate([PROMPT], GREEDY)
        assert engine.stats()["errors_count"] > 0
        engine.check_integrity()
        cache.refuse = False
        engine.reset_pool()
        [after] = engine.generate([PROMPT], GREEDY)
    assert before.tokens == during.tokens == after.tokens
    assert (during.external_hit_tokens, after.external_hit_tokens) == (0, 112)


def test_a_cache_that_was_away_gets_the_blocks_when_it_is_back(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as engine:
        cache.available = False
        engine.generate([PROMPT], GREEDY)
        assert cache.store_calls == []
        cache.available = True
        engine.generate([PROMPT], GREEDY)  # a hit in the pool; what it holds was never stored
        assert len(cache.blocks) == 14


def test_a_cache_that_lost_its_blocks_is_offered_the_chain_again(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as engine:
        engine.generate([PROMPT], GREEDY)
        cache.blocks.clear()
        longer = PROMPT[:96] + prompt_of(60, seed=7)
        engine.add_request(longer, GREEDY)
        run_checked(engine)
        assert len(cache.blocks) == 19  # all of the longer chain, the shared part included


def test_a_full_cache_drops_and_the_engine_goes_on(llama: Path) -> None:
    cache = MemoryCache()
    cache.capacity = 6
    with engine_on(cache, llama) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.stats()["not_stored"] > 0
    with engine_on(cache, llama) as other:
        [warm] = other.generate([PROMPT], GREEDY)
    assert len(cache.blocks) == 6
    assert (warm.external_hit_tokens, warm.tokens) == (32, cold.tokens)


def test_stores_beyond_the_limit_go_along_with_a_later_one(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, max_stores=1) as engine:
        cache.hold_transfers = True
        request_id = engine.add_request(PROMPT, GREEDY)
        for _ in range(3):
            engine.step()
        assert cache.store_calls == [(0, 4)]
        cache.hold_transfers = False
        cache.finish_all()
        outputs = run_checked(engine)
        assert outputs[request_id].finish_reason == "length"
    assert len(cache.blocks) == 14
    assert cache.store_calls[1][0] == 4


def test_tenants_with_other_salts_find_nothing(llama: Path) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama, salt="one") as first:
        first.generate([PROMPT], GREEDY)
    with engine_on(cache, llama, salt="two") as second:
        [output] = second.generate([PROMPT], GREEDY)
    assert output.external_hit_tokens == 0


def test_any_order_of_prompts_gives_equal_bytes_under_equal_keys(llama: Path) -> None:
    shared = prompt_of(90)
    prompts = [shared, shared[:40], shared[:70] + prompt_of(30, seed=1), shared[:33], shared + prompt_of(50, seed=2)]
    caches = [MemoryCache(), MemoryCache()]
    for cache, order in zip(caches, (prompts, prompts[::-1]), strict=True):
        for group in (order[:2], order[2:]):
            with engine_on(cache, llama, pool_blocks=40) as engine:
                for prompt in group:
                    engine.add_request(prompt, GREEDY)
                run_checked(engine)
    assert caches[0].blocks.keys() == caches[1].blocks.keys()
    for key, block in caches[0].blocks.items():
        assert torch.equal(block, caches[1].blocks[key])


def test_a_load_that_is_refused_leaves_no_lease(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MemoryCache()
    with engine_on(cache, llama) as first:
        [cold] = first.generate([PROMPT], GREEDY)

    def refusing(*_: object, **__: object) -> None:
        raise DaemonUnavailable("no loads today")

    monkeypatch.setattr(cache, "load_async", refusing)
    with engine_on(cache, llama) as second:
        [again] = second.generate([PROMPT], GREEDY)
        second.check_integrity()
    assert (again.external_hit_tokens, again.tokens) == (0, cold.tokens)
    assert not cache.leases
