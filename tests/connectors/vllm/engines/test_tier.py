"""vLLM's own offloading with tiercache below it, on real vLLM: the same tokens, from fewer computed ones.

What becomes of it with daemons that fail is in `test_faults`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, stored_blocks, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
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


def test_a_reset_begins_an_epoch_of_its_own(offloading: Engine, run_dir: Path, expected: list[list[int]]) -> None:
    with launch(run_dir=run_dir, **SMALL) as daemon:
        offloading.await_hits(PROMPTS[0])
        before = stored_blocks(daemon)
        assert offloading.ask("reset")["done"]
        assert offloading.generate(PROMPTS[:1], 16) == (expected[:1], [0])
        wait_until(lambda: stored_blocks(daemon) == before + FOUND // BLOCK)
        assert offloading.regenerate(PROMPTS[:1], 16) == (expected[:1], [FOUND])
