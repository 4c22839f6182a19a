"""All that the connector uses of vLLM, and the versions in which it is what it was written for.

vLLM calls its connector interface experimental and changes it with nearly every minor version, so a
version that was not tried is refused, before anything else can go wrong.
"""

from __future__ import annotations

import re

import vllm

from tiercache.errors import VersionError

SERVED = ((0, 32), (0, 33))
"""From the first, below the second."""


def check_version(version: str) -> None:
    """Raise VersionError outside the range."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, below = SERVED
    if not first <= numbers < below:
        served = f">={first[0]}.{first[1]},<{below[0]}.{below[1]}"
        raise VersionError(f"tiercache's connector serves vllm{served}, and this is {version}: install one of those")


check_version(vllm.__version__)

from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats  # noqa: E402
from vllm.v1 import kv_cache_interface  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm.v1.metrics.utils import create_metric_per_engine  # noqa: E402

VERSION: str = vllm.__version__

__all__ = [
    "VERSION",
    "CacheHitSource",
    "KVConnectorPromMetrics",
    "KVConnectorStats",
    "base",
    "check_version",
    "create_metric_per_engine",
    "kv_cache_interface",
    "kv_cache_utils",
    "resolve_kv_cache_block_sizes",
]
