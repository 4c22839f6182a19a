"""Two hosts and a Valkey server: vLLM on host B finds what vLLM on host A has stored, until the store is dead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, statistics, wait_until

import tiercache
from tiercache.demo.hosts import write_settings
from tiercache.demo.valkey import ValkeyProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def shared_tier(daemon: tiercache.LaunchedDaemon) -> dict[str, Any]:
    tier: dict[str, Any] = statistics(daemon)["tiers"]["shared"]
    return tier


def test_what_one_host_has_stored_another_one_finds_and_computes_when_the_store_is_dead(
    plain: Engine, start: Callable[..., Engine], tmp_path: Path
) -> None:
    ids, other = prompt(1000, "on both hosts"), prompt(700, "on host A")
    blocks, others = len(ids) // BLOCK, len(other) // BLOCK
    expected, expected_other = plain.generate([ids, other], 40)[0]
    with ValkeyProcess(tmp_path, 256 << 20) as store:
        shared = {"region": "16MiB", "config": str(write_settings(tmp_path, store.url))}
        events = {"kv_events": f"ipc://{tmp_path}/events"}
        with launch("64MiB", **shared) as a, launch("64MiB", **shared, **events) as b:
            on_a = start(a.address)
            assert on_a.generate([ids, other], 40) == ([expected, expected_other], [0, 0])
            wait_until(lambda: shared_tier(a)["written_blocks"] >= blocks + others)
            on_b = start(b.address)
            assert on_b.generate([ids], 40) == ([expected], [blocks * BLOCK])
            assert shared_tier(b)["fetched_blocks"] == on_b.counts()["loaded_blocks"] == blocks
            # The host's KV events have what came from the store, too, and no copy is made for it.
            wait_until(lambda: statistics(b)["kv_events"]["known_blocks"] == (len(ids) + 39) // BLOCK)
            assert on_b.counts()["stored_blocks"] == (len(ids) + 39) // BLOCK - blocks

            store.kill()
            assert on_b.regenerate([other], 40) == ([expected_other], [0])
            assert on_b.regenerate([ids], 40) == ([expected], [blocks * BLOCK])
            assert shared_tier(b)["fetched_blocks"] == blocks
            assert on_a.regenerate([other], 40) == ([expected_other], [others * BLOCK])
            for engine in (on_a, on_b):
                assert engine.ask("check")["idle"]
