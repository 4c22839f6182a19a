"""The one door to vLLM's internals: what the connectors use of vLLM, and the versions that they were tested with.

vLLM calls its connector interface experimental and changes it with nearly every minor version. What a later version
lacks does not stop vLLM from starting: see `fits`, which finds out whether the connectors can serve that version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import vllm

VERSION: str = vllm.__version__
TESTED = ((0, 32), (0, 33))
MISSING: list[str] = []
"""What this vLLM does not have."""


def age(version: str = VERSION) -> int:
    """-1 if a version is older than those tested, 0 if it is one of them, 1 if it is newer."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return (numbers > TESTED[-1]) - (numbers < TESTED[0])


class Door:
    """A module of vLLM. What it does not have is an empty class here, and noted in MISSING."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._module: Any = import_module(f"vllm.{name}")
        except ImportError:
            self._module = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._module, name, None)
        if found is None:
            found = type(name, (), {})
            MISSING.append(f"{self._name}.{name}")
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as base
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics as KVConnectorPromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as KVConnectorStats
    from vllm.v1 import kv_cache_interface as kv_cache_interface
    from vllm.v1.core import kv_cache_utils as kv_cache_utils
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes as resolve_kv_cache_block_sizes
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
    from vllm.v1.metrics.utils import create_metric_per_engine as create_metric_per_engine
    from vllm.v1.request import RequestStatus
else:
    _CONNECTORS = "distributed.kv_transfer.kv_connector"
    base, _metrics = Door(f"{_CONNECTORS}.v1.base"), Door(f"{_CONNECTORS}.v1.metrics")
    KVConnectorFactory = Door(f"{_CONNECTORS}.factory").KVConnectorFactory
    KVConnectorPromMetrics, KVConnectorStats = _metrics.KVConnectorPromMetrics, _metrics.KVConnectorStats
    kv_cache_interface, kv_cache_utils = Door("v1.kv_cache_interface"), Door("v1.core.kv_cache_utils")
    resolve_kv_cache_block_sizes = kv_cache_utils.resolve_kv_cache_block_sizes
    CacheHitSource = Door("v1.metrics.cache_hit_source").CacheHitSource
    create_metric_per_engine = Door("v1.metrics.utils").create_metric_per_engine
    RequestStatus = Door("v1.request").RequestStatus


def register(connector: type) -> None:
    """Have vLLM find a connector's class by its name alone, as MultiConnector does when it reads statistics."""
    if connector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


def come_before_writes(runner: Any, hook: Callable[[Any], None]) -> None:
    """Call a connector's hook before vLLM writes to new blocks, which stores may still read.

    vLLM empties blocks where types of KV are mixed, and copies a block that a request continues in its middle. Its
    second model runner does both before it calls the hook itself.
    """
    original: Callable[[Any], None] | None = getattr(runner, "update_requests", None)
    if original is None:
        return  # the first one calls the hook before all else

    def update_requests(scheduler_output: Any) -> None:
        if scheduler_output.kv_connector_metadata is not None:
            hook(scheduler_output.kv_connector_metadata)
        original(scheduler_output)

    runner.update_requests = update_requests


def ended_by_output(request: Any) -> bool:
    """True if a request was ended by the output of a step: then the results of all earlier steps are known."""
    ends = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION
    return request.status in ends


def block_tables(kv_cache_manager: Any) -> list[Mapping[str, Sequence[Any]]]:
    """For each KV cache group the blocks of each request, live.

    `KVConnectorBlockState` collects all blocks of a request again whenever a few are wanted.
    """
    return [manager.req_to_blocks for manager in kv_cache_manager.coordinator.single_type_managers]


def local_cache(kv_cache_manager: Any) -> object:
    """The object behind vLLM's own prefix cache: another one after `reset_prefix_cache`."""
    return getattr(getattr(kv_cache_manager, "block_pool", None), "cached_block_hash_to_block", None)


def window_in_chunks(spec: Any, chunk_tokens: int) -> int:
    """How many chunks of a windowed group vLLM's offloading looks for."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    try:  # since 0.33
        count = import_module(f"{module}.config").get_sliding_window_size_in_chunks
    except AttributeError:
        count = import_module(f"{module}.scheduler").get_sliding_window_size_in_chunks
    return int(count(spec, chunk_tokens))
