"""The one door to vLLM's internals: what the connectors use of vLLM, and whether this version of it can be served.

vLLM calls its connector interface experimental and changes it with nearly every minor version. What a later version
lacks does not stop vLLM from starting. A version that the connectors were not tested with is tested at the start:

    classes are loaded     vLLM still has what the connectors use, and calls their hooks as they expect
    memory is registered   a block that is copied out of vLLM's memory and into another place there is the same

If both hold, the connectors serve that version, with a warning. If not, vLLM runs as without them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import vllm
from tiercache.copies.pool import Limit, Pool, make_copier
from tiercache.errors import LayoutError

VERSION: str = vllm.__version__
TESTED = ((0, 32), (0, 33))
FIRST, LAST = (".".join(map(str, numbers)) for numbers in (TESTED[0], TESTED[-1]))
MISSING: list[str] = []
"""What this vLLM does not have."""

logger = logging.getLogger("tiercache.connectors.vllm")


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


def join_vllm() -> None:
    """Send tiercache's log lines where vLLM's go, from the same level on, unless our logging was configured."""
    ours, theirs = logging.getLogger("tiercache"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def locals_of_callers() -> Iterator[dict[str, Any]]:
    """The local variables of each function on the stack, beginning with the one that asks."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


# --- does this version fit? --------------------------------------------------------------------------

PROBE_TIMEOUT_S = 10.0
OWN = {"check_integrity", "unregister_kv_caches"}
"""Public methods of our classes that are not hooks of vLLM, or not of all tested versions."""
CALLED = {
    "v1.kv_cache_interface": {
        "group_kernel_blocks": 2,
        "get_kv_cache_spec_kind": 1,
        "get_kv_cache_spec_sliding_window": 1,
    },
    "v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": 4,
        "maybe_convert_block_hash": 1,
        "resolve_kv_cache_block_sizes": 2,
        "to_event_extra_keys": 1,
    },
    "v1.metrics.utils": {"create_metric_per_engine": 2},
}
"""Functions that we call, and with how many arguments."""
READ = {
    "v1.request.Request": "request_id block_hashes all_token_ids num_computed_tokens num_tokens num_prompt_tokens "
    "num_preemptions mm_features resumable lora_request cache_salt prompt_embeds kv_transfer_params status "
    "skip_reading_prefix_cache",
    "v1.core.sched.output.SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs "
    "scheduled_cached_reqs kv_connector_metadata kv_cache_block_copies",
    "v1.core.sched.output.NewRequestData": "req_id block_ids num_computed_tokens",
    "v1.core.sched.output.CachedRequestData": "req_ids new_block_ids num_computed_tokens resumed_req_ids",
    "v1.outputs.KVConnectorOutput": "finished_recving failed_recving invalid_block_ids kv_connector_worker_meta",
    "v1.kv_cache_interface.KVCacheConfig": "num_blocks kv_cache_groups kv_cache_tensors needs_kv_cache_zeroing "
    "prefix_cacheable_group_ids",
    "v1.kv_cache_interface.MambaSpec": "block_size mamba_cache_mode num_speculative_blocks tp_replicated shapes dtypes",
    "v1.core.kv_cache_utils.KVCacheBlock": "block_id is_null block_hash_num_tokens",
    "v1.core.kv_cache_manager.KVCacheBlocks": "blocks",
    "v1.core.kv_cache_coordinator.KVCacheCoordinator": "single_type_managers block_pool",
    "v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "req_to_blocks",
    "v1.core.block_pool.BlockPool": "cached_block_hash_to_block",
}
"""Attributes of vLLM's classes that we read."""


def fit(ours: type, who: str, answers: Mapping[str, Callable[..., Any]]) -> bool:
    """True if a class of ours can serve this version, as far as can be seen before it runs.

    If not, `who` runs as without it: each hook does what vLLM's base class does, or answers so.
    """
    problem = misfit(ours)
    if problem:
        _stand_aside(ours, f"{who} is served without the cache: {problem}", answers)
    return not problem


def misfit(ours: type, version: str = VERSION) -> str:
    """Why a class of ours cannot serve a version; empty if it can."""
    if age(version) < 0:
        return f"tiercache serves vllm>={FIRST}, and this is {version}: install a later one"
    differences = [*hook_differences(ours), *use_differences()] if age(version) else []
    if not differences:
        return ""
    more = f" (and {len(differences) - 1} more)" if differences[1:] else ""
    return f"vllm {version} is newer than {LAST}, which tiercache was tested with, and {differences[0]}{more}"


def untested() -> str:
    """A warning; empty with a version that was tested."""
    text = f"vllm {VERSION} is newer than {LAST}, which tiercache was tested with: its self-test has passed"
    return text if age() > 0 else ""


