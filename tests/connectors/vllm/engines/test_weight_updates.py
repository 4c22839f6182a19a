"""Weights that are updated in place, in engines that are not told of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm_engines import BLOCK, Engine, prompt, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_no_block_meets_weights_that_did_not_compute_it(
    start: Callable[..., Engine], daemon: tiercache.LaunchedDaemon
) -> None:
    """Only vLLM's own cache is reset after the update, as users do; ours has to notice by itself."""
    ids, other = prompt(600, "before"), prompt(600, "after")
    bare, updated = start(), start(str(daemon.address))
    full = len(ids) // BLOCK * BLOCK
    before = bare.generate([ids, other])[0]
    updated.generate([ids])
    updated.await_hits(ids)
    for engine in (bare, updated):
        assert engine.ask("scale")["done"]
        engine.forget()
    now = bare.generate([ids, other])[0]
    assert now != before
    assert updated.generate([ids])[0] == now[:1]
    assert len(updated.lines("the weights have changed")) == 1
    wait_until(lambda: updated.regenerate([ids, other])[1] == [full, full])
    assert updated.regenerate([ids, other])[0] == now
    fresh = start(str(daemon.address))  # with the weights in the folder
    assert fresh.generate([ids, other])[0] == before
    assert fresh.counts()["loaded_blocks"] == full // BLOCK, "of the prompt that was stored before the update"
    # A reset that names the connector: what comes after it is stored at once.
    assert updated.ask("scale")["done"]
    assert updated.ask("reset")["done"]
    updated.generate([ids])
    wait_until(lambda: updated.regenerate([ids])[1] == [full])
    assert len(updated.lines("the weights have changed")) == 1


def test_a_sleep_that_keeps_the_weights_keeps_the_cache(
    start: Callable[..., Engine], daemon: tiercache.LaunchedDaemon
) -> None:
    """vLLM resets its connectors before it sleeps, and does not say why."""
    ids = prompt(600, "asleep")
    engine = start(str(daemon.address))
    full = len(ids) // BLOCK * BLOCK
    before = engine.generate([ids])[0]
    engine.await_hits(ids)
    assert engine.ask("sleep", level=1)["done"]
    assert engine.generate([ids]) == (before, [full])
    assert engine.ask("sleep", level=1, scale=True)["done"]  # as trainers do while it sleeps
    after, cached = engine.generate([ids])
    assert after != before
    assert cached == [0]
    wait_until(lambda: engine.regenerate([ids])[1] == [full])
    assert engine.regenerate([ids])[0] == after
    assert engine.ask("sleep", level=2)["done"]  # vLLM keeps no weights: others come
    assert engine.generate([ids]) == (after, [0])
