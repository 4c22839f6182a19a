"""Sequences free the blocks that have left their window: never more blocks than the window needs, the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_watch import Watch, generated, greedy, plain_prompt
from memory_cache import MemoryCache
from plain_model import continuation, plain_engine
from random_models import SaveModel, prompt_of

import tiercache
from tiercache.engine import Engine, EngineSettings, connect_to
from tiercache.engine.memory import fit_model_len
from tiercache.engine.window import Window
from tiercache.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
WINDOW = 24
SMALL: dict[str, Any] = {"block_size": 8, "chunk_size": 32, "pool_blocks": 16, "max_num_seqs": 4}


# --- what a window needs


def test_a_cut_needs_the_blocks_that_its_token_sees() -> None:
    window = Window(block_size=4, size=10)
    assert [window.needed(cut) for cut in (0, 1, 2, 3, 4, 8)] == [[], [0], [0, 1], [0, 1, 2], [1, 2, 3], [5, 6, 7]]
    assert window.blocks == 3
    assert max(len(window.needed(cut)) for cut in range(50)) == 3
    sinks = Window(block_size=4, size=10, sinks=4)
    assert [sinks.needed(cut) for cut in (3, 4, 5, 8)] == [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 5, 6, 7]]
    assert sinks.blocks == 4
    assert Window(block_size=4).needed(3) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17])
def test_no_block_leaves_before_its_last_token_is_out_of_sight(size: int) -> None:
    window = Window(block_size=8, size=size)
    for computed in range(1, 100):
        first_seen = max(0, computed - size + 1)
        assert window.first_block(computed) == first_seen // 8


def test_a_pool_that_holds_a_window_and_a_step_serves_any_length() -> None:
    settings = EngineSettings(**SMALL)
    most = Window(8, WINDOW).most_blocks(settings)

    def blocks_of(tokens: int) -> int:
        return Window(8, WINDOW).most_blocks_of(tokens, settings)

    assert most == 3 + 5 + 1  # 24 tokens, 32 of a chunk, 4 decoding sequences, and those that do not begin with a block
    assert fit_model_len(settings, 32_000, 1 << 20, most, blocks_of) == 32_000
    assert fit_model_len(settings, 32_000, 1 << 20, most - 1, blocks_of) == (most - 1) * 8
    whole = EngineSettings(**SMALL, enable_chunked_prefill=False)
    assert Window(8, WINDOW).most_blocks(whole) is None
    with pytest.raises(ConfigError, match=r"max_model_len is 500 and the KV pool holds 64 tokens.*pool_blocks to 9"):
        fit_model_len(EngineSettings(**SMALL, max_model_len=500), 500, 1 << 20, 8, blocks_of)


# --- with a model that can be checked in the head: blocks of 2 tokens, a window of 7

SEES = [(7, 0), (7, 2), (6, 3)]


@pytest.mark.parametrize(("window", "sinks"), SEES)
@pytest.mark.parametrize("exact", [True, False])
def test_a_long_generation_holds_a_window(window: int, sinks: int, exact: bool) -> None:
    prompt = plain_prompt(5)
    with plain_engine(window=window, sinks=sinks, exact=exact, max_num_seqs=1) as engine:
        watch = Watch(engine)
        output = watch.serve(prompt, 300)
        assert output.tokens == continuation(prompt, 300, window, engine._groups.windows[0].sinks)
        assert watch.most_in_use <= engine._groups.windows[0].blocks + 2
        assert engine.stats()["idle_blocks"] == 16


@pytest.mark.parametrize(("window", "sinks"), SEES)
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_prompt_larger_than_the_pool_is_computed(window: int, sinks: int, write: str) -> None:
    prompt, cache = plain_prompt(201), MemoryCache()
    with plain_engine(cache.connect, window=window, sinks=sinks, write=write, max_num_seqs=1) as engine:
        watch = Watch(engine)
        output = watch.serve(prompt, 9)
        assert output.tokens == continuation(prompt, 9, window, engine._groups.windows[0].sinks)
        assert watch.most_in_use <= engine._groups.windows[0].most_blocks(engine.settings) < 16


def test_a_prompt_that_may_not_be_cut_needs_room_for_all_of_it() -> None:
    with plain_engine(window=7, enable_chunked_prefill=False) as engine:
        assert engine.max_model_len == 32
        output = Watch(engine).serve(plain_prompt(25), 7)
        assert output.tokens == continuation(plain_prompt(25), 7, 7)


@pytest.mark.parametrize(("window", "sinks"), SEES)
def test_a_prefix_is_found_by_its_last_window(window: int, sinks: int) -> None:
    prompt, more = plain_prompt(41), plain_prompt(8, seed=3)
    with plain_engine(window=window, sinks=sinks) as engine:
        first = Watch(engine).serve(prompt, 1)
        lost = engine._blocks.allocate(3)  # the next request takes the oldest blocks, which are not needed
        assert lost is not None
        engine._blocks.release(lost)
        again = Watch(engine).serve(prompt, 1)
        assert (first.pool_hit_tokens, again.pool_hit_tokens) == (0, 40)
        longer = Watch(engine).serve(prompt + more, 5)
        assert longer.pool_hit_tokens == 40
        assert longer.tokens == continuation(prompt + more, 5, window, engine._groups.windows[0].sinks)


@pytest.mark.parametrize(("window", "sinks"), SEES)
def test_only_the_window_is_loaded(window: int, sinks: int) -> None:
    prompt, cache = plain_prompt(81), MemoryCache()
    with plain_engine(cache.connect, window=window, sinks=sinks) as engine:
        engine.generate([prompt], greedy(1))
    assert len(cache.blocks) == 40
    with plain_engine(cache.connect, window=window, sinks=sinks) as engine:
        watch = Watch(engine)
        output = watch.serve(prompt, 20)
        blocks = engine._groups.windows[0].blocks
        assert engine.stats()["loaded"] == len(engine._groups.windows[0].needed(40)) <= blocks
        assert output.external_hit_tokens == 80
        assert engine._model.passes[0] == [(80, 81)]
        assert output.tokens == continuation(prompt, 20, window, engine._groups.windows[0].sinks)
        # A turn further: the answer is not in the cache (in exact mode), the prompt is, up to a whole chunk.
        engine.reset_pool()
        more = prompt + output.tokens + plain_prompt(6, seed=5)
        turn = watch.serve(more, 3)
        assert turn.external_hit_tokens == 80
        assert turn.tokens == continuation(more, 3, window, engine._groups.windows[0].sinks)
    assert not cache.leases


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_window_with_a_hole_is_a_miss_and_an_older_one_is_found(number: int) -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, window=6, sinks=2) as engine:
        engine.generate([prompt], greedy(1))
        chain = chain_of(engine, prompt)
        lost = engine._groups.windows[0].needed(20)[number]
    del cache.blocks[chain.key(lost)]
    with plain_engine(cache.connect, window=6, sinks=2) as engine:
        output = Watch(engine).serve(prompt, 4)
    # Without its sink no cut is good; else the last edge before which nothing is missing.
    assert output.external_hit_tokens == (0 if lost == 0 else lost // 2 * 4)
    assert output.tokens == continuation(prompt, 4, 6, 2)
    assert not cache.leases


def chain_of(engine: Engine, prompt: list[int]) -> Any:
    request_id = engine.add_request(prompt, greedy(1))
    chain = engine._sequences[request_id][0].chain
    engine.abort(request_id)
    return chain


@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_a_short_load_is_a_miss_where_less_than_a_window_came(good: int) -> None:
    prompt, cache = plain_prompt(41), MemoryCache()
    with plain_engine(cache.connect, window=7) as engine:
        engine.generate([prompt], greedy(1))
    cache.good_blocks = good
    with plain_engine(cache.connect, window=7) as engine:
        output = Watch(engine).serve(prompt, 4)
        assert engine.stats()["load_misses"] == 3 - good
    assert output.external_hit_tokens == (40 if good == 3 else 0)
    assert output.tokens == continuation(prompt, 4, 7)


@pytest.mark.parametrize(("window", "sinks"), SEES)
@pytest.mark.parametrize("exact", [True, False])
def test_a_victim_is_swapped_by_its_window(window: int, sinks: int, exact: bool) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, window=window, sinks=sinks, exact=exact, pool_blocks=10) as engine:
        late = engine.add_request(plain_prompt(5, 1), greedy(90), priority=1)
        while len(engine._sequences[late][0].output) < 40:
            engine.step()
        early = engine.add_request(plain_prompt(5, 2), greedy(30, n=3))  # all of which hold a window in the end
        computed = len(engine._model.passes)
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] > 0
        again = [end - start for chunks in engine._model.passes[computed:] for start, end in chunks if start > 8]
        assert max(again) <= 2  # nothing is computed again but what was in a block that was not full
        expected = [continuation(plain_prompt(5, 1), 90, window, engine._groups.windows[0].sinks)]
        expected += [continuation(plain_prompt(5, 2), 30, window, engine._groups.windows[0].sinks)] * 3
    assert [one.tokens for one in outputs[late] + outputs[early]] == expected


@pytest.mark.parametrize(("window", "sinks"), SEES)
def test_forks_leave_the_prompt_behind_each_for_itself(window: int, sinks: int) -> None:
    prompt = plain_prompt(9)
    with plain_engine(window=window, sinks=sinks, pool_blocks=32) as engine:
        request_id = engine.add_request(prompt, greedy(40, n=3))
        watch = Watch(engine)
        outputs = watch.run()[request_id]
        expected = continuation(prompt, 40, window, engine._groups.windows[0].sinks)
        assert [one.tokens for one in outputs] == [expected] * 3
        assert watch.most_in_use <= 3 * (engine._groups.windows[0].blocks + 2)
        assert engine.stats()["idle_blocks"] == 32


# --- with real model code


@contextmanager
def mistral(save_model: SaveModel, connect: Any = None, **settings: Any) -> Iterator[Engine]:
    folder = save_model("MistralConfig", sliding_window=WINDOW)
    with Engine(folder, EngineSettings(**{**SMALL, **settings}), connect=connect) as engine:
        yield engine


LONG = prompt_of(150, seed=1)


@pytest.mark.parametrize("exact", [True, False])
def test_a_long_chat_with_mistral_is_that_of_generate_and_holds_a_window(exact: bool, save_model: SaveModel) -> None:
    expected = generated(save_model("MistralConfig", sliding_window=WINDOW), LONG, 120)
    cache = MemoryCache()
    with mistral(save_model, cache.connect, exact=exact) as engine:
        watch = Watch(engine)
        cold = watch.serve(LONG, 120)
        assert watch.most_in_use <= (WINDOW + 32 + 4) // 8 + 2  # of the 34 blocks that the chat has
        warm = watch.serve(LONG, 120)
        engine.reset_pool()
        loaded = watch.serve(LONG, 120)
        assert engine.stats()["loaded"] >= 3
    assert [one.pool_hit_tokens + one.external_hit_tokens for one in (cold, warm, loaded)] == [0, 144, 144]
    assert cold.tokens == warm.tokens == loaded.tokens == expected


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_real_sequences_are_swapped_by_their_windows(
    kv_cache_dtype: str, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, counts = [prompt_of(6 + number, seed=number) for number in range(4)], (90, 40, 40, 40)
    with monkeypatch.context() as patch:
        patch.setattr("tiercache.engine.scheduler.Scheduler.release_unseen", lambda *_: None)
        patch.setattr("tiercache.engine.window.Window.most_blocks", lambda *_: None)
        with mistral(save_model, kv_cache_dtype=kv_cache_dtype, pool_blocks=64) as keeping:
            expected = [
                keeping.generate([prompt], greedy(count))[0].tokens
                for prompt, count in zip(prompts, counts, strict=True)
            ]
    with (
        tiercache.launch(arena="64MiB") as daemon,
        mistral(
            save_model, connect_to(daemon.address, required=True), kv_cache_dtype=kv_cache_dtype, pool_blocks=10
        ) as engine,
    ):
        ids = [engine.add_request(prompts[0], greedy(90), priority=1)]
        while len(engine._sequences[ids[0]][0].output) < 40:
            engine.step()
        ids += [engine.add_request(prompt, greedy(40)) for prompt in prompts[1:]]
        outputs = Watch(engine).run()
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["loaded"] > 0
    assert [outputs[one][0].tokens for one in ids] == expected


def test_usage_shows_what_windows_save(save_model: SaveModel, llama: Path) -> None:
    usage = []
    for folder in (llama, save_model("MistralConfig", sliding_window=WINDOW)):
        with Engine(folder, EngineSettings(**{**SMALL, "pool_blocks": 40})) as engine:
            request_id = engine.add_request(prompt_of(200), greedy(30))
            while len(engine._sequences[request_id][0].output) < 20:
                engine.step()
            usage.append(engine.stats()["kv_cache_usage"])
    assert usage == pytest.approx([28 / 40, 4 / 40])
