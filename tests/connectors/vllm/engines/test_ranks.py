"""Engines of several ranks, each with its shard, and MLA, whose blocks all ranks have in whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm_engines import BLOCK, Engine, launch, prompt, statistics, wait_until

import tiercache
from tiercache.connectors.vllm import groups as vllm_pool
from tiercache.connectors.vllm.compat import kv_cache_interface
from tiercache.connectors.vllm.groups import GroupPart
from tiercache.protocol.messages import Flush
from tiercache.protocol.namespaces import NamespaceSpec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]
PROMPTS = [prompt(600, "ranks"), prompt(600, "ranks")[:330] + prompt(200, "other"), prompt(70, "short")]
STORED = (600 + 15) // BLOCK + (530 + 15) // BLOCK - 330 // BLOCK + (70 + 15) // BLOCK


def blocks_by_rank(daemon: tiercache.LaunchedDaemon) -> dict[str, int]:
    return {str(space["rank"]): int(space["blocks"]) for space in statistics(daemon)["namespaces"]}


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tensor_parallel_size": 2}, {"tp 0/2 pp 0/1", "tp 1/2 pp 0/1"}),
        ({"pipeline_parallel_size": 2}, {"tp 0/1 pp 0/2", "tp 0/1 pp 1/2"}),
    ],
)
def test_each_rank_stores_its_shard(
    start: Start, plain: Engine, sizes: dict[str, int], ranks: set[str], tmp_path: Path
) -> None:
    expected = plain.generate(PROMPTS, 16)[0]
    with launch("64MiB", region="16MiB") as own:
        engine = start(own.address, **sizes)
        assert engine.generate(PROMPTS[:1], 16) == (expected[:1], [0])
        assert engine.generate(PROMPTS, 16)[0] == expected

        def all_stored() -> bool:  # what a busy machine has dropped is stored with the next request
            return blocks_by_rank(own) == dict.fromkeys(ranks, STORED) or not engine.regenerate(PROMPTS, 16)

        wait_until(all_stored)
        assert engine.regenerate(PROMPTS, 16) == (expected, [576, 512, 64])
        assert engine.ask("check")["idle"]

        # What one rank has lost, no rank has.
        with tiercache.Client.connect(own.address) as client:
            last = client.stats()["namespaces"][-1]["id"]
            client.call(Flush, tier="all", namespaces=[last], key=b"")
        assert engine.regenerate(PROMPTS[:1], 16) == (expected[:1], [0])
        wait_until(lambda: engine.regenerate(PROMPTS[:1], 16) == (expected[:1], [576]))
        wait_until(lambda: engine.generate([[5, 6, 7]]) and engine.ask("check")["jobs"] == 0)  # all ranks have reported
        assert engine.ask("check")["idle"]

        # And then a rank is killed while both of them store.
        held = tmp_path / "held"
        held.mkdir()
        pids = engine.ask("count")["pids"]
        assert engine.ask("hold", folder=str(held))["done"]
        engine.order_generate([prompt(600, "killed")])
        wait_until(lambda: len(list(held.iterdir())) == 2)
        assert statistics(own)["leases"]["write"] == 2
        before = blocks_by_rank(own)
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: statistics(own)["leases"]["write"] < 2)
        assert pids[1] not in {session["pid"] for session in statistics(own)["sessions"]}
        for pid in (engine.pid, pids[0]):  # vLLM has no use for the other rank, which it ends or waits for
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(session["name"].startswith("vllm") for session in statistics(own)["sessions"]))
        leases = statistics(own)["leases"]
        assert (leases["write"], leases["quarantined"], leases["pending_blocks"]) == (0, 0, 0)
        assert blocks_by_rank(own) == before, "no half-stored block"


def test_mla_is_stored_once_for_all_ranks() -> None:
    """All tensor-parallel ranks hold all of it, so they share a namespace; pipeline stages hold different layers."""
    mla = kv_cache_interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=mla, layer_names=["a", "b"])

    def spec_of(rank: int, use_mla: bool = True) -> NamespaceSpec:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2, pipeline_parallel_size=2),
            cache_config=SimpleNamespace(kv_cache_layout="LBNHC", cache_dtype="auto"),
            device_config=SimpleNamespace(device_type="cuda"),
            model_config=SimpleNamespace(use_mla=use_mla),
        )
        assert vllm_pool.replicated(config, group) is use_mla
        return vllm_pool._namespace(config, GroupPart(0, 16), group, 16, 4096, ["form"], "built")

    names = [spec_of(rank).fingerprint() for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]
    assert len({spec_of(rank, use_mla=False).fingerprint() for rank in range(4)}) == 4
