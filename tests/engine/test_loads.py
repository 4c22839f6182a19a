"""What is loaded, and what each answer of the cache makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cache import MemoryCache
from plain_model import (
    FakeClock,
    Watch,
    chain_of,
    continuation,
    greedy,
    plain_engine,
    plain_prompt,
    said,
    sequence_of,
)

from tiercache.errors import DaemonUnavailable

pytestmark = pytest.mark.engine
PROMPT = plain_prompt(41)  # 20 blocks of 2 that can be reused; chunks end at multiples of 4
MODELS: list[dict[str, Any]] = [
    {"window": 7},
    {"window": 7, "sinks": 2},
    {"window": 6, "sinks": 3},
    {"windows": (0, 7)},
    {"windows": (6, 6, 0, 6, 0)},  # two layers in each block, and one place in the last group without a layer
]


def filled(model: dict[str, Any] | None = None, prompt: list[int] = PROMPT) -> MemoryCache:
    """A cache that has a prompt."""
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=160, **model or {}) as engine:
        engine.generate([prompt], greedy(1))
    return cache


# --- which blocks


def test_only_what_the_pool_lacks_is_loaded() -> None:
    cache = filled()
    with plain_engine(cache.connect, pool_blocks=64) as engine:
        Watch(engine).serve([*PROMPT[:16], 40, 41, 42], 1)
        warm = Watch(engine).serve(PROMPT, 3)
    assert cache.load_calls == [(0, 8), (8, 12)]
    assert (warm.pool_hit_tokens, warm.external_hit_tokens) == (16, 24)
    assert warm.tokens == continuation(PROMPT, 3)


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_goes_on_from_its_windows(model: dict[str, Any]) -> None:
    cache = filled(model)
    with plain_engine(cache.connect, pool_blocks=160, **model) as engine:
        output = Watch(engine).serve(PROMPT, 20)
        assert engine.stats()["loaded"] == sum(len(window.needed(20)) for window in engine._groups.windows)
        assert engine._model.passes[0] == [(40, 41)]
        # A turn further: the answer is not in the cache (in exact mode), the prompt is, up to a whole chunk.
        more = [*PROMPT, *output.tokens, *plain_prompt(6, seed=5)]
        engine.reset_pool()
        turn = Watch(engine).serve(more, 3)
        assert (output.external_hit_tokens, turn.external_hit_tokens) == (40, 40)
        assert turn.tokens == said(engine, more, 3)
    assert not cache.leases


@pytest.mark.parametrize("windows", [(0, 7), (6, 6, 0, 6, 0)])
@pytest.mark.parametrize("group", [0, 1, -1])
@pytest.mark.parametrize("number", [0, 10, 18, 19])
@pytest.mark.parametrize("place", ["pool", "cache"])
def test_a_block_that_one_group_has_lost_makes_the_hit_shorter(
    windows: tuple[int, ...], group: int, number: int, place: str
) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=windows, pool_blocks=120) as engine:
        Watch(engine).serve(PROMPT, 1)
        key = chain_of(engine, PROMPT).key(number)
        if place == "pool":
            cache.blocks.clear()
            engine._blocks._forget(engine._blocks._cached[group][key])
        else:
            del cache.groups[group].blocks[key]
            engine.reset_pool()
        output = Watch(engine).serve(PROMPT, 4)
        # The last edge at which no needed block is missing.
        seen = 20 - len(engine._groups.windows[group].needed(20)) <= number
        assert output.pool_hit_tokens + output.external_hit_tokens == (number // 2 * 4 if seen else 40)
        assert output.tokens == said(engine, PROMPT, 4)
    assert not cache.leases


# --- what it costs


@pytest.mark.parametrize("windows", [(0, 7), (6, 6, 0, 6, 0), (7,)])
@pytest.mark.parametrize("whole", [True, False])
def test_where_what_is_below_is_slow_the_windows_of_the_edge_in_dram_are_loaded(
    windows: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled({"windows": windows})
    cache.below_from = 13  # blocks 0..12 are in DRAM, and the edge before that is at 12
    monkeypatch.setattr("tiercache.engine.cost.CostModel.load_s", lambda _, dram, nvme=0, shared=0: nvme + shared)
    monkeypatch.setattr("tiercache.engine.cost.CostModel.prefill_s", lambda _, start, end: (end - start) * 1e-6)
    with plain_engine(cache.connect, windows=windows, pool_blocks=160) as engine:
        if not whole:
            del cache.groups[-1].blocks[chain_of(engine, PROMPT).key(11)]
        output = Watch(engine).serve(PROMPT, 5)
        assert output.external_hit_tokens == (24 if whole else 0)
        assert engine.stats()["loaded"] == whole * sum(len(one.needed(12)) for one in engine._groups.windows)
        assert output.tokens == said(engine, PROMPT, 5)
    assert not cache.leases


@pytest.mark.parametrize("tier", ["dram", "below", "shared"])
def test_a_slow_tier_is_avoided_and_used_again_when_it_is_fast(tier: str) -> None:
    cache = filled()
    clock = cache.clock = FakeClock()
    if tier != "dram":
        cache.below_from = 8
    if tier == "shared":
        cache.shared_from = 12
    block_s, least = f"{tier}_block_s", 2 * {"dram": 0, "below": 8, "shared": 12}[tier]
    with plain_engine(cache.connect, clock=clock, token_s=0.01, pool_blocks=64, always_load=False) as engine:

        def hits(requests: int) -> list[int]:
            found = []
            for _ in range(requests):
                engine.reset_pool()
                found.append(Watch(engine).serve(PROMPT, 1).external_hit_tokens)
            return found

        Watch(engine).serve(plain_prompt(41, 7), 1)  # computing is measured
        setattr(cache, block_s, 10.0)
        slow = hits(40)
        assert set(slow) == {least, 40}
        assert slow[0] == 40
        assert slow.count(40) < 15
        assert engine.stats()["loads_avoided"] == slow.count(least)
        assert engine.stats()["loads_regretted"] == slow.count(40)
        setattr(cache, block_s, 1e-6)
        assert hits(80)[-10:] == [40] * 10
        assert engine.stats()["loads_regretted"] == slow.count(40)


# --- what goes wrong


@pytest.mark.parametrize(("good", "used"), [(0, 0), (1, 0), (2, 4), (5, 8), (19, 36), (20, 40)])
def test_a_short_load_is_used_up_to_an_edge_and_computed_beyond(good: int, used: int) -> None:
    cache = filled()
    cache.good_blocks = good
    with plain_engine(cache.connect, pool_blocks=64) as engine:
        warm = Watch(engine).serve(PROMPT, 3)
        assert engine.stats()["load_misses"] == 20 - good
        again = Watch(engine).serve(PROMPT, 3)
    assert (warm.external_hit_tokens, again.pool_hit_tokens) == (used, 40)
    assert warm.tokens == again.tokens == continuation(PROMPT, 3)


@pytest.mark.parametrize("good", [0, 1, 2, 3, 12, 19])
@pytest.mark.parametrize("windows", [(7,), (0, 7)])
def test_a_short_load_is_a_miss_where_a_window_has_a_hole(windows: tuple[int, ...], good: int) -> None:
    cache = filled({"windows": windows})
    cache.good_blocks = good  # of each group
    with plain_engine(cache.connect, windows=windows, pool_blocks=80) as engine:
        output = Watch(engine).serve(PROMPT, 4)
        needed = [len(window.needed(20)) for window in engine._groups.windows]
        assert engine.stats()["load_misses"] == sum(max(0, count - good) for count in needed)
        assert output.external_hit_tokens == (40 if good >= max(needed) else 0)  # no older edge was asked for
        assert output.tokens == said(engine, PROMPT, 4)


def test_a_load_that_spoils_more_than_it_brings_leaves_shared_blocks_alone() -> None:
    """The pool has blocks up to within a chunk, the rest fails: the shared ones are not computed over."""
    cache = filled()
    with plain_engine(cache.connect, pool_blocks=32) as engine:
        Watch(engine).serve(PROMPT, 1)
        lost = engine._blocks.allocate(32 - 9)  # its tail is pushed out of the pool
        assert lost is not None
        engine._blocks.release(lost)
        cache.good_blocks = 0
        warm = Watch(engine).serve(PROMPT, 3)
        assert (warm.pool_hit_tokens, warm.external_hit_tokens) == (16, 0)
        assert warm.tokens == continuation(PROMPT, 3)


def test_no_more_blocks_are_good_than_were_asked_for() -> None:
    cache = filled()
    cache.boast_blocks = 5
    with plain_engine(cache.connect, pool_blocks=64) as engine:
        assert Watch(engine).serve(PROMPT, 3).external_hit_tokens == 40
        assert (engine.stats()["loaded"], engine.stats()["load_misses"]) == (20, 0)


def test_a_waiting_load_does_not_block_others_and_is_shared() -> None:
    cache = filled()
    with plain_engine(cache.connect, pool_blocks=64) as engine:
        cache.hold_transfers = True
        loading = engine.add_request(PROMPT, greedy(2))
        sharing = engine.add_request(PROMPT[:30], greedy(2))
        computing = engine.add_request(plain_prompt(9, seed=5), greedy(3))
        ended = [output.request_id for _ in range(12) for output in Watch(engine).step()]
        assert ended == [computing]
        cache.behave()
        done = Watch(engine).run()
        assert (done[loading][0].external_hit_tokens, done[sharing][0].pool_hit_tokens) == (40, 28)
    assert cache.load_calls == [(0, 20)]


def test_a_load_that_is_late_is_computed_and_keeps_its_blocks_until_it_ends() -> None:
    cache, clock = filled(), FakeClock()
    with plain_engine(cache.connect, clock=clock, pool_blocks=64, load_timeout_s=50.0) as engine:
        cache.hold_transfers = True
        request_id = engine.add_request(PROMPT, greedy(3))
        engine.step()
        [late] = cache.pending
        lent = sequence_of(engine, request_id).tables[0].ids[:20]
        clock.time_s += 49.9
        engine.step()
        assert engine.stats()["loading"] == 1
        clock.time_s += 0.1
        outputs = Watch(engine).run()
        assert engine.stats()["loads_given_up_count"] == 1
        assert (outputs[request_id][0].external_hit_tokens, outputs[request_id][0].tokens) == (
            0,
            continuation(PROMPT, 3),
        )
        held = engine._offload.holds()
        assert all(held[block_id] >= 1 for block_id in lent)
        cache.behave()
        assert late.done()
        assert engine.drain()
        engine.check_integrity()
        assert engine.stats()["loaded"] == 0, "the late load has already counted as a miss"


def test_a_failing_cache_fails_no_request_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled()
    with plain_engine(cache.connect, pool_blocks=64) as engine:
        cache.refuse = True
        during = Watch(engine).serve(PROMPT, 3)
        assert engine.stats()["errors_count"] > 1
        cache.refuse = False
        engine.reset_pool()
        after = Watch(engine).serve(PROMPT, 3)
    assert (during.external_hit_tokens, after.external_hit_tokens) == (0, 40)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_cache_that_fails_between_two_groups_costs_the_load_and_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise DaemonUnavailable("it has gone")

    cache = filled({"windows": (0, 7)})
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(cache.groups[1], "match", gone)
            cache.hold_transfers = True
            engine.add_request(PROMPT, greedy(4))
            engine.step()
            engine.check_integrity()  # the first group's copies have begun, and hold their blocks
            assert len(cache.pending) == 1
            cache.behave()
        [[output]] = Watch(engine).run().values()
        assert (output.external_hit_tokens, output.tokens) == (0, said(engine, PROMPT, 4))
        assert engine.stats()["errors_count"] == 1
    assert not cache.leases
