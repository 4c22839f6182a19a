"""An engine as a whole: a state machine of it, and what its callers are promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_machine import EngineMachine
from machines import in_first_ring, in_stress
from memory_cache import MemoryCache
from plain_model import Watch, chain_of, continuation, greedy, plain_engine, plain_prompt, said

from tiercache.engine import SamplingParams
from tiercache.errors import ConfigError, DeadlineExceeded
from tiercache.protocol.keys import content_id
from tiercache.protocol.messages import ModelCard

pytestmark = pytest.mark.engine

TestEngine = in_first_ring(EngineMachine, examples=80, steps=50)
TestEngineForLong = in_stress(EngineMachine, examples=300)


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([5, 50], SamplingParams(), r"not in 0\.\.49"),
        ([-1], SamplingParams(), r"not in 0\.\.49"),
        ([5] * 20, SamplingParams(max_tokens=13), "exceed the 32 tokens .* lower max_tokens to 12, or raise pool_"),
        ([5] * 32, SamplingParams(max_tokens=1), "that a sequence may have: shorten the prompt, or raise pool_blocks"),
        ([5], SamplingParams(n=5), "n is 5: lower it to max_num_seqs 4"),
        ([5], SamplingParams(logit_bias={50: 1.0}), r"logit_bias names a token that is not in 0\.\.49"),
        ([5], SamplingParams(stop_token_ids=(50,)), r"stop_token_ids names a token that is not in 0\.\.49"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_all_beside_them(
    prompt: list[int], params: SamplingParams, text: str
) -> None:
    with plain_engine() as engine:
        with pytest.raises(ConfigError, match=text):
            engine.generate([[5], prompt], [greedy(1), params])
        assert not engine.unfinished
        engine.check_integrity()
        with pytest.raises(ValueError, match="zip"):
            engine.generate([[5], [6]], [greedy(1)])
        assert not engine.unfinished


@pytest.mark.parametrize("windows", [(), (0, 7), (6, 6, 0, 6, 0)])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_pool_serves_the_longest_sequence_that_it_says(windows: tuple[int, ...], chunked: bool) -> None:
    with plain_engine(windows=windows, max_num_seqs=1, pool_blocks=45, enable_chunked_prefill=chunked) as engine:
        groups = len(engine._groups.groups)
        limit = engine.max_model_len
        assert limit == 2 * (45 - (groups - 1) * 7 if chunked else 45 // groups)
        for length in (limit - 1, 3):
            prompt = plain_prompt(length)
            assert Watch(engine).serve(prompt, limit - length).tokens == said(engine, prompt, limit - length)


def test_it_stops_at_end_tokens_unless_told_otherwise() -> None:
    prompt = plain_prompt(5)
    expected = continuation(prompt, 20)
    stop = expected[5]
    at = expected.index(stop) + 1
    with plain_engine() as engine:

        def ended(**params: Any) -> tuple[list[int], str]:
            [output] = engine.generate([prompt], SamplingParams(max_tokens=20, **params))
            return output.tokens, output.finish_reason

        assert ended(ignore_eos=True, stop_token_ids=(stop,)) == (expected[:at], "stop")
        object.__setattr__(engine.shape, "eos_token_ids", frozenset([stop]))
        assert ended() == (expected[:at], "stop")
        assert ended(ignore_eos=True) == (expected, "length")


def test_loose_reuse_takes_generated_blocks_too() -> None:
    prompt = plain_prompt(7)
    with plain_engine(exact=False) as engine:
        [first] = engine.generate([prompt], greedy(6))
        follow_up = [*prompt, *first.tokens, 1, 2, 3]
        [second] = engine.generate([follow_up], greedy(3))
    assert second.pool_hit_tokens == 12  # 7 + 6 tokens, of which the last was never computed
    assert second.tokens == continuation(follow_up, 3)


def test_the_model_is_announced_by_the_name_and_the_path_of_its_folder() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=(0, 4), pool_blocks=36) as engine:
        names = ["plain", str(Path("plain").resolve())]
        fingerprints = [namespace.fingerprint() for namespace in engine.namespaces]
        assert len(fingerprints) == 2
        assert cache.announced == [ModelCard(names, content_id("plain"), fingerprints, 2)]


def test_transfers_that_never_end_stall_the_engine_with_a_word() -> None:
    cache = MemoryCache()
    cache.hold_transfers = True
    with plain_engine(cache.connect) as engine:
        engine.generate([plain_prompt(21)], greedy(1))
        with pytest.raises(DeadlineExceeded, match="transfers hold the pool"):
            engine.generate([plain_prompt(21, 1)], greedy(1), stall_timeout_s=60.0)
        engine.check_integrity()
        assert not engine.drain(), "the stores are under way"
        with pytest.raises(ConfigError, match="the pool is in use"):
            engine.reset_pool()
        cache.behave()
        assert engine.drain()


def test_stats_tell_what_goes_on() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, max_num_seqs=2) as engine:
        engine.generate([plain_prompt(9)], greedy(3))
        engine.reset_pool()
        engine.generate([plain_prompt(9)], greedy(3))
        engine.generate([plain_prompt(9)], greedy(3))
        cache.hold_transfers = True
        engine.reset_pool()
        for seed in (0, 1, 2):
            engine.add_request(plain_prompt(9, seed), greedy(3))
        engine.step()
        stats = engine.stats()
        assert (stats["running"], stats["waiting"], stats["loading"]) == (1, 1, 1)
        with pytest.raises(ConfigError, match="the pool is in use"):
            engine.reset_pool()
        assert stats["kv_cache_usage"] == 10 / 16
        assert (stats["prompt_tokens"], stats["generation_tokens"]) == (27, 9)
        assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (36, 8)
        assert (stats["external_prefix_cache_queries"], stats["external_prefix_cache_hits"]) == (28, 8)
        assert (stats["loaded"], stats["stored"], stats["present"], stats["load_misses"]) == (4, 4, 0, 0)
        cache.behave()


def test_without_prefix_caching_nothing_is_left_for_others() -> None:
    cache = MemoryCache()
    with plain_engine(cache.connect, windows=(0, 4), pool_blocks=36, enable_prefix_caching=False) as engine:
        engine.add_request(plain_prompt(13), greedy(3))
        engine.step()
        assert all(engine._blocks._cached)
        Watch(engine).run()
        assert not any(engine._blocks._cached)
        assert chain_of(engine, plain_prompt(13)).key(0) != chain_of(engine, plain_prompt(13)).key(0)
    assert cache.store_calls == []
