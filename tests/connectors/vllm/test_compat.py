"""Blocks that vLLM empties or copies to as it gives them away, while stores may still read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tiercache.connectors import vllm_v1
from tiercache.connectors.vllm.orders import Orders, RankForm
from tiercache.connectors.vllm_v1 import TierCacheConnector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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
