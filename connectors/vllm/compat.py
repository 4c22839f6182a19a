"""Everything that the connector uses of vLLM, and the versions that it was written for.

vLLM calls its connector interface experimental and changes it with nearly every minor version. With an untested version
the connectors do nothing: they log a line, and vLLM runs without a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import vllm
from tiercache.errors import VersionError

SERVED = ((0, 32), (0, 33))
"""From the first, below the second."""


def check_version(version: str = vllm.__version__) -> None:
    """Raise VersionError outside the range."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, below = SERVED
    if not first <= numbers < below:
        served = f">={first[0]}.{first[1]},<{below[0]}.{below[1]}"
        raise VersionError(f"tiercache's connector serves vllm{served}, and this is {version}: install one of those")


try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.metrics.utils import create_metric_per_engine
    from vllm.v1.request import RequestStatus
except ImportError:
    check_version()  # which words it better; such a vLLM does not start
    raise

VERSION: str = vllm.__version__


def register(connector: type) -> None:
    """Have vLLM find a connector's class by its name alone, as MultiConnector does when it reads statistics."""
    if connector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


def come_before_zeros(runner: Any, hook: Callable[[Any], None]) -> None:
    """Call a connector's hook before vLLM empties new blocks, which stores may still read.

    vLLM empties blocks where types of KV are mixed. Its second model runner does so before it calls the hook itself.
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
    """Whether a request was ended by the output of a step: then the results of all earlier steps are known."""
    ends = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION
    return request.status in ends


def block_tables(kv_cache_manager: Any) -> list[Mapping[str, Sequence[Any]]]:
    """For each KV cache group the blocks of each request, live.

    `KVConnectorBlockState` collects all blocks of a request anew whenever a few are wanted.
    """
    return [manager.req_to_blocks for manager in kv_cache_manager.coordinator.single_type_managers]


def local_cache(kv_cache_manager: Any) -> object:
    """The object behind vLLM's own prefix cache: another one after `reset_prefix_cache`."""
    return getattr(getattr(kv_cache_manager, "block_pool", None), "cached_block_hash_to_block", None)


__all__ = [
    "VERSION",
    "CacheHitSource",
    "KVConnectorPromMetrics",
    "KVConnectorStats",
    "base",
    "block_tables",
    "check_version",
    "come_before_zeros",
    "create_metric_per_engine",
    "ended_by_output",
    "kv_cache_interface",
    "kv_cache_utils",
    "local_cache",
    "register",
    "resolve_kv_cache_block_sizes",
]
