"""Daemons that die, hang, lose blocks and come back under vLLM, which must not mind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_engines import Engine, prompt, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
Start = Callable[..., Engine]
PROMPTS = [prompt(600, f"fault {number}") for number in range(8)]
SMALL = {"arena": "32MiB", "region": "8MiB"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "d"


@pytest.fixture(scope="module")
def enduring(model: str, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine that lives through the daemons of all these tests. The first of them is not there yet."""
    settings = {"request_timeout_s": 0.5}
    engine = Engine(model, tmp_path_factory.mktemp("enduring") / "log", str(run_dir), settings)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return plain.generate(PROMPTS, 48)[0]


def hits_come(engine: Engine, ids: list[int]) -> None:
    """Wait until what is stored is also found again."""
    wait_until(lambda: engine.regenerate([ids], 4)[1][0] >= len(ids) // 32 * 32 - 32)


def test_hits_come_with_the_daemon(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    assert enduring.generate(PROMPTS[:2], 48)[0] == expected[:2]
    with tiercache.launch(run_dir=run_dir, **SMALL):
        hits_come(enduring, PROMPTS[0])
        assert enduring.regenerate(PROMPTS[:1], 48)[0] == expected[:1]


def test_killed_in_mid_run_and_back(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        for number in range(4):  # at one time while it stores, at another while it loads
            assert enduring.ask("forget")["done"]
            enduring.order_generate(PROMPTS, 48)
            time.sleep(0.05 * number)
            os.kill(daemon.pid, signal.SIGKILL)
            assert enduring.outputs()[0] == expected
            daemon.close()
            daemon = tiercache.launch(run_dir=run_dir, **SMALL)
            hits_come(enduring, PROMPTS[number])
        daemon.close()
    assert enduring.ask("check")["idle"]


def test_a_daemon_that_hangs_costs_one_deadline(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        assert enduring.ask("forget")["done"]
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert enduring.generate(PROMPTS, 48)[0] == expected
            assert not enduring.ask("check")["available"]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        hits_come(enduring, PROMPTS[1])


def test_a_request_that_is_aborted_while_it_loads(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    long = prompt(2000, "aborted")
    with tiercache.launch(run_dir=run_dir, **SMALL):
        hits_come(enduring, long)

        def aborted() -> bool:
            assert enduring.ask("forget")["done"]
            return bool(enduring.ask("abort", prompt=long)["loading"])

        wait_until(aborted)
        assert enduring.ask("check")["idle"]
        assert enduring.generate(PROMPTS, 48)[0] == expected


def test_an_arena_for_a_few_blocks(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch("2MiB", region="2MiB", run_dir=run_dir) as daemon:  # 32 blocks, and 8 x 20 are wanted
        hits_come(enduring, PROMPTS[0][:320])
        for _ in range(3):
            assert enduring.regenerate(PROMPTS, 48)[0] == expected
        with tiercache.Client.connect(daemon.address) as client:
            assert 0 < sum(space["blocks"] for space in client.stats()["namespaces"]) <= 32
    assert enduring.ask("check")["idle"]


def test_damage_on_the_disk_is_a_miss(
    enduring: Engine, run_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "256MiB", "nvme_segment": "16MiB"}
    (tmp_path / "disk").mkdir()
    with tiercache.launch(run_dir=run_dir, **SMALL, **disk):
        hits_come(enduring, PROMPTS[0])
    with tiercache.launch(run_dir=run_dir, **SMALL, **disk):
        hits_come(enduring, PROMPTS[0])  # from the disk: the daemon has written it on its way out
        assert enduring.regenerate(PROMPTS[:1], 48)[0] == expected[:1]
    damaged = 0
    for segment in (tmp_path / "disk").rglob("*.seg*"):
        with segment.open("r+b") as file:
            for place in range(4096 + 100, segment.stat().st_size, 4096):
                file.seek(place)
                file.write(b"\xff\x00\xff")
                damaged += 1
    assert damaged
    with tiercache.launch(run_dir=run_dir, **SMALL, **disk):
        wait_until(lambda: enduring.ask("check")["available"])
        outputs, cached = enduring.regenerate(PROMPTS[:1], 48)
        assert (outputs, cached[0] < 600 // 2) == (expected[:1], True)
