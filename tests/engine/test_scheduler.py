"""When each sequence is served: order, budget, forks, preemption. A model that forgets nothing, exact block ids."""

from __future__ import annotations

import pytest
from memory_cache import MemoryCache
from plain_model import continuation, plain_engine

from tiercache.engine import Engine, RequestOutput, SamplingParams
from tiercache.engine.sequence import Sequence

pytestmark = pytest.mark.engine


def greedy(count: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, n=n, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed * 7 + position * (seed + 3)) % 40 for position in range(length)]


def sequence_of(engine: Engine, request_id: int, index: int = 0) -> Sequence:
    return next(one for one in engine._sequences[request_id] if one.index == index)


def run(engine: Engine, steps: int = 1000) -> dict[tuple[int, int], RequestOutput]:
    """Step to the end, the books checked after each, every token compared."""
    outputs = {}
    for _ in range(steps):
        if not engine.unfinished:
            break
        for step in engine.step():
            if step.output is not None:
                outputs[step.request_id, step.index] = step.output
        engine.check_integrity()
    return outputs


# --- the order, and the budget of a step


def test_lower_priorities_go_first_and_equal_ones_as_they_came() -> None:
    with plain_engine(max_num_seqs=1) as engine:
        priorities = (0, 2, 1, 2, -1)
        ids = [engine.add_request(prompt_of(5, seed), greedy(2), priority) for seed, priority in enumerate(priorities)]
        order = list(run(engine))
    assert [request_id for request_id, _ in order] == [ids[4], ids[0], ids[2], ids[1], ids[3]]


def test_an_urgent_prompt_overtakes_a_long_one_between_its_chunks() -> None:
    with plain_engine(pool_blocks=40) as engine:
        long = engine.add_request(prompt_of(40), greedy(1), priority=1)
        engine.step()
        urgent = engine.add_request(prompt_of(6, 1), greedy(1))
        assert [output.request_id for output in engine.step()] == [urgent]
        assert sequence_of(engine, long).computed == 8
        run(engine)


def test_every_decoding_sequence_gets_a_token_in_every_step_while_a_long_prompt_comes_in() -> None:
    with plain_engine(pool_blocks=64) as engine:
        talking = [engine.add_request(prompt_of(4, seed), greedy(20)) for seed in (1, 2)]
        while any(sequence_of(engine, one).prefilling for one in talking):
            engine.step()
        long = engine.add_request(prompt_of(40), greedy(1))
        engine.step()
        while long in engine._sequences and sequence_of(engine, long).prefilling:
            before = sequence_of(engine, long).computed
            assert {output.request_id for output in engine.step()} >= set(talking)
            if long in engine._sequences:
                assert sequence_of(engine, long).computed - before <= 4 + 2  # one chunk, and what else fits
        run(engine)


def test_short_prompts_share_a_step_and_their_ends_a_pass() -> None:
    with plain_engine(max_num_batched_tokens=24, pool_blocks=32) as engine:
        for seed in (1, 2, 3):
            engine.add_request(prompt_of(6, seed), greedy(2))
        assert len(engine.step()) == 3
        # Whole chunks and cut ones alone, since others may reuse them; the last pieces together.
        assert engine._model.passes == [[(0, 4)]] * 3 + [[(4, 6)] * 3]
        run(engine)


def test_a_prompt_is_computed_in_one_step_without_chunked_prefill() -> None:
    with plain_engine(enable_chunked_prefill=False, pool_blocks=32) as engine:
        long = engine.add_request(prompt_of(30), greedy(1))
        [output] = engine.step()
        assert output.request_id == long
        assert [chunk for [chunk] in engine._model.passes] == [(n, n + 4) for n in range(0, 28, 4)] + [(28, 30)]


def test_a_prompt_waits_for_the_same_blocks_that_another_one_computes() -> None:
    with plain_engine(pool_blocks=32) as engine:
        first = engine.add_request(prompt_of(17), greedy(2))
        second = engine.add_request([*prompt_of(16), 40, 41, 42], greedy(2))
        outputs = run(engine)
    assert outputs[second, 0].pool_hit_tokens == 16
    assert outputs[first, 0].pool_hit_tokens == 0
    assert outputs[second, 0].tokens == continuation([*prompt_of(16), 40, 41, 42], 2)


