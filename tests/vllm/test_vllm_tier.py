"""vLLM's own offloading with tiercache below it, on real vLLM: the same tokens, from fewer computed ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, Engine, prompt, save_model, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
Start = Callable[..., Engine]
ROW = 64 << 10
ROWS = 40
"""Chunks that vLLM's own memory has room for. The prompts need 8 x 18."""
PROMPTS = [prompt(600, f"tier {number}") for number in range(8)]
FOUND = 600 // BLOCK * BLOCK
SMALL = {"arena": "32MiB", "region": "8MiB"}


def offloading(*tiers: dict[str, Any], rows: int = ROWS, row: int = ROW) -> dict[str, Any]:
    """What `--kv-transfer-config` would be given, but for the worker, which vLLM has for GPUs only."""
    named = [{"type": "TierCacheTier", "module_path": "tiercache.connectors.vllm_tier", **tier} for tier in tiers]
    extra = {
        "spec_name": "MemcpyTieringSpec",
        "spec_module_path": "bench.vllm_native",
        "cpu_bytes_to_use": rows * row,
        "secondary_tiers": named,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "d"


@pytest.fixture(scope="module")
def enduring(model: str, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine that lives through the daemons of all these tests. The first of them is not there yet."""
    config = offloading({"address": str(run_dir), "request_timeout_s": 2.0})
    engine = Engine(model, tmp_path_factory.mktemp("tier") / "log", kv_transfer_config=config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return plain.generate(PROMPTS, 16)[0]


def forget(engine: Engine) -> None:
    """Leave nothing in vLLM, neither in its pool nor in its offload memory."""
    assert engine.ask("forget")["done"]
    assert engine.ask("offloaded")["done"]


def regenerate(engine: Engine, *prompts: list[int], tokens: int = 16) -> tuple[list[list[int]], list[int]]:
    """What the engine generates when only the cache can have the prompts."""
    forget(engine)
    return engine.generate(prompts, tokens)


def hits_come(engine: Engine, ids: list[int]) -> None:
    """Wait until what is stored is also found again."""
    wait_until(lambda: regenerate(engine, ids, tokens=1)[1] == [len(ids) // BLOCK * BLOCK])


def stored_blocks(daemon: tiercache.LaunchedDaemon) -> int:
    with tiercache.Client.connect(daemon.address) as client:
        return int(sum(space["blocks"] for space in client.stats()["namespaces"]))


def test_hits_come_with_the_daemon(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    assert enduring.generate(PROMPTS[:2], 16)[0] == expected[:2]
    said = [line for line in enduring.log.read_text().splitlines() if "without the cache until that changes" in line]
    assert len(said) == 1
    with tiercache.launch(run_dir=run_dir, **SMALL):
        hits_come(enduring, PROMPTS[0])
        assert regenerate(enduring, PROMPTS[0]) == (expected[:1], [FOUND])
        assert enduring.ask("check")["idle"]


def test_a_working_set_larger_than_the_memory_of_vllm(
    enduring: Engine, plain: Engine, run_dir: Path, expected: list[list[int]]
) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        for ids, tokens in zip(PROMPTS, expected, strict=True):
            assert regenerate(enduring, ids)[0] == [tokens]
        wait_until(lambda: stored_blocks(daemon) == 8 * FOUND // BLOCK)
        for ids, tokens in zip(PROMPTS, expected, strict=True):  # each is evicted before its turn comes again
            assert enduring.ask("forget")["done"]
            assert enduring.generate([ids], 16) == ([tokens], [FOUND])
        for _ in range(2):  # and all at once, where they evict each other
            assert regenerate(enduring, *PROMPTS)[0] == expected
        long = prompt(1900, "longer than the memory")
        answers = [regenerate(enduring, long)[0] for _ in range(3)]
        assert answers == [plain.generate([long], 16)[0]] * 3
        assert enduring.ask("check")["idle"]


def test_restarts_of_both(
    enduring: Engine, start: Start, run_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "256MiB", "nvme_segment": "16MiB"}
    (tmp_path / "disk").mkdir()
    with tiercache.launch(run_dir=run_dir, **SMALL, **disk):
        hits_come(enduring, PROMPTS[0])
    with tiercache.launch(run_dir=run_dir, **SMALL, **disk):  # the one before wrote it on its way out
        hits_come(enduring, PROMPTS[0])
        other = start(kv_transfer_config=offloading({"address": str(run_dir), "request_timeout_s": 5.0}))
        assert other.generate(PROMPTS[:1], 16) == (expected[:1], [FOUND])
        other.close()
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
        assert regenerate(enduring, PROMPTS[0]) == (expected[:1], [0])
        assert enduring.ask("check")["idle"]


def test_killed_in_mid_run_and_back(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        for number in range(4):  # at one time while it stores, at another while it loads
            forget(enduring)
            enduring.order_generate(PROMPTS, 16)
            time.sleep(0.04 * number)
            os.kill(daemon.pid, signal.SIGKILL)
            assert enduring.outputs()[0] == expected
            daemon.close()
            daemon = tiercache.launch(run_dir=run_dir, **SMALL)
            hits_come(enduring, PROMPTS[number])
        daemon.close()
    assert enduring.ask("check")["idle"]


def test_a_daemon_that_hangs(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        forget(enduring)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert enduring.generate(PROMPTS, 16)[0] == expected
            assert not enduring.ask("check")["available"]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        hits_come(enduring, PROMPTS[1])


def test_a_prefix_that_only_vllm_still_has_is_stored_again(
    enduring: Engine, plain: Engine, run_dir: Path, expected: list[list[int]]
) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL):
        hits_come(enduring, PROMPTS[0])
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:  # it knows nothing
        wait_until(lambda: enduring.ask("check")["available"])
        longer = PROMPTS[0] + prompt(200, "more")
        answer = plain.generate([longer], 16)[0]
        assert enduring.ask("forget")["done"]
        assert enduring.generate([longer], 16) == (answer, [FOUND])  # from vLLM's own memory
        wait_until(lambda: stored_blocks(daemon) == len(longer) // BLOCK)
        assert regenerate(enduring, longer) == (answer, [len(longer) // BLOCK * BLOCK])


def test_a_request_that_is_aborted_while_it_loads(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    long = prompt(1200, "aborted")
    with tiercache.launch(run_dir=run_dir, **SMALL):
        hits_come(enduring, long)

        def aborted() -> bool:
            forget(enduring)
            return bool(enduring.ask("abort", prompt=long)["loading"])

        wait_until(aborted)
        assert enduring.ask("check")["idle"]
        assert enduring.generate(PROMPTS, 16)[0] == expected


def test_a_reset_begins_an_epoch_of_its_own(enduring: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        hits_come(enduring, PROMPTS[0])
        before = stored_blocks(daemon)
        assert enduring.ask("reset")["done"]
        assert enduring.generate(PROMPTS[:1], 16) == (expected[:1], [0])
        wait_until(lambda: stored_blocks(daemon) == before + FOUND // BLOCK)
        assert regenerate(enduring, PROMPTS[0]) == (expected[:1], [FOUND])


def test_what_is_loaded_is_used(enduring: Engine, run_dir: Path) -> None:
    """KV that was damaged before it was stored changes the tokens."""
    long = prompt(640, "damaged")
    with tiercache.launch(run_dir=run_dir, **SMALL) as daemon:
        wait_until(lambda: enduring.ask("check")["available"])
        good = enduring.generate([long], 16)[0]
        assert enduring.ask("offloaded")["done"]
        wait_until(lambda: stored_blocks(daemon) == 20)
        with tiercache.Client.connect(daemon.address) as client:
            client.flush()
        assert enduring.ask("negate")["done"]
        assert enduring.generate([long], 16)[0] != good  # from vLLM's pool, and offloaded from there
        wait_until(lambda: stored_blocks(daemon) >= 19)
        answer, cached = regenerate(enduring, long)
        assert (answer != good, cached[0] >= 608) == (True, True)


def test_a_sliding_window(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    model = save_model(
        tmp_path_factory.mktemp("window"), "Gemma3TextConfig", sliding_window=100, layer_types=layers,
        query_pre_attn_scalar=32,
    )  # fmt: skip
    long = prompt(1000, "window")
    with tiercache.launch("64MiB", region="16MiB") as daemon:
        tier = {"address": str(daemon.address), "request_timeout_s": 5.0}
        engine = start(model=model, kv_transfer_config=offloading(tier, rows=96, row=ROW // 2))
        expected = [engine.generate([long[:tokens]], 16)[0] for tokens in (500, 1000)]
        wait_until(lambda: stored_blocks(daemon) >= 31 + 4)
        assert regenerate(engine, long) == (expected[1], [992])
        assert regenerate(engine, long[:500]) == (expected[0], [480])
        assert engine.ask("check")["idle"]
        engine.close()


def test_what_cannot_be_served_is_said_in_a_line(start: Start, plain: Engine) -> None:
    said = {
        "has no 'adress': did you mean 'address'?": {"adress": "/tmp"},
        "kv_connector_extra_config: Expected `float`": {"load_timeout_s": "soon"},
        "gds is for TierCacheConnector": {"gds": "auto"},
        "set it to sha256": {"address": "/nowhere"},
    }
    engine = start(kv_transfer_config=offloading(*said.values()), prefix_caching_hash_algo="xxhash")
    assert engine.generate(PROMPTS[:1]) == (plain.generate(PROMPTS[:1])[0], [0])
    lines = [line for line in engine.log.read_text().splitlines() if "served without the cache: " in line]
    assert [sum(words in line for line in lines) for words in said] == [1, 1, 1, 1]
    assert len(lines) == 4
