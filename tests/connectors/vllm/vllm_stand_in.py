"""As much of vLLM as the connectors' own logic uses, for environments without vLLM.

With it the first ring runs that logic. `make test-vllm` runs the same tests with vLLM itself, which shows that this is
what vLLM is like.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

INSTALLED = importlib.util.find_spec("vllm") is not None
PRODUCT = ("scheduler", "worker", "tier", "siblings", "groups")
"""Modules of connectors/vllm that come with all others that need no more of vLLM than this."""

RequestStatus = Enum(
    "RequestStatus",
    "RUNNING FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_REPETITION FINISHED_ABORTED FINISHED_ERROR",
)
CacheHitSource = Enum("CacheHitSource", "HOST DISK EXTERNAL_UNSPECIFIED")
LookupResult = Enum("LookupResult", "HIT MISS RETRY")


class JobResult(NamedTuple):
    """The result of a job of vLLM's offloading."""

    job_id: int
    success: bool
    completed_keys: list[bytes] | None = None
    transfer_time: float = 0.0


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.33.0"},
    "vllm.v1.request": {"RequestStatus": RequestStatus},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": lambda block_hash: block_hash},
    "vllm.v1.kv_offload.base": {
        "LookupResult": LookupResult,
        "make_offload_key": lambda block_hash, group: block_hash + group.to_bytes(4, "big"),
        "get_offload_block_hash": lambda key: key[:-4],
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    },
    "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult},
}


@contextmanager
def standing_in() -> Iterator[None]:
    """Meanwhile `import vllm` finds this. Afterwards nobody takes vLLM for installed."""
    for name, contents in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module.__path__ = []
        vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def import_connectors() -> None:
    """Import what the tests of the connectors' logic use, with vLLM or with this."""
    if INSTALLED:
        return
    with standing_in():
        for name in PRODUCT:
            importlib.import_module(f"tiercache.connectors.vllm.{name}")