def test_system_prompt_examples_and_conversations_share_blocks_at_every_level() -> None:
    """A radix tree without a tree: keys are chained, so equal beginnings are equal blocks."""
    system, examples = prompt_of(8), prompt_of(8, 1)
    turns = [prompt_of(8, seed) for seed in (2, 3, 4)]
    prompts = {
        "other task": [*system, *turns[2], 1],
        "chat one": [*system, *examples, *turns[0], 1],
        "chat two": [*system, *examples, *turns[1], 1],
        "chat one goes on": [*system, *examples, *turns[0], *turns[1], 1],
    }
    with plain_engine(pool_blocks=64, max_num_seqs=4) as engine:
        ids = {name: engine.add_request(prompt, greedy(30)) for name, prompt in prompts.items()}
        while any(sequence_of(engine, one).prefilling or not sequence_of(engine, one).output for one in ids.values()):
            engine.step()
            engine.check_integrity()
        tables = {name: sequence_of(engine, request_id).tables[0].ids for name, request_id in ids.items()}
        root = tables["other task"][:4]
        assert all(table[:4] == root for table in tables.values())
        shot = tables["chat one"][4:8]
        assert tables["chat two"][4:8] == tables["chat one goes on"][4:8] == shot
        assert set(shot).isdisjoint(tables["other task"])
        assert tables["chat one goes on"][8:12] == tables["chat one"][8:12]
        assert set(tables["chat two"][8:]).isdisjoint(tables["chat one goes on"])
        outputs = run(engine)
    for name, prompt in prompts.items():
        assert outputs[ids[name], 0].tokens == continuation(prompt, 30)


# --- forks


def test_forks_share_the_prompt_and_copy_its_last_block_before_they_write() -> None:
    with plain_engine() as engine:
        request_id = engine.add_request(prompt_of(7), greedy(3, n=3))
        while len(engine._sequences[request_id]) == 1:
            engine.step()
        assert engine._model.passes == [[(0, 4)], [(4, 6)], [(6, 7)]]  # one prefill for all
        tables = [list(sequence_of(engine, request_id, index).tables[0].ids) for index in range(3)]
        assert tables == [[0, 1, 2, 3]] * 3
        engine.step()
        tables = [sequence_of(engine, request_id, index).tables[0].ids for index in range(3)]
        assert tables == [[0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 2, 3]]  # the last one keeps the original
        outputs = run(engine)
        assert engine.stats()["idle_blocks"] == 16
    assert [outputs[request_id, index].tokens for index in range(3)] == [continuation(prompt_of(7), 3)] * 3
    assert [outputs[request_id, index].index for index in range(3)] == [0, 1, 2]


def test_forks_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    with plain_engine() as engine:
        engine.add_request(prompt_of(6), greedy(4, n=2))
        plans = []
        schedule = engine._scheduler.schedule
        engine._scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]  # type: ignore[method-assign]
        run(engine)
        assert [plan.copies for plan in plans] == [[]] * len(plans)


def test_forks_with_a_seed_differ_and_repeat(llama: object) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, ignore_eos=True)
    with Engine(llama, _tiny()) as engine:  # type: ignore[arg-type]
        first = engine.generate([prompt_of(21)], params)
        again = engine.generate([prompt_of(21)], params)
        alone = engine.generate([prompt_of(21)], SamplingParams(max_tokens=6, temperature=1.0, seed=6, ignore_eos=True))
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert len({tuple(one.tokens) for one in first}) == 3
    assert first[1].tokens == alone[0].tokens  # the second of seed 5 is the first of seed 6


def _tiny() -> object:
    from tiercache.engine import EngineSettings

    return EngineSettings(block_size=8, chunk_size=32, pool_blocks=64)


def test_a_request_takes_the_seats_of_all_its_forks() -> None:
    with plain_engine(max_num_seqs=3) as engine:
        forked = engine.add_request(prompt_of(5), greedy(4, n=2))
        pair = engine.add_request(prompt_of(5, 1), greedy(4, n=2))
        engine.step()
        assert sequence_of(engine, pair).tables[0].ids == []
        assert len(run(engine)) == 4
        assert forked not in engine._sequences


def test_aborting_a_forked_request_ends_all_its_sequences() -> None:
    with plain_engine() as engine:
        request_id = engine.add_request(prompt_of(5), greedy(9, n=3))
        while len(engine._sequences[request_id]) == 1:
            engine.step()
        engine.step()
        outputs = engine.abort(request_id)
        assert [(one.index, one.finish_reason, len(one.tokens)) for one in outputs] == [
            (index, "abort", 2) for index in range(3)
        ]
        assert not engine.unfinished
        engine.check_integrity()
        assert engine.stats()["idle_blocks"] == 16


