"""Beside other connectors, in vLLM's MultiConnector: what they bring is never taken for what vLLM has computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm_engines import BLOCK, PATIENCE_S, Engine, prompt, stored_blocks, transfer_config, wait_until
from vllm_sibling import FOREIGN

import tiercache
from tiercache.connectors.vllm.compat import register
from tiercache.connectors.vllm.stats import ConnectorStats
from tiercache.connectors.vllm_v1 import TierCacheConnector
from tiercache.protocol.namespaces import NamespaceSpec

SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=BLOCK, block_bytes=64)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def multi_config(address: str, when: str, folder: Path, first: bool) -> dict[str, Any]:
    """Ours and a sibling, `first` or last."""
    ours = transfer_config(address, request_timeout_s=PATIENCE_S)
    sibling = {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "vllm_sibling",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"when": when, "folder": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [sibling, ours] if first else [ours, sibling]},
    }


def test_blocks_that_a_sibling_fills_are_not_stored_as_what_they_were(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    """It fills blocks of a request that has ended while their store is still being copied; in both orders."""
    ids, rest = prompt(500, "computed"), prompt(520, "foreign")
    full = len(ids) // BLOCK * BLOCK
    with tiercache.launch("64MiB", region="16MiB", timeout_s=PATIENCE_S) as daemon:
        right = None
        for when, first in (("hook", True), ("start", False)):
            folder = tmp_path / when
            folder.mkdir()
            engine = start(
                kv_transfer_config=multi_config(str(daemon.address), when, folder, first),
                max_model_len=640,
                kv_cache_memory_bytes=24 * 64 << 10,
            )
            engine.offloads = False
            if right is not None:
                assert engine.generate([ids]) == (right, [full]), "the very first request finds what there is"
                with tiercache.Client.connect(daemon.address, map_arena=False) as client:
                    client.flush()
                engine.forget()
            engine.ask("hold", way="out", folder=str(folder))
            right, _ = engine.generate([ids])
            engine.generate([[FOREIGN, *rest]])
            assert list(folder.glob("held*"))
            assert (folder / "copied").exists()
            assert engine.regenerate([ids])[0] == right
            wait_until(lambda engine=engine: engine.regenerate([ids])[1] == [full])  # type: ignore[misc]
            assert engine.regenerate([ids])[0] == right
            engine.close()
        assert stored_blocks(daemon) >= full // BLOCK


def test_a_multiconnector_reads_our_counters() -> None:
    """In the process that serves HTTP, where it finds classes by their names."""
    assert TierCacheConnector.__module__ == "tiercache.connectors.vllm_v1"
    counts = {"stored_blocks": 1}
    stats = MultiConnector.build_kv_connector_stats({"TierCacheConnector": counts})
    assert stats.reduce() == {"TierCacheConnector": ConnectorStats(counts).reduce()}
    register(TierCacheConnector)
