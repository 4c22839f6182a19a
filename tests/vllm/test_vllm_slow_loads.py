"""Loads that take longer than prefill, under real vLLM: computed instead, with the same tokens, until they are fast."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import Engine, prompt

import tiercache
from tiercache.connectors.vllm.costs import ASK_AGAIN, LAST_LOADS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SLOW_S = 5.0
"""Far more than the prefill of a prompt in these tests, and less than the deadline of a load."""


def test_35_a_hit_is_loaded_only_where_that_is_faster_than_prefill(
    model: str, plain: Engine, daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    ids = prompt(700, "costs")
    expected = plain.generate([ids])[0]
    engine = Engine(model, tmp_path / "log", daemon.address, {"load": "auto"})
    try:
        for number in range(3):
            engine.generate([prompt(1500, f"prefill {number}")])
        engine.generate([ids])
        engine.await_hits(ids)
        engine.ask("slow", seconds=SLOW_S)
        cached = []
        while 0 not in cached:
            assert len(cached) < LAST_LOADS, "every load was slow, and the next one is done all the same"
            tokens, (found,) = engine.regenerate([ids])
            assert tokens == expected
            cached.append(found)
        assert engine.ask("check")["declined"] == 700 // 32
        engine.ask("slow", seconds=0.0)
        loaded = 0
        for _ in range(LAST_LOADS * ASK_AGAIN):
            tokens, (found,) = engine.regenerate([ids])
            assert tokens == expected
            loaded = loaded + 1 if found else 0
            if loaded == 2:
                break
        assert loaded == 2, "loads are fast again, and hits are still computed"
        assert engine.ask("check")["idle"]
    finally:
        engine.close()
