"""Models that mix windowed and full attention: each group of layers holds what it needs; the tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
from engine_watch import Watch, greedy, plain_prompt
from memory_cache import MemoryCache
from plain_model import mixed_continuation, plain_engine

from tiercache.engine import Engine
from tiercache.errors import DaemonUnavailable

pytestmark = pytest.mark.engine
# Blocks of 2 tokens. One layer a group; two layers in each block, and one place in the last group without one.
MODELS = [(0, 7), (6, 6, 0, 6, 0)]


def said(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The tokens that the model generates without an engine."""
    return mixed_continuation(prompt, count, engine._model.sees)


def chain_of(engine: Engine, prompt: list[int]) -> Any:
    request_id = engine.add_request(prompt, greedy(1))
    chain = engine._sequences[request_id][0].chain
    engine.abort(request_id)
    return chain


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("exact", [True, False])
def test_windowed_groups_hold_a_window_and_full_ones_everything(windows: tuple[int, ...], exact: bool) -> None:
    prompt = plain_prompt(41)
    with plain_engine(windows=windows, exact=exact, max_num_seqs=1, pool_blocks=180) as engine:
        watch = Watch(engine)
        assert watch.serve(prompt, 200).tokens == said(engine, prompt, 200)
        full, *windowed = watch.most_in_group
        assert full == 120
        most = engine._groups.windows[1].most_blocks(engine.settings)
        assert most is not None
        assert all(3 <= held <= most == 7 for held in windowed)
        assert watch.most_in_use <= 120 + most * len(windowed)
        assert engine.stats()["idle_blocks"] == 180


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("chunked", [True, False])
def test_a_pool_serves_the_longest_sequence_that_it_says(windows: tuple[int, ...], chunked: bool) -> None:
    with plain_engine(
        windows=windows, max_num_seqs=1, pool_blocks=45, enable_chunked_prefill=chunked, write="back"
    ) as engine:
        limit = engine.max_model_len
        groups = len(engine._groups.groups)
        assert limit == 2 * (45 - (groups - 1) * 7 if chunked else 45 // groups)
        for length in (limit - 1, 3):
            watch = Watch(engine)
            assert watch.serve(plain_prompt(length), limit - length).tokens == said(
                engine, plain_prompt(length), limit - length
            )
            assert watch.most_in_use <= 45


@pytest.mark.parametrize("windows", MODELS)
def test_a_prefix_is_found_where_every_group_has_what_it_needs(windows: tuple[int, ...]) -> None:
    prompt, longer = plain_prompt(41), plain_prompt(41) + plain_prompt(8, seed=3)
    with plain_engine(windows=windows, pool_blocks=120) as engine:
        first, again, more = (Watch(engine).serve(one, 5) for one in (prompt, prompt, longer))
        assert [one.pool_hit_tokens for one in (first, again, more)] == [0, 40, 40]
        assert more.tokens == said(engine, longer, 5)


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("group", [0, 1, -1])
@pytest.mark.parametrize("number", [0, 10, 18, 19])
@pytest.mark.parametrize("place", ["pool", "cache"])
def test_a_block_that_one_group_has_lost_makes_the_hit_shorter(
    windows: tuple[int, ...], group: int, number: int, place: str
) -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, windows=windows, pool_blocks=120) as engine:
        Watch(engine).serve(prompt, 1)
        key = chain_of(engine, prompt).key(number)
        if place == "pool":
            cache.blocks.clear()
            engine._blocks._forget(engine._blocks._cached[group][key])
        else:
            del cache.groups[group].blocks[key]
            engine.reset_pool()
        output = Watch(engine).serve(prompt, 4)
        # The last edge at which no needed block is missing.
        seen = 20 - len(engine._groups.windows[group].needed(20)) <= number
        assert output.pool_hit_tokens + output.external_hit_tokens == (number // 2 * 4 if seen else 40)
        assert output.tokens == said(engine, prompt, 4)
    assert not cache.leases


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("write", ["through", "back"])
def test_only_windows_are_loaded_besides_what_is_full(windows: tuple[int, ...], write: str) -> None:
    prompt, cache = plain_prompt(81), MemoryCache()
    with plain_engine(cache.connect, windows=windows, pool_blocks=160, write=write) as engine:
        engine.generate([prompt], greedy(1))
        assert engine.drain()
        assert [len(group.blocks) for group in cache.groups] == [40] * len(engine._groups.groups)
    with plain_engine(cache.connect, windows=windows, pool_blocks=160) as engine:
        watch = Watch(engine)
        output = watch.serve(prompt, 20)
        assert engine.stats()["loaded"] == sum(len(window.needed(40)) for window in engine._groups.windows)
        assert output.external_hit_tokens == 80
        assert engine._model.passes[0] == [(80, 81)]
        assert output.tokens == said(engine, prompt, 20)
    assert not cache.leases


@pytest.mark.parametrize("group", [0, 1])
def test_what_one_group_still_has_in_the_pool_is_not_loaded(group: int) -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        engine.generate([prompt], greedy(1))
        for block_id in list(engine._blocks._cached[group].values()):
            engine._blocks._forget(block_id)
        output = Watch(engine).serve(prompt, 5)
        assert engine.stats()["loaded"] == (20, 3)[group]
        assert (output.pool_hit_tokens, output.external_hit_tokens) == (0, 40)
        assert output.tokens == said(engine, prompt, 5)


@pytest.mark.parametrize("good", [0, 1, 2, 3, 12, 19])
def test_a_short_load_is_a_miss_where_a_window_has_a_hole(good: int) -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        engine.generate([prompt], greedy(1))
    cache.good_blocks = good  # of each group
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        output = Watch(engine).serve(prompt, 4)
        assert engine.stats()["load_misses"] == 20 - good + max(0, 3 - good)
        assert output.external_hit_tokens == 0  # the window of an older edge was not asked for
        assert output.tokens == said(engine, prompt, 4)
    assert not cache.leases


def test_a_load_that_came_short_does_not_compute_into_what_others_hold() -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, windows=(0, 100), pool_blocks=80) as engine:  # nothing leaves this window
        engine.generate([prompt], greedy(1))
        for block_id in list(engine._blocks._cached[0].values()):
            engine._blocks._forget(block_id)
        cache.good_blocks = 12  # of the first group; the other one has all in the pool
        output = Watch(engine).serve(prompt, 4)
        assert (output.pool_hit_tokens, output.external_hit_tokens) == (0, 0)
        assert output.tokens == said(engine, prompt, 4)