# --- preemption


def test_the_last_in_rank_gives_way_and_is_loaded_again() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=12, chunk_size=2) as engine:
        late = engine.add_request(prompt_of(5, 1), greedy(12), priority=1)
        engine.step()
        early = [engine.add_request(prompt_of(5, seed), greedy(8)) for seed in (2, 3)]
        while not engine.stats()["preemptions"]:
            engine.step()
            engine.check_integrity()
        waiting = sequence_of(engine, late)
        assert [one.request_id for one in engine._scheduler.waiting] == [late]
        kept = len(waiting.output)
        assert kept > 1
        assert len(cache.blocks) >= (5 + kept - 1) // 2  # what it had generated is there too
        computed = len(engine._model.passes)
        outputs = run(engine)
        lost = [(start, end) for chunks in engine._model.passes[computed:] for start, end in chunks if end - start > 2]
        assert lost == []  # nothing is computed again but what was in a partial block
        assert engine.stats()["loaded"] > 0
    for request_id, seed, count in ((late, 1, 12), (early[0], 2, 8), (early[1], 3, 8)):
        assert outputs[request_id, 0].tokens == continuation(prompt_of(5, seed), count)


def test_a_victim_is_computed_again_where_that_is_faster() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=12, chunk_size=2, always_load=False) as engine:
        for _ in range(8):
            engine._cost.note_prefill(512, 8.0, 1e-6)  # computing takes next to nothing
        late = engine.add_request(prompt_of(5, 1), greedy(12), priority=1)
        engine.step()
        for seed in (2, 3):
            engine.add_request(prompt_of(5, seed), greedy(8))
        outputs = run(engine)
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] == 0
        assert engine.stats()["loads_avoided"] > 0
    assert outputs[late, 0].tokens == continuation(prompt_of(5, 1), 12)


def test_no_other_request_finds_what_a_victim_left() -> None:
    with plain_engine(pool_blocks=12, chunk_size=2) as engine:
        late = engine.add_request(prompt_of(5, 1), greedy(12), priority=1)
        engine.step()
        for seed in (2, 3):
            engine.add_request(prompt_of(5, seed), greedy(8))
        while not engine.stats()["preemptions"]:
            engine.step()
        chain = sequence_of(engine, late).chain
        assert engine._blocks.block_of(chain.key(2)) is not None
        engine.abort(late)
        assert all(engine._blocks.block_of(chain.key(number)) is None for number in range(2, len(chain)))
        run(engine)


def test_a_load_under_way_gives_way_too() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=32) as engine:
        engine.generate([prompt_of(13, 1)], greedy(1))
    with plain_engine(cache.connect, pool_blocks=12, chunk_size=4) as engine:
        running = engine.add_request(prompt_of(5, 2), greedy(14))
        while not sequence_of(engine, running).output:
            engine.step()
        cache.hold_transfers = True
        loading = engine.add_request(prompt_of(13, 1), greedy(2), priority=1)
        engine.step()
        assert [one.request_id for one in engine._scheduler.loading] == [loading]
        while not engine.stats()["preemptions"]:
            engine.step()
            engine.check_integrity()
        assert sequence_of(engine, loading).tables[0].ids == []
        cache.hold_transfers = False
        cache.finish_all()
        outputs = run(engine)
    assert outputs[running, 0].tokens == continuation(prompt_of(5, 2), 14)
    assert outputs[loading, 0].tokens == continuation(prompt_of(13, 1), 2)


def test_a_copy_that_never_ends_does_not_stop_decoding_sequences() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=12, chunk_size=4, max_stores=1) as engine:
        cache.hold_transfers = True
        engine.generate([prompt_of(5, 9)], greedy(1))  # its store holds two blocks
        ids = [engine.add_request(prompt_of(5, seed), greedy(10)) for seed in (1, 2)]
        outputs = run(engine, steps=1_000_000)
        assert engine.stats()["preemptions"] > 0
        assert [outputs[one, 0].tokens for one in ids] == [continuation(prompt_of(5, seed), 10) for seed in (1, 2)]
        cache.finish_all()


# --- the cache below


