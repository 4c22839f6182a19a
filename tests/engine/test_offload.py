"""What the engine stores, when, and what each answer of the cache makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cache import MemoryCache
from plain_model import Watch, chain_of, greedy, plain_engine, plain_prompt

from tiercache.protocol.messages import Priority

pytestmark = pytest.mark.engine
PROMPT = plain_prompt(15)  # chunks end at 4, 8, 12, 14, 15: 7 blocks of 2 that can be reused


def test_write_through_stores_a_chunk_in_one_call_after_its_step() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect) as engine:
        Watch(engine).serve(PROMPT, 3)
        assert cache.store_calls == [(0, 2), (2, 2), (4, 2), (6, 1)]
        assert engine.stats()["stored"] == 7
        Watch(engine).serve(PROMPT, 3)
        assert len(cache.store_calls) == 4
        assert [cache.namespace] == engine.namespaces


def test_the_priority_of_a_request_becomes_that_of_its_hints() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect) as engine:
        for number, (priority, hint) in enumerate(((0, None), (3, Priority.LOW), (-1, Priority.HIGH))):
            engine.add_request(plain_prompt(7, number), greedy(1), priority)
            Watch(engine).run()
            assert {said and said.priority for said in cache.hints} == {hint}
            cache.hints.clear()


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_of_a_shared_store_are_named_to_a_daemon_that_publishes_events(wanted: bool) -> None:
    """A store names them; the daemon has them, so that nothing is copied. Without events there is nothing to name."""
    cache = MemoryCache()
    with plain_engine(cache.connect) as engine:
        engine.generate([PROMPT], greedy(1))
        cache.store_calls.clear()
        cache.wants_events, cache.shared_from = wanted, 4
        engine.reset_pool()
        assert Watch(engine).serve(PROMPT, 1).external_hit_tokens == 14
        assert engine.drain()
        assert (engine.stats()["stored"], engine.stats()["present"]) == (7, 3 if wanted else 0)
    assert cache.store_calls == ([(4, 3)] if wanted else [])


@pytest.mark.parametrize(("write", "retries"), [("through", True), ("back", False)])
def test_what_the_cache_did_not_keep_is_offered_again_with_write_through_only(write: str, retries: bool) -> None:
    """With write-back, blocks that the cache refuses would fill the pool for ever."""
    cache = MemoryCache()
    cache.capacity = 3
    with plain_engine(cache.connect, write=write) as engine:
        Watch(engine).serve(PROMPT, 1)
        assert engine.drain()
        assert engine.stats()["stored"] == 3
        assert engine.stats()["not_stored"] == 4
        cache.capacity = 100
        Watch(engine).serve(PROMPT, 1)
        assert engine.drain()
    assert len(cache.blocks) == (7 if retries else 3)


@pytest.mark.parametrize("trouble", [{"available": False}, {"refuse": True}])
def test_a_cache_that_was_away_gets_the_blocks_of_the_next_request(trouble: dict[str, Any]) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect) as engine:
        for name, value in trouble.items():
            setattr(cache, name, value)
        Watch(engine).serve(PROMPT, 1)
        assert cache.store_calls == []
        cache.behave()
        other = [*PROMPT[:12], 40, 41, 42]
        Watch(engine).serve(other, 1)  # its beginning is a hit in the pool, and was never stored
        # A store that was refused counts as made: it is not tried for ever.
        assert len(cache.blocks) == (7 if "available" in trouble else 0)


def test_a_chain_whose_beginning_the_cache_lost_is_offered_once_more() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, pool_blocks=32) as engine:
        Watch(engine).serve(PROMPT, 1)
        cache.blocks.clear()
        Watch(engine).serve([*PROMPT[:12], *plain_prompt(9, seed=7)], 1)
        assert len(cache.blocks) == 10  # all of the longer chain, the shared part included
        chain = chain_of(engine, PROMPT)
        cache.capacity = 0
        cache.blocks.clear()
        cache.store_calls.clear()
        Watch(engine).serve([*PROMPT[:12], *plain_prompt(9, seed=8)], 2)
        assert [first for first, _ in cache.store_calls].count(0) == 1, "one more time, and no further one"
        assert chain.key(0) not in cache.blocks


@pytest.mark.parametrize("write", ["through", "back"])
def test_no_more_stores_are_under_way_than_may_be(write: str) -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, write=write, max_stores=1, pool_blocks=20, clean_blocks=20) as engine:
        cache.hold_transfers = True
        for seed in (0, 1):
            engine.add_request(plain_prompt(15, seed), greedy(2))
        Watch(engine).run()
        assert len(cache.pending) == len(cache.store_calls) == 1
        cache.behave()
        for seed in (0, 1):
            Watch(engine).serve(plain_prompt(15, seed), 2)
        assert engine.drain()
    assert len(cache.blocks) >= 7


def test_what_is_being_cleaned_counts_as_clean() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, write="back", pool_blocks=32, clean_blocks=20) as engine:
        cache.hold_transfers = True
        for seed in (0, 1):
            Watch(engine).serve(plain_prompt(15, seed), 1)  # leaves 7 dirty blocks
        for _ in range(3):
            engine.step()
        assert cache.store_calls == [(0, 7)], "one of the two runs gives enough"
        cache.behave()


def test_what_is_in_the_pool_and_not_stored_is_stored_when_the_engine_ends() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, write="back", pool_blocks=64) as engine:
        Watch(engine).serve(PROMPT, 3)
        assert cache.blocks == {}
    assert len(cache.blocks) == 7
    assert cache.closed