@pytest.mark.parametrize("spare", [1, 2])
def test_admission_leaves_a_block_for_each_table_of_running_sequences(spare: int) -> None:
    with plain_engine(windows=(0, 100), pool_blocks=2 * 4 + 2 * 11 + spare, max_context=200) as engine:
        engine.add_request(plain_prompt(5), greedy(9))
        for _ in range(3):
            engine.step()
        assert engine.stats()["idle_blocks"] == 22 + spare
        engine.add_request(plain_prompt(21, 1), greedy(1))
        engine.step()
        assert engine.stats()["waiting"] == 2 - spare
        Watch(engine).run()


def test_a_cache_that_fails_between_two_groups_costs_the_load_and_no_block() -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        engine.generate([prompt], greedy(1))
        engine.reset_pool()
        second = cache.groups[1]
        engine._cache._caches[1] = Failing()  # type: ignore[union-attr,call-overload]
        cache.hold_transfers = True
        engine.add_request(prompt, greedy(4))
        engine.step()
        engine.check_integrity()  # the first group's copies have begun, and hold their blocks
        assert len(cache.pending) == 1
        cache.hold_transfers = False
        cache.finish_all()
        engine._cache._caches[1] = second  # type: ignore[union-attr]
        [outputs] = Watch(engine).run().values()
        assert outputs[0].tokens == said(engine, prompt, 4)
        assert outputs[0].external_hit_tokens == 0
        assert engine.stats()["errors_count"] == 1
    assert not cache.leases


class Failing:
    def match(self, _: bytes, **__: object) -> None:
        raise DaemonUnavailable("it has gone")


