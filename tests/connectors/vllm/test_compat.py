"""Blocks that vLLM empties or copies to as it gives them away, while stores may still read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tiercache.connectors import vllm_tier, vllm_v1
from tiercache.connectors.vllm import compat
from tiercache.connectors.vllm.compat import VERSION, base
from tiercache.connectors.vllm.orders import Orders, RankForm
from tiercache.connectors.vllm_tier import TierCacheTier
from tiercache.connectors.vllm_v1 import TierCacheConnector
from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Runner(GPUModelRunner):  # type: ignore[misc]
    """vLLM's second model runner, as far as it updates its requests before a step."""

    def __init__(self, called: list[Any]) -> None:
        none = np.zeros(0, np.int32)
        self.req_states: Any = SimpleNamespace(
            num_computed_tokens_np=none, prefill_len=SimpleNamespace(np=none), num_computed_prefill_tokens=none
        )
        self.kv_block_zeroer: Any = SimpleNamespace(zero_block_ids=called.append)
        self.kv_caches: Any = []
        self.kv_cache_config: Any = SimpleNamespace(num_blocks=9)


class Parent:
    """A MultiConnector with a sibling before ours."""

    def __init__(self, connector: Any) -> None:
        self.sub_connectors = [object(), connector]

    def handle_preemptions(self, orders: Any) -> None:
        """As vLLM calls it later in a step."""


def output(metadata: Any, zeroing: bool = True) -> Any:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    return SimpleNamespace(
        scheduled_cached_reqs=cached,
        new_block_ids_to_zero=[7] if zeroing else None,
        kv_cache_block_copies=None if zeroing else [(3, 7)],
        kv_connector_metadata=metadata,
    )


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("zeroing", [False, True])
def test_stores_of_blocks_that_vllm_empties_or_copies_to_end_before_that(
    zeroing: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    runner = Runner(called)
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *args: called.append(args[-1]))
    for name in ("describe_built", "Weights", "RunnerTensors", "event_groups"):
        monkeypatch.setattr(vllm_v1, name, MagicMock())
    monkeypatch.setattr(vllm_v1, "runner_of_caller", lambda: runner)
    monkeypatch.setattr(vllm_v1, "make_pools", lambda *args: [])
    connector: Any = object.__new__(TierCacheConnector)
    connector._parent = Parent(connector) if beside else None  # rule: half a connector
    connector._form, connector._begun = RankForm([]), None  # rule: half a connector
    connector._settings = MagicMock()  # rule: half a connector
    connector._vllm_config = MagicMock()
    connector._vllm_config.parallel_config.rank = 0
    connector._vllm_config.parallel_config.tensor_parallel_size = 1
    connector._kv_cache_config = SimpleNamespace(needs_kv_cache_zeroing=zeroing, kv_cache_groups=[])
    connector.register_kv_caches({})
    monkeypatch.setattr(connector.worker, "begin", called.append)
    orders = Orders(flush=[1])
    metadata = SimpleNamespace(metadata=("a sibling's", orders)) if beside else orders
    runner.update_requests(output(metadata, zeroing))
    (connector._parent or connector).handle_preemptions(metadata)  # rule: half a connector
    assert called == [orders, [7] if zeroing else [(3, 7)]], "once for each step"


@pytest.mark.parametrize("ours", [TierCacheConnector, TierCacheTier])
def test_this_version_fits(ours: type) -> None:
    assert [*compat.hook_differences(ours), *compat.use_differences()] == []
    assert compat.misfit(ours, "0.34.0") == compat.misfit(ours, VERSION) == ""


def test_changed_hooks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = base.KVConnectorBase_V1
    monkeypatch.setattr(theirs, "update_state_after_alloc", lambda self, request, blocks, tokens: None)
    monkeypatch.setattr(theirs, "get_finished_count", theirs.handle_preemptions)
    monkeypatch.delattr(theirs, "handle_preemptions")
    monkeypatch.setattr(theirs, "__abstractmethods__", theirs.__abstractmethods__ | {"save_all"})
    assert list(compat.hook_differences(TierCacheConnector)) == [
        "does not call handle_preemptions",
        "calls update_state_after_alloc with other arguments",
        "wants save_all",
    ]
    said = compat.misfit(TierCacheConnector, "0.34.0")
    assert said == (
        "vllm 0.34.0 is newer than 0.33, which tiercache was tested with, and does not call handle_preemptions "
        "(and 2 more)"
    )


def test_a_probe_finds_blocks_elsewhere_than_expected() -> None:
    layers = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)
    good, size = Pool.from_layers(list(layers)), 3 * 8 * 2
    compat.probe(good, list(layers))
    assert not layers.any(), "it leaves no trace"
    short = [Segment(base, stride, length - 2) for base, stride, length in good.segments]
    spilling = [Segment(layers.data_ptr() - (number == 0) * 2, size, size) for number in range(2)]
    swapped = [Segment(good.segments[0].base, size, size), Segment(good.segments[0].base, size, size)]
    for segments in (short, spilling, swapped):
        with pytest.raises(LayoutError, match="not where tiercache expects them"):
            compat.probe(Pool(segments, 5, "cpu", True, layers), list(layers))


def test_hooks_that_stand_aside(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However they are called."""
    body = {name: value for name, value in vars(TierCacheTier).items() if name not in ("__dict__", "__weakref__")}
    ours: Any = type("Ours", (SecondaryTierManager,), body)
    monkeypatch.setattr(compat, "misfit", lambda ours: "vllm 9 differs")
    assert not compat.fit(ours, "It", vllm_tier.ANSWERS)
    tier = ours(None, memoryview(np.zeros((2, 8), np.int8)), "Class", address="/nowhere")
    assert "It is served without the cache: vllm 9 differs" in caplog.text
    assert tier.lookup(b"key", None, "more").name == "MISS"
    tier.submit_load(SimpleNamespace(job_id=3), 1)
    tier.submit_store(SimpleNamespace(job_id=4))
    assert [(result.job_id, result.success) for result in tier.get_finished_jobs()] == [(3, False), (4, False)]
    assert list(tier.get_finished_jobs()) == []
    tier.drain_jobs()
    tier.shutdown()
