"""When each sequence is served: order, budget, forks, preemption. Exact passes and block ids."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cache import MemoryCache
from plain_model import FakeClock, Watch, continuation, greedy, plain_engine, plain_prompt, said, sequence_of

pytestmark = pytest.mark.engine
MODELS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 7, "sinks": 2},
    {"windows": (0, 7), "max_context": 100},
    {"windows": (6, 6, 0, 6, 0), "max_context": 100},
]


# --- the order, and the budget of a step


def test_lower_priorities_go_first_and_equal_ones_as_they_came() -> None:
    with plain_engine(max_num_seqs=1) as engine:
        priorities = (0, 2, 1, 2, -1)
        ids = [
            engine.add_request(plain_prompt(5, seed), greedy(2), priority) for seed, priority in enumerate(priorities)
        ]
        assert list(Watch(engine).run()) == [ids[4], ids[0], ids[2], ids[1], ids[3]]


def test_an_urgent_prompt_overtakes_a_long_one_between_its_chunks() -> None:
    with plain_engine(pool_blocks=40) as engine:
        long = engine.add_request(plain_prompt(40), greedy(1), priority=1)
        engine.step()
        urgent = engine.add_request(plain_prompt(6, 1), greedy(1))
        assert [output.request_id for output in engine.step()] == [urgent]
        assert sequence_of(engine, long).computed == 8


@pytest.mark.parametrize(
    ("settings", "prompts", "passes"),
    [
        # Whole chunks and cut ones alone, since others may reuse them; the last pieces together.
        ({"max_num_batched_tokens": 24}, [6, 6, 6], [*[[(0, 4)]] * 3, [(4, 6)] * 3]),
        ({"max_num_batched_tokens": 8}, [8, 8, 8], [[(0, 4)], [(4, 6)], [(6, 8)]]),  # another 4 would be too many
        ({"enable_chunked_prefill": False}, [30], [*([(n, n + 4)] for n in range(0, 28, 4)), [(28, 30)]]),
    ],
    ids=["short prompts share a step", "a step has a budget", "without chunked prefill a prompt is one step"],
)
def test_what_a_step_computes_of_prompts(
    settings: dict[str, Any], prompts: list[int], passes: list[list[tuple[int, int]]]
) -> None:
    with plain_engine(pool_blocks=64, **settings) as engine:
        for seed, length in enumerate(prompts):
            engine.add_request(plain_prompt(length, seed), greedy(2))
        outputs = engine.step()
        assert engine._model.passes == passes
        assert len(outputs) == len(passes[-1]), "whose prompt has been computed, answers"


def test_decodes_and_prompts_share_a_pass_when_reuse_is_loose() -> None:
    with plain_engine(exact=False, pool_blocks=32) as engine:
        engine.add_request(plain_prompt(3), greedy(9))
        engine.step()
        engine.add_request(plain_prompt(8, 1), greedy(1))
        engine.step()
        assert engine._model.passes == [[(0, 3)], [(3, 4), (0, 4)]]


def test_a_prompt_waits_for_the_same_blocks_that_another_one_computes() -> None:
    other = [*plain_prompt(16), 40, 41, 42]
    with plain_engine(pool_blocks=32) as engine:
        first, second = engine.add_request(plain_prompt(17), greedy(2)), engine.add_request(other, greedy(2))
        outputs = Watch(engine).run()
    assert (outputs[first][0].pool_hit_tokens, outputs[second][0].pool_hit_tokens) == (0, 16)
    assert outputs[second][0].tokens == continuation(other, 2)


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


@pytest.mark.parametrize(("model", "asked"), [({}, [3, 4, 5]), ({"windows": (0, 7)}, [3, 4, 5])])
def test_prefixes_of_waiting_requests_are_brought_up_once(model: dict[str, Any], asked: list[int]) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, max_num_seqs=1, pool_blocks=64, **model) as engine:
        engine.add_request(plain_prompt(5), greedy(6))
        for seed in (1, 2, 3):
            engine.add_request(plain_prompt(5 + 2 * seed, seed), greedy(2))
        engine.step()
        assert cache.prefetches == asked[:2]  # two in a step; the engine does not ask for the one that is admitted
        Watch(engine).run()
        assert cache.prefetches == asked


# --- forks


def test_forks_share_the_prompt_and_copy_its_last_block_before_they_write() -> None:
    with plain_engine() as engine:
        request_id = engine.add_request(plain_prompt(7), greedy(3, n=3))
        while len(engine._sequences[request_id]) == 1:
            engine.step()
        assert engine._model.passes == [[(0, 4)], [(4, 6)], [(6, 7)]]  # one prefill for all
        tables = [list(sequence_of(engine, request_id, index).tables[0].ids) for index in range(3)]
        assert tables == [[0, 1, 2, 3]] * 3
        engine.step()
        tables = [sequence_of(engine, request_id, index).tables[0].ids for index in range(3)]
        assert tables == [[0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 2, 3]]  # the last one keeps the original
        outputs = Watch(engine).run()[request_id]
    assert [(one.index, one.tokens) for one in outputs] == [(n, continuation(plain_prompt(7), 3)) for n in range(3)]


# --- preemption


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_victim_is_swapped_by_what_each_group_needs(model: dict[str, Any], exact: bool) -> None:
    """The last in rank gives way; of what it had, nothing is computed again but a block that was not full."""
    cache = MemoryCache()
    pool = {0: {0: 50, 7: 10}, 2: {0: 62}, 5: {0: 62}}[len(model.get("windows", ()))][model.get("window", 0)]
    with plain_engine(cache.connect, exact=exact, pool_blocks=pool, **model) as engine:
        late = engine.add_request(plain_prompt(5, 1), greedy(75), priority=1)
        while len(sequence_of(engine, late).output) < 40:
            engine.step()
        early = engine.add_request(plain_prompt(5, 2), greedy(40, n=3))
        computed = len(engine._model.passes)
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] > 0
        again = [end - start for chunks in engine._model.passes[computed:] for start, end in chunks if start > 8]
        assert max(again) <= 2
        expected = [said(engine, plain_prompt(5, 1), 75)] + [said(engine, plain_prompt(5, 2), 40)] * 3
        assert [one.tokens for one in outputs[late] + outputs[early]] == expected


def test_a_load_under_way_gives_way_too() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=32) as engine:
        engine.generate([plain_prompt(13, 1)], greedy(1))
    with plain_engine(cache.connect, pool_blocks=12) as engine:
        running = engine.add_request(plain_prompt(5, 2), greedy(14))
        while not sequence_of(engine, running).output:
            engine.step()
        cache.hold_transfers = True
        loading = engine.add_request(plain_prompt(13, 1), greedy(2), priority=1)
        engine.step()
        assert [one.request_id for one in engine._scheduler.loading] == [loading]
        while not engine.stats()["preemptions"]:
            Watch(engine).step()
        assert sequence_of(engine, loading).tables[0].ids == []
        cache.behave()
        outputs = Watch(engine).run()
    assert outputs[running][0].tokens == continuation(plain_prompt(5, 2), 14)
    assert outputs[loading][0].tokens == continuation(plain_prompt(13, 1), 2)


def test_a_copy_that_never_ends_does_not_stop_decoding_sequences() -> None:
    cache = MemoryCache()
    clock = FakeClock()
    with plain_engine(cache.connect, clock=clock, pool_blocks=12, max_stores=1) as engine:
        cache.hold_transfers = True
        engine.generate([plain_prompt(5, 9)], greedy(1))  # its store holds two blocks
        ids = [engine.add_request(plain_prompt(5, seed), greedy(10)) for seed in (1, 2)]
        begun_s = clock.time_s
        while not engine.stats()["preemptions"]:
            engine.step()
        assert 0.25 <= clock.time_s - begun_s < 1, "the copy has had its time"
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert [outputs[one][0].tokens for one in ids] == [continuation(plain_prompt(5, seed), 10) for seed in (1, 2)]
        cache.behave()