def test_prefixes_of_waiting_requests_are_brought_up_once() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, max_num_seqs=1) as engine:
        engine.add_request(prompt_of(5), greedy(6))
        for seed in (1, 2, 3):
            engine.add_request(prompt_of(5 + 2 * seed, seed), greedy(2))
        engine.step()
        assert cache.prefetches == [3, 4]  # two in a step; the engine does not ask for the one that is admitted
        for _ in range(4):
            engine.step()
        assert cache.prefetches == [3, 4, 5]
        run(engine)
        assert cache.prefetches == [3, 4, 5]


def test_without_prefix_caching_nothing_is_reused_or_stored_but_victims() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, enable_prefix_caching=False, pool_blocks=12, chunk_size=2) as engine:
        outputs = engine.generate([prompt_of(9)] * 2, greedy(2))
        assert [one.pool_hit_tokens for one in outputs] == [0, 0]
        assert cache.blocks == {}
        ids = [engine.add_request(prompt_of(5, 1), greedy(12), priority=number) for number in range(3)]
        outputs_of = run(engine)
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] > 0
        assert engine.stats()["external_prefix_cache_hits"] == 0
    assert [outputs_of[one, 0].tokens for one in ids] == [continuation(prompt_of(5, 1), 12)] * 3


def test_a_slow_tier_is_avoided_and_used_again_when_it_is_fast() -> None:
    cache = MemoryCache()
    prompt = prompt_of(29)

    def hits(engine: Engine, requests: int) -> list[int]:
        found = []
        for _ in range(requests):
            engine.reset_pool()
            [output] = engine.generate([prompt], greedy(1))
            assert output.tokens == continuation(prompt, 1)
            found.append(output.external_hit_tokens)
        return found

    with plain_engine(cache.connect, pool_blocks=32, always_load=False) as engine:
        for _ in range(10):
            engine._cost.note_prefill(512, 16.0, 512 * 0.01)  # as if computing took 10 ms a token
        engine._cost.note_prefill = lambda *_: None  # type: ignore[method-assign]
        engine.generate([prompt], greedy(1))
        cache.dram_block_s = 1.0
        slow = hits(engine, 60)
        assert slow[0] == 28
        assert slow.count(28) < 20
        stats = engine.stats()
        assert stats["loads_avoided"] == slow.count(0)
        assert stats["loads_regretted"] == slow.count(28)
        cache.dram_block_s = 1e-6
        fast = hits(engine, 60)
        assert fast[-20:] == [28] * 20
        assert engine.stats()["loads_regretted"] == stats["loads_regretted"]


@pytest.mark.parametrize("tier", ["below", "shared"])
def test_only_what_nearer_tiers_have_is_loaded_from_before_a_slow_one(tier: str) -> None:
    cache = MemoryCache()
    prompt = prompt_of(29)
    with plain_engine(cache.connect, pool_blocks=32, always_load=False) as engine:
        for _ in range(10):
            engine._cost.note_prefill(512, 16.0, 512 * 0.01)
        engine._cost.note_prefill = lambda *_: None  # type: ignore[method-assign]
        engine.generate([prompt], greedy(1))
        cache.below_from = 4
        setattr(cache, f"{tier}_from", 8)
        setattr(cache, f"{tier}_block_s", 1.0)
        found = []
        for _ in range(30):
            engine.reset_pool()
            [output] = engine.generate([prompt], greedy(1))
            found.append(output.external_hit_tokens)
        assert set(found) == {16, 28}
        assert found[0] == 28
        assert found.count(16) > 15
        assert cache.load_calls[-1] in {(0, 8), (0, 14)}


def test_stats_tell_what_goes_on() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, max_num_seqs=2) as engine:
        engine.generate([prompt_of(9)], greedy(3))
        engine.reset_pool()
        engine.generate([prompt_of(9)], greedy(3))
        engine.generate([prompt_of(9)], greedy(3))
        cache.hold_transfers = True
        engine.reset_pool()
        for seed in (0, 1, 2):
            engine.add_request(prompt_of(9, seed), greedy(3))
        engine.step()
        stats = engine.stats()
        assert (stats["running"], stats["waiting"], stats["loading"]) == (1, 1, 1)
        assert stats["kv_cache_usage"] == 10 / 16
        assert (stats["prompt_tokens"], stats["generation_tokens"]) == (27, 9)
        assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (36, 8)
        assert (stats["external_prefix_cache_queries"], stats["external_prefix_cache_hits"]) == (28, 8)
        cache.hold_transfers = False
        cache.finish_all()
        run(engine)
