"""What is loaded, and what each answer of the cache makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cache import MemoryCache
from plain_model import FakeClock, Watch, chain_of, continuation, greedy, plain_engine, plain_prompt, said, sequence_of

from tiercache.engine import Engine
from tiercache.engine.loads import LOOKUP_KEPT_S, LOOKUP_TIMEOUT_S

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


each_model = pytest.mark.parametrize(
    ("model", "exact"),
    # With sinks and any edge the engine asks for the first few edges only.
    [(model, exact) for model in MODELS for exact in (True, False) if exact or "sinks" not in model],
)


def hits(engine: Engine) -> tuple[int, int]:
    """The blocks of PROMPT that are found in the pool and in the cache. The tokens are right in any case."""
    output = Watch(engine).serve(PROMPT, 3)
    assert output.tokens == said(engine, PROMPT, 3)
    assert engine.drain()
    return output.pool_hit_tokens // 2, output.external_hit_tokens // 2


def edge_at(engine: Engine, blocks: int) -> int:
    """How many of that many leading blocks may be reused, beside all of them."""
    return blocks - blocks % 2 if engine.settings.exact else blocks


@each_model
def test_a_hit_reaches_up_to_a_lost_block_of_any_group(model: dict[str, Any], exact: bool) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, exact=exact, pool_blocks=160, **model) as engine:
        assert hits(engine) == (0, 0)
        windows, key = engine._groups.windows, chain_of(engine, PROMPT).key
        for group, window in enumerate(windows):
            for number in (0, 1, 2, 10, 15, 16, 17, 18, 19):
                # A token that goes on from any place behind a lost block of the window would see that block.
                cut = edge_at(engine, number) if number in window.needed(20) else 20
                del cache.groups[group].blocks[key(number)]
                engine.reset_pool()
                loaded = engine.stats()["loaded"]
                assert hits(engine) == (0, cut)  # and what was computed is stored again
                assert engine.stats()["loaded"] - loaded == sum(len(one.needed(cut)) for one in windows)
                if cut == 20:
                    engine.reset_pool()
                    cache.groups[group].blocks.clear()
                    assert hits(engine) == (0, 0)
                    continue
                kept = [dict(one.blocks) for one in cache.groups]
                for one in cache.groups:
                    one.blocks.clear()
                engine._blocks._forget(engine._blocks._cached[group][key(number)])
                assert hits(engine) == (cut, 0)
                for one, blocks in zip(cache.groups, kept, strict=True):
                    one.blocks = blocks
    assert not cache.leases


@each_model
def test_a_hit_reaches_as_far_as_a_load_brought(model: dict[str, Any], exact: bool) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, exact=exact, pool_blocks=160, **model) as engine:
        assert hits(engine) == (0, 0)
        needed = [len(window.needed(20)) for window in engine._groups.windows]
        for good in (0, 1, 2, 3, 5, 12, 19, 20):
            cache.good_blocks = good  # of each group
            engine.reset_pool()
            missed = engine.stats()["load_misses"]
            # Nobody has asked for what another place needs, unless that is what comes before in any case.
            short = edge_at(engine, good) if needed == [20] else 0
            assert hits(engine) == (0, 20 if good >= max(needed) else short)
            assert engine.stats()["load_misses"] - missed == sum(max(0, count - good) for count in needed)
    assert not cache.leases


# --- what it costs


@pytest.mark.parametrize("windows", [(0, 7), (6, 6, 0, 6, 0), (7,)])
@pytest.mark.parametrize("whole", [True, False])
def test_where_what_is_below_is_slow_the_windows_of_the_edge_in_dram_are_loaded(
    windows: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled({"windows": windows})
    cache.below_from = 13  # blocks 0..12 are in DRAM, and the edge before that is at 12
    monkeypatch.setattr("tiercache.connector.costs.CostModel.load_s", lambda _, dram, nvme=0, shared=0: nvme + shared)
    monkeypatch.setattr("tiercache.connector.costs.CostModel.prefill_s", lambda _, start, end: (end - start) * 1e-6)
    with plain_engine(cache.connect, windows=windows, pool_blocks=160) as engine:
        if not whole:
            del cache.groups[-1].blocks[chain_of(engine, PROMPT).key(11)]
        output = Watch(engine).serve(PROMPT, 5)
        assert output.external_hit_tokens == (24 if whole else 20)
        edge = output.external_hit_tokens // 2
        assert engine.stats()["loaded"] == sum(len(one.needed(edge)) for one in engine._groups.windows)
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


@pytest.mark.parametrize("end", ["answered", "late", "aborted"])
@pytest.mark.parametrize("windows", [(), (0, 7)])
def test_a_slow_lookup_holds_up_no_other_request(windows: tuple[int, ...], end: str) -> None:
    cache, clock = filled({"windows": windows}), FakeClock()
    with plain_engine(cache.connect, clock=clock, pool_blocks=160, windows=windows) as engine:
        decoding = engine.add_request(plain_prompt(9, seed=5), greedy(40))
        while not engine.step():
            pass
        cache.hold_lookups = True
        waiting = engine.add_request(PROMPT, greedy(2))
        sharing = engine.add_request(PROMPT[:31], greedy(2))
        for _ in range(5):
            assert [one.request_id for one in engine.step()] == [decoding]
        assert (engine.stats()["waiting"], len(cache.lookups)) == (2, 1), "what one asks for, the other waits for"
        assert cache.leases
        if end == "answered":
            cache.behave()
        elif end == "late":
            clock.time_s += LOOKUP_TIMEOUT_S
        else:
            engine.abort(waiting)
            cache.hold_lookups = False
        done = Watch(engine).run()
        found = {one: (done[one][0].pool_hit_tokens, done[one][0].external_hit_tokens) for one in done}
        assert found[decoding] == (0, 0)
        assert found.get(waiting) == {"answered": (0, 40), "late": (0, 0), "aborted": None}[end]
        assert done[sharing][0].tokens == said(engine, PROMPT[:31], 2)
        assert engine.stats()["lookups_given_up_count"] == (2 if end == "late" else 0)
        cache.behave()
        assert engine.drain()
    assert not cache.leases


def test_an_answer_is_not_kept_for_a_sequence_that_waits_for_room() -> None:
    cache, full, clock = filled(prompt=PROMPT[:9]), filled(prompt=PROMPT[:21]), FakeClock()
    with plain_engine(cache.connect, clock=clock) as engine:
        decoding = engine.add_request(plain_prompt(5, seed=5), greedy(22))
        while not engine.step():
            pass
        cache.hold_lookups = True
        waiting = engine.add_request(PROMPT[:21], greedy(2))
        engine.step()
        assert len(cache.lookups) == 1, "there was room"
        for _ in range(4):
            engine.step()
        cache.behave()
        clock.time_s += 100 * LOOKUP_KEPT_S
        engine.step()
        assert cache.leases, "an answer that comes late can be used by the next step"
        clock.time_s += LOOKUP_KEPT_S
        for _ in range(2):
            engine.step()
        assert (engine.stats()["waiting"], len(cache.leases)) == (1, 0)
        cache.blocks.update(full.blocks)
        done = Watch(engine).run()
        assert done[decoding][0].external_hit_tokens == 0
        assert done[waiting][0].external_hit_tokens == 20, "what the cache got meanwhile is found"
        assert done[waiting][0].tokens == said(engine, PROMPT[:21], 2)


def test_what_the_pool_got_meanwhile_needs_no_answer() -> None:
    cache = filled()
    with plain_engine(cache.connect, pool_blocks=160) as engine:
        cache.hold_lookups = True
        first = engine.add_request(PROMPT, greedy(1))
        engine.step()
        cache.available = False
        engine.add_request(PROMPT, greedy(1), priority=-1)
        assert Watch(engine).run()[first][0].pool_hit_tokens == 40
        cache.behave()
        assert engine.drain()
    assert not cache.leases


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


def test_a_cache_that_fails_between_two_groups_is_a_miss_and_counted() -> None:
    cache = filled({"windows": (0, 7)})
    cache.refuse_others = True
    with plain_engine(cache.connect, windows=(0, 7), pool_blocks=80) as engine:
        assert hits(engine) == (0, 0)
        assert engine.stats()["errors_count"] == 1
    assert not cache.leases