@pytest.mark.parametrize("windows", [*MODELS, (7,)])
@pytest.mark.parametrize("whole", [True, False])
def test_where_what_is_below_is_slow_the_windows_of_the_edge_in_dram_are_loaded(
    windows: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, cache = plain_prompt(81), MemoryCache()
    with plain_engine(cache.connect, windows=windows, pool_blocks=160) as engine:
        engine.generate([prompt], greedy(1))
        chain = chain_of(engine, prompt)
    cache.below_from = 25  # blocks 0..24 are in DRAM, and the edge before that is at 24
    if not whole:
        del cache.groups[-1].blocks[chain.key(23)]
    monkeypatch.setattr("tiercache.engine.cost.CostModel.load_s", lambda _, dram, nvme=0, shared=0: nvme + shared)
    monkeypatch.setattr("tiercache.engine.cost.CostModel.prefill_s", lambda _, start, end: (end - start) * 1e-6)
    with plain_engine(cache.connect, windows=windows, pool_blocks=160) as engine:
        output = Watch(engine).serve(prompt, 5)
        assert output.external_hit_tokens == (48 if whole else 0)
        assert engine.stats()["loaded"] == whole * sum(len(one.needed(24)) for one in engine._groups.windows)
        assert output.tokens == said(engine, prompt, 5)
    assert not cache.leases


@pytest.mark.parametrize("windows", MODELS)
def test_what_waits_has_its_windows_brought_up(windows: tuple[int, ...]) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=windows, pool_blocks=160, max_num_seqs=1) as engine:
        for seed in range(2):
            engine.add_request(plain_prompt(30, seed), greedy(2))
        engine.step()
        assert cache.prefetches == [14]
        Watch(engine).run()


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("exact", [True, False])
def test_a_victim_is_swapped_by_what_each_group_needs(windows: tuple[int, ...], exact: bool) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=windows, exact=exact, pool_blocks=64, max_context=100) as engine:
        late = engine.add_request(plain_prompt(5, 1), greedy(75), priority=1)
        while len(engine._sequences[late][0].output) < 40:
            engine.step()
        early = engine.add_request(plain_prompt(5, 2), greedy(40, n=3))
        computed = len(engine._model.passes)
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] > 0
        again = [end - start for chunks in engine._model.passes[computed:] for start, end in chunks if start > 8]
        assert max(again) <= 2  # nothing is computed again but what was in a block that was not full
        expected = [said(engine, plain_prompt(5, 1), 75)] + [said(engine, plain_prompt(5, 2), 40)] * 3
    assert [one.tokens for one in outputs[late] + outputs[early]] == expected


@pytest.mark.parametrize("caching", [True, False])
def test_without_a_cache_a_victim_is_computed_again(caching: bool) -> None:
    with plain_engine(windows=(0, 4), pool_blocks=36, max_context=60, enable_prefix_caching=caching) as engine:
        prompts = [plain_prompt(7 + seed, seed) for seed in range(3)]
        ids = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert [outputs[one][0].tokens for one in ids] == [said(engine, prompt, 40) for prompt in prompts]
        assert engine.stats()["idle_blocks"] == 36


def test_blocks_that_no_request_can_use_again_are_kept_in_no_group() -> None:
    with plain_engine(windows=(0, 4), pool_blocks=36, enable_prefix_caching=False) as engine:
        engine.add_request(plain_prompt(13), greedy(3))
        engine.step()
        assert all(engine._blocks._cached)
        Watch(engine).run()
        assert not any(engine._blocks._cached)


@pytest.mark.parametrize("windows", MODELS)
def test_forks_share_and_leave_the_prompt_each_for_itself(windows: tuple[int, ...]) -> None:
    prompt = plain_prompt(9)
    with plain_engine(windows=windows, pool_blocks=120) as engine:
        request_id = engine.add_request(prompt, greedy(40, n=3))
        watch = Watch(engine)
        outputs = watch.run()[request_id]
        assert [one.tokens for one in outputs] == [said(engine, prompt, 40)] * 3
        full, windowed = 4 + 3 * 21, 3 * (engine._groups.windows[1].blocks + 2)
        assert watch.most_in_use <= full + windowed * (len(engine._groups.groups) - 1)
        assert engine.stats()["idle_blocks"] == 120


def test_a_request_that_is_aborted_at_any_step_leaves_nothing() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=60) as engine:
        for steps in range(0, 14, 2):
            request_id = engine.add_request(plain_prompt(21, steps), greedy(9, n=2))
            for _ in range(steps):
                engine.step()
            engine.abort(request_id)
            engine.check_integrity()
            assert engine.drain()
            assert engine.stats()["idle_blocks"] == 60
