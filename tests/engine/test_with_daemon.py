"""The engine over a real daemon: real shared memory, a real process, and its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_models import prompt_of

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to
from tiercache.engine.loads import LoadOrder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
SETTINGS = EngineSettings(block_size=8, chunk_size=32, pool_blocks=64)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = prompt_of(120)


@pytest.fixture
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch(arena="64MiB") as daemon:
        yield daemon


def test_a_restarted_engine_finds_what_the_first_one_computed(daemon: tiercache.LaunchedDaemon, llama: Path) -> None:
    connect = connect_to(daemon.address, required=True)
    with Engine(llama, SETTINGS, connect) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        assert engine.stats()["stored"] == 14
        engine.reset_pool()
        [reset] = engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
        computed = engine.pool.blocks[: len(PROMPT) // 8].clone()
    with Engine(llama, SETTINGS, connect) as engine:
        [warm] = engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
    assert (reset.external_hit_tokens, warm.external_hit_tokens) == (112, 112)
    assert cold.tokens == reset.tokens == warm.tokens
    assert computed.shape[0] == 15


def test_write_back_through_a_real_daemon(daemon: tiercache.LaunchedDaemon, llama: Path) -> None:
    settings = EngineSettings(block_size=8, chunk_size=32, pool_blocks=20, write="back")
    with Engine(llama, settings, connect_to(daemon.address, required=True)) as engine:
        first = [engine.generate([prompt_of(120, seed=seed)], GREEDY)[0] for seed in range(4)]
        again = [engine.generate([prompt_of(120, seed=seed)], GREEDY)[0] for seed in range(4)]
        engine.check_integrity()
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert all(one.external_hit_tokens + one.pool_hit_tokens == 112 for one in again)


def test_killing_the_daemon_fails_no_request(daemon: tiercache.LaunchedDaemon, llama: Path) -> None:
    with Engine(llama, SETTINGS, connect_to(daemon.address, required=True)) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        engine.reset_pool()
        os.kill(daemon.pid, signal.SIGKILL)
        [output] = engine.generate([PROMPT], GREEDY)
        engine.check_integrity()
    assert output.tokens == cold.tokens
    assert output.external_hit_tokens == 0


def test_an_engine_starts_without_its_daemon(llama: Path, tmp_path: Path) -> None:
    with Engine(llama, SETTINGS, connect_to(tmp_path / "absent")) as engine:
        [output] = engine.generate([PROMPT], GREEDY)
    assert len(output.tokens) == 6


def test_preempted_requests_come_back_from_the_daemon(daemon: tiercache.LaunchedDaemon, llama: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [prompt_of(30 + 7 * number, seed=number) for number in range(4)]
    with Engine(llama, SETTINGS) as roomy:
        expected = [roomy.generate([prompt], params)[0].tokens for prompt in prompts]
    tight = EngineSettings(block_size=8, chunk_size=32, pool_blocks=24)
    with Engine(llama, tight, connect_to(daemon.address, required=True)) as engine:
        outputs = engine.generate(prompts, params)
        engine.check_integrity()
        assert engine.stats()["preemptions"] > 0
    assert [output.tokens for output in outputs] == expected


def test_a_daemon_that_hangs_costs_a_deadline_and_no_token(daemon: tiercache.LaunchedDaemon, llama: Path) -> None:
    with Engine(llama, SETTINGS, connect_to(daemon.address, required=True)) as engine:
        [cold] = engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        engine.reset_pool()
        request_id = engine.add_request(PROMPT, GREEDY)
        start, sequence = engine._offload.loads.start, engine._sequences[request_id][0]

        def stop_the_daemon(order: LoadOrder) -> bool:
            os.kill(daemon.pid, signal.SIGSTOP)
            return start(order)

        engine._offload.loads.start = stop_the_daemon  # type: ignore[method-assign]
        try:
            while engine.unfinished:
                engine.step()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        engine.check_integrity()
    assert sequence.output == cold.tokens
    assert sequence.external_hit_tokens == 0  # good or miss: the daemon did not confirm what was copied
