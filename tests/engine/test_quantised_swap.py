"""Quantised pools under pressure: forks, shared prefixes, preemption and a cache that fails change no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from memory_cache import MemoryCache
from random_models import prompt_of

from tiercache.engine import Engine, EngineSettings, SamplingParams

pytestmark = pytest.mark.engine
Job = tuple[list[int], SamplingParams]
Tokens = dict[tuple[int, int], list[int]]
MAX_STEPS = 2000


def jobs_of(choose: random.Random) -> list[Job]:
    """Prompts on two common beginnings, most of which end within a block; some are forked."""
    jobs = []
    for _ in range(6):
        beginning = prompt_of(choose.choice((24, 40, 64)), seed=choose.randint(0, 1))
        prompt = beginning + prompt_of(choose.randint(1, 17), seed=100 + choose.randint(0, 3))
        n, count = choose.choice((1, 1, 2, 3)), choose.randint(4, 30)
        params = SamplingParams(n=n, max_tokens=count, temperature=1.0, seed=choose.randint(0, 99), ignore_eos=True)
        jobs.append((prompt, params))
    return jobs


def serve_alone(engine: Engine, jobs: list[Job]) -> Tokens:
    tokens: Tokens = {}
    for number, (prompt, params) in enumerate(jobs):
        engine.add_request(prompt, params)
        while engine.unfinished:
            outputs = [one.output for one in engine.step() if one.output is not None]
            tokens |= {(number, output.index): output.tokens for output in outputs}
        engine.reset_pool()
    return tokens


def misbehave(cache: MemoryCache, choose: random.Random) -> None:
    action = choose.choices(("", "hold", "finish", "spoil", "work", "refuse", "lose"), (68, 5, 15, 3, 7, 1, 1))[0]
    if action == "hold":
        cache.hold_transfers = True
    elif action == "finish":
        cache.hold_transfers = False
        cache.finish_all()
    elif action == "spoil":
        cache.good_blocks = choose.randint(0, 3)
    elif action == "work":
        cache.good_blocks, cache.refuse = 1 << 30, False
    elif action == "refuse":
        cache.refuse = True
    elif action == "lose":
        cache.blocks.clear()


def serve_together(engine: Engine, cache: MemoryCache, jobs: list[Job], choose: random.Random) -> Tokens:
    numbers: dict[int, int] = {}
    tokens: Tokens = {}
    for _ in range(MAX_STEPS):
        if len(numbers) == len(jobs) and not engine.unfinished:
            break
        if len(numbers) < len(jobs) and choose.random() < 0.4:
            prompt, params = jobs[len(numbers)]
            numbers[engine.add_request(prompt, params, choose.randint(0, 2))] = len(numbers)
        misbehave(cache, choose)
        outputs = [one.output for one in engine.step() if one.output is not None]
        tokens |= {(numbers[output.request_id], output.index): output.tokens for output in outputs}
        engine.check_integrity()
    assert not engine.unfinished, "the engine does not come to an end"
    cache.hold_transfers = False
    cache.finish_all()
    assert engine.drain()
    engine.check_integrity()
    assert engine.stats()["idle_blocks"] == engine.settings.pool_blocks
    return tokens


@pytest.mark.parametrize("seed", [5, 9])  # mostly loaded again, and mostly computed again
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "fp8"])
def test_what_a_tight_pool_forgets_and_finds_again_changes_no_token(
    kv_cache_dtype: str, seed: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.engine.engine.check_model", lambda _: None)
    monkeypatch.setattr("tiercache.engine.engine._IDLE_WAIT_S", 0.0)

    def settings(pool_blocks: int, write: str = "through") -> EngineSettings:
        return EngineSettings(
            kv_cache_dtype=kv_cache_dtype,
            block_size=8,
            chunk_size=32,
            pool_blocks=pool_blocks,
            max_num_seqs=4,
            write=write,
            clean_blocks=2,
            load_timeout_s=0.001,
        )

    jobs = jobs_of(random.Random(seed))
    with Engine(llama, settings(pool_blocks=100)) as roomy:
        expected = serve_alone(roomy, jobs)
    for write in ("through", "back"):
        cache = MemoryCache()
        with Engine(llama, settings(16, write), cache.connect) as tight:
            assert serve_together(tight, cache, jobs, random.Random(seed)) == expected
            assert tight.stats()["preemptions"] > 0
        assert not cache.leases
