"""Prefill in one engine and decode in another, over one daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, Engine, prompt

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG_WAITS = "import tiercache.connectors.vllm.scheduler as scheduler; scheduler.STORED_WAIT_S = 100"


def prefill(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """What the answer of a request for prefill says to the engine that goes on with it, as a proxy would pass it on."""
    answer = engine.ask("generate", prompts=[ids], max_tokens=1, transfer={"do_remote_decode": True})
    said: dict[str, Any] = answer["transfer"][0]
    return said


def test_the_engine_that_decodes_waits_for_what_the_other_one_stores(
    start: Callable[..., Engine], daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    before, after = start(str(daemon.address)), start(str(daemon.address), patch=LONG_WAITS)
    for number in range(8):
        ids = prompt(601, f"handed over {number}")
        full = len(ids) // BLOCK * BLOCK
        folder = tmp_path / f"held {number}"
        folder.mkdir()
        assert before.ask("hold", way="out", folder=str(folder))["done"]
        said = prefill(before, ids)
        assert said == {"tiercache": {"stored": full}}
        after.order_generate([ids], transfer=said)
        assert number % 2 or not after.answers_within(0.3)
        (folder / "go").touch()
        tokens, cached = after.outputs()
        assert cached == [full]
        assert before.generate([ids])[0] == tokens
