"""Daemons that die, hang, are slow, lose blocks, come back or cannot be used, under real vLLM, which must not mind.

README.md in this folder says which test shows which fault.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from vllm_engines import (
    Engine,
    damage_segments,
    launch,
    launch_patched,
    offloading_config,
    prompt,
    statistics,
    wait_until,
)

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
PROMPTS = [prompt(600, f"fault {number}") for number in range(8)]
FOUND = 576
SMALL = {"arena": "32MiB", "region": "8MiB"}
FLAGS = ("--arena", "32MiB", "--region", "8MiB")
SLOW_MATCHES = """
import time
from tiercache.daemon.tiers.dram.reads import Reads
match = Reads.match
def slow(*arguments, **options):
    time.sleep(0.2)
    return match(*arguments, **options)
Reads.match = slow
"""


@pytest.fixture(params=["connector", "tier"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """One engine for each connector. It has lived through the daemons of all tests before."""
    found: Engine = request.getfixturevalue({"connector": "enduring", "tier": "offloading"}[request.param])
    return found


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return plain.generate(PROMPTS, 48)[0]


@contextmanager
def stopping(pid: int) -> Iterator[None]:
    """Stop the process meanwhile; it may be killed while it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(daemon: tiercache.LaunchedDaemon) -> None:
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.close()


def test_killed_in_mid_run_and_back(engine: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    daemon = launch(run_dir=run_dir, **SMALL)
    engine.await_hits(PROMPTS[0])
    for number in range(4):  # at one time while it stores, at another while it loads
        engine.forget()
        engine.order_generate(PROMPTS, 48)
        time.sleep(0.05 * number)
        kill(daemon)
        assert engine.outputs()[0] == expected
        daemon = launch(run_dir=run_dir, **SMALL)
        engine.await_hits(PROMPTS[number])
    daemon.close()
    assert engine.ask("check")["idle"]


def test_hangs_dies_and_comes_back(engine: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    daemon = launch(run_dir=run_dir, **SMALL)
    engine.await_hits(PROMPTS[0])
    engine.forget()
    with stopping(daemon.pid):  # before anything is scheduled
        assert engine.generate(PROMPTS, 48)[0] == expected
        assert not engine.ask("check")["available"]
    engine.await_hits(PROMPTS[1])
    engine.forget()
    engine.order_generate(PROMPTS, 48)
    with stopping(daemon.pid):  # while it is
        assert engine.outputs()[0] == expected
        kill(daemon)
    with launch(run_dir=run_dir, **SMALL):
        engine.await_hits(PROMPTS[2])
        assert engine.ask("check")["idle"]


def test_a_slow_daemon_is_not_waited_for_in_turn(engine: Engine, plain: Engine, run_dir: Path) -> None:
    """Each answer comes in time, and 40 requests do not wait for 40 answers in turn."""
    prompts = [prompt(70, f"slow {number}") for number in range(40)]
    expected = plain.generate(prompts)[0]
    with launch_patched(run_dir, SLOW_MATCHES, *FLAGS) as daemon:
        engine.await_hits(PROMPTS[0])
        before = statistics(daemon)["counters"]["match_requests"]
        assert engine.generate(prompts)[0] == expected
        assert 0 < statistics(daemon)["counters"]["match_requests"] - before < 20
        assert engine.ask("check")["idle"]
        assert engine.regenerate(PROMPTS[:1], 1)[1] == [FOUND]


def test_a_request_that_is_aborted_while_it_loads(engine: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    long = prompt(1200, "aborted")
    with launch(run_dir=run_dir, **SMALL):
        engine.await_hits(long)

        def aborted() -> bool:
            engine.forget()
            return bool(engine.ask("abort", prompt=long)["loading"])

        wait_until(aborted)
        assert engine.ask("check")["idle"]
        assert engine.generate(PROMPTS, 48)[0] == expected


def test_restarts_of_both_and_damage_on_the_disk(
    engine: Engine, start: Start, run_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "256MiB", "nvme_segment": "16MiB"}
    (tmp_path / "disk").mkdir()
    with launch(run_dir=run_dir, **SMALL, **disk):
        engine.await_hits(PROMPTS[0])
    with launch(run_dir=run_dir, **SMALL, **disk):  # the daemon before wrote it as it stopped
        engine.await_hits(PROMPTS[0])
        assert engine.regenerate(PROMPTS[:1], 48) == (expected[:1], [FOUND])
        if engine.offloads:
            config = offloading_config({"address": str(run_dir), "request_timeout_s": 5.0, "tenant": "offload"})
            other = start(kv_transfer_config=config)
            assert other.generate(PROMPTS[:1], 48) == (expected[:1], [FOUND])
            other.close()
    damage_segments(tmp_path / "disk")
    with launch(run_dir=run_dir, **SMALL, **disk):
        wait_until(lambda: engine.ask("check")["available"])
        assert engine.regenerate(PROMPTS[:1], 48) == (expected[:1], [0])
        assert engine.ask("check")["idle"]
