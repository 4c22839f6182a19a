"""vLLM's own offloading with tiercache below it, on real vLLM: the same tokens, from fewer computed ones.

What becomes of it with daemons that fail is in `test_faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import (
    BLOCK,
    Engine,
    launch,
    offloading_config,
    prompt,
    save_window_model,
    stored_blocks,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
PROMPTS = [prompt(600, f"tier {number}") for number in range(8)]
"""They need 8 x 18 chunks, and vLLM's own memory has room for 40."""
FOUND = 600 // BLOCK * BLOCK
SMALL = {"arena": "32MiB", "region": "8MiB"}


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return plain.generate(PROMPTS, 16)[0]


def test_a_working_set_larger_than_the_memory_of_vllm(
    offloading: Engine, plain: Engine, run_dir: Path, expected: list[list[int]]
) -> None:
    with launch(run_dir=run_dir, **SMALL) as daemon:
        offloading.await_hits(PROMPTS[0])
        for ids, tokens in zip(PROMPTS, expected, strict=True):
            assert offloading.regenerate([ids], 16)[0] == [tokens]
        wait_until(lambda: stored_blocks(daemon) == 8 * FOUND // BLOCK)
        for ids, tokens in zip(PROMPTS, expected, strict=True):  # each is evicted before its turn comes again
            assert offloading.ask("forget")["done"]
            assert offloading.generate([ids], 16) == ([tokens], [FOUND])
        for _ in range(2):  # and all at once, where they evict each other
            assert offloading.regenerate(PROMPTS, 16)[0] == expected
        long = prompt(1900, "longer than the memory")
        answers = [offloading.regenerate([long], 16)[0] for _ in range(3)]
        assert answers == [plain.generate([long], 16)[0]] * 3
        assert offloading.ask("check")["idle"]


def test_a_tenant_has_a_quota(offloading: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with launch(run_dir=run_dir, quota="offload=1MiB", **SMALL) as daemon:  # 16 rows
        offloading.await_hits(PROMPTS[0][:320])
        for _ in range(2):
            assert offloading.regenerate(PROMPTS, 16)[0] == expected
        assert 0 < stored_blocks(daemon) <= 16
        assert offloading.ask("check")["idle"]


def test_a_reset_begins_an_epoch_of_its_own(offloading: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with launch(run_dir=run_dir, **SMALL) as daemon:
        offloading.await_hits(PROMPTS[0])
        before = stored_blocks(daemon)
        assert offloading.ask("reset")["done"]
        assert offloading.generate(PROMPTS[:1], 16) == (expected[:1], [0])
        wait_until(lambda: stored_blocks(daemon) == before + FOUND // BLOCK)
        assert offloading.regenerate(PROMPTS[:1], 16) == (expected[:1], [FOUND])


def test_a_sliding_window(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_window_model(tmp_path_factory.mktemp("window"))
    long = prompt(1000, "window")
    with launch("64MiB", region="16MiB") as daemon:
        tier = {"address": str(daemon.address), "request_timeout_s": 5.0}
        engine = start(model=model, kv_transfer_config=offloading_config(tier, rows=96, row=32 << 10))
        expected = [engine.generate([long[:tokens]], 16)[0] for tokens in (500, 1000)]
        wait_until(lambda: stored_blocks(daemon) >= 31 + 4)
        assert engine.regenerate([long], 16) == (expected[1], [992])
        assert engine.regenerate([long[:500]], 16) == (expected[0], [480])
        assert engine.ask("check")["idle"]
        engine.close()