def hook_differences(ours: type) -> Iterator[str]:
    """What vLLM calls in another way than our class expects."""
    for name, value in vars(ours).items():
        if name in OWN or (name.startswith("_") and name != "__init__") or not _function(value):
            continue
        theirs = next((vars(parent)[name] for parent in ours.__mro__[1:] if name in vars(parent)), None)
        if theirs is None:
            yield f"does not call {name}"
        elif _function(theirs) and not _accepts(_function(value), _function(theirs)):
            yield f"calls {name} with other arguments"
    abstract = {name for parent in ours.__mro__[1:] for name in getattr(parent, "__abstractmethods__", ())}
    yield from (f"wants {name}" for name in sorted(abstract - vars(ours).keys()))


def _function(value: Any) -> Any:
    """The function behind a method, which has parameters; None for other attributes."""
    value = getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def _accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """True if we can be called as theirs is, by position or by name."""
    mine, other = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind is variable[0] for parameter in mine.values()):
        return True
    named = [name for name, parameter in other.items() if parameter.kind not in variable]
    needed = [name for name, parameter in mine.items() if parameter.default is parameter.empty]
    known = [name for name in mine if name in named]
    return known == named and {*needed} <= {*named, *(name for name in mine if mine[name].kind in variable)}


def use_differences() -> Iterator[str]:
    """What we use of vLLM and this version does not have, or not so."""
    for module, functions in CALLED.items():
        door = Door(module)
        for name, count in functions.items():
            function = getattr(door, name)
            try:
                inspect.signature(function).bind(*range(count))
            except (TypeError, ValueError):
                if f"{module}.{name}" not in MISSING:
                    yield f"{name} takes other arguments"
    for place, names in READ.items():
        module, _, name = place.rpartition(".")
        known = {member for kind in getattr(Door(module), name).__mro__ for member in _members(kind)}
        yield from (f"{name} has no {wanted}" for wanted in names.split() if wanted not in known)
    yield from (f"has no {name}" for name in dict.fromkeys(MISSING))


def _members(kind: type) -> Iterable[str]:
    """Attributes of a class's instances."""
    made = getattr(vars(kind).get("__init__"), "__code__", None)
    return {*vars(kind), *vars(kind).get("__annotations__", ()), *(made.co_names if made else ())}


def probe(pool: Pool, views: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError unless a block that is copied out of a pool and into another one of it is the same there.

    `views` are the memory by blocks, as vLLM sees it. For use before vLLM's: two blocks are zero afterwards.
    """
    for view in views:
        view[-1] = torch.randint(1, 100, view[-1].shape).to(view.dtype)
    copier, copied = make_copier(pool), np.zeros(pool.block_bytes, np.uint8)
    limit = Limit(time.monotonic() + PROBE_TIMEOUT_S)
    addresses, ids = np.array([copied.ctypes.data]), np.array([pool.num_blocks - 1, pool.num_blocks - 2])
    done = copier.copy_out(ids[:1], addresses, limit, copier.mark())
    done += copier.copy_in(addresses, ids[1:], limit, copier.mark())
    same = all(torch.equal(view[-1], view[-2]) and not view[-3:-2].any() for view in views)
    for view in views:
        view[-2:] = 0
    if done < 2 or not same:
        raise LayoutError(f"blocks of vllm {VERSION} are not where tiercache expects them: a copy of one differs")


def layer_views(kv_cache_config: Any, kv_caches: Mapping[str, Any], group: int) -> list[torch.Tensor]:
    """The memory of each layer of a KV cache group, by blocks."""
    layers = [kv_caches[name] for name in kv_cache_config.kv_cache_groups[group].layer_names]
    parts = [part for layer in layers for part in (layer if isinstance(layer, (list, tuple)) else [layer])]
    return [kv_cache_interface.group_kernel_blocks(part, kv_cache_config.num_blocks) for part in parts]


def _stand_aside(ours: type, line: str, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Take the hooks of a class away. Each of its objects logs the line, except those of workers."""
    replaced = vars(ours)["__init__"]
    for name in [name for name in vars(ours) if not name.startswith("_") or name == "__init__"]:
        delattr(ours, name)
    made: Any = getattr(ours, "__init__")  # noqa: B009 (of the base class)
    taken = inspect.signature(made).parameters

    @functools.wraps(replaced)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{name: value for name, value in options.items() if name in taken})
        join_vllm()
        if base.KVConnectorRole.WORKER not in arguments:
            logger.error(line)

    abstract = {name for parent in ours.__mro__[1:] for name in getattr(parent, "__abstractmethods__", ())}
    nothing = dict.fromkeys(abstract, lambda *arguments, **options: None)
    for name, answer in {**nothing, **answers, "__init__": __init__}.items():
        setattr(ours, name, answer)
    ours.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
