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

pytestmark = pytest.mark.engine
PROMPT = plain_prompt(41)  # 20 blocks of 2 that can be reused; chunks end at multiples of 4
MODELS: list[dict[str, Any]] = [
    {},
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


@pytest.mark.parametrize(
    ("model", "exact"),
    # With sinks and any edge the engine asks for the first few edges only.
    [(model, exact) for model in MODELS for exact in (True, False) if exact or "sinks" not in model],
)
def test_a_hit_reaches_as_far_as_what_is_there(model: dict[str, Any], exact: bool) -> None:
    """Whatever block a group has lost, in the pool or in the cache, and however short a load comes."""
    cache = filled(model)
    with plain_engine(cache.connect, exact=exact, pool_blocks=160, **model) as engine:
        windows, chain = engine._groups.windows, chain_of(engine, PROMPT)

        def edge_at(blocks: int) -> int:
            return blocks - blocks % 2 if exact else blocks

        def serve(cut: int, *, in_pool: bool) -> None:
            output = Watch(engine).serve(PROMPT, 3)
            assert (output.pool_hit_tokens, output.external_hit_tokens) == ((2 * cut, 0) if in_pool else (0, 2 * cut))
            assert output.tokens == said(engine, PROMPT, 3)

        cache.groups[0].blocks.clear()
        Watch(engine).serve(PROMPT, 3)
        assert engine.drain()
        kept = [dict(one.blocks) for one in cache.groups]
        for group, window in enumerate(windows):
            for number in (0, 1, 2, 10, 15, *range(16, 20)):
                # From there on, up to the end, a token that goes on would see the lost block.
                cut = edge_at(number) if number in window.needed(20) else 20
                for one, blocks in zip(cache.groups, kept, strict=True):
                    one.blocks = dict(blocks)
                del cache.groups[group].blocks[chain.key(number)]
                engine.reset_pool()
                before = engine.stats()["loaded"]
                serve(cut, in_pool=False)
                assert engine.stats()["loaded"] - before == sum(len(one.needed(cut)) for one in windows)
                assert engine.drain()
                if number in window.needed(20):
                    for one in cache.groups:
                        one.blocks.clear()
                    engine._blocks._forget(engine._blocks._cached[group][chain.key(number)])
                    serve(edge_at(number), in_pool=True)
        for one, blocks in zip(cache.groups, kept, strict=True):
            one.blocks = dict(blocks)
        needed = [len(window.needed(20)) for window in windows]
        for good in (0, 1, 2, 3, 5, 12, 19, 20):
            cache.good_blocks = good  # of each group
            engine.reset_pool()
            before = engine.stats()["load_misses"]
            # What another place needs nobody has asked for, unless that is what comes before in any case.
            short = edge_at(good) if needed == [20] else 0
            serve(20 if good >= max(needed) else short, in_pool=False)
            assert engine.stats()["load_misses"] - before == sum(max(0, count - good) for count in needed)
            assert engine.drain()
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
