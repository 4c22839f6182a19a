"""The SGLang that makes a storage backend: its tree of prefixes, its updates of weights, and what its ranks share."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from sglang.srt.managers.scheduler_components import weight_updater as sleep
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.utils.weight_checker import WeightChecker
from tiercache.protocol.messages import KEY_BYTES

UPDATES = (
    (WeightUpdater, "update_weights_from_disk"),
    (WeightUpdater, "load_weights_from_distributed"),
    (WeightUpdater, "update_weights_from_tensor"),
    (WeightUpdater, "update_weights_from_ipc"),
    (WeightChecker, "_reset_tensors"),
)
"""Where SGLang changes the weights of a model that it serves. The last one puts random numbers in their place."""


class Watcher(Protocol):
    """Is told of changes."""

    def weights_change(self) -> None:
        """The weights are about to change."""

    def session_begins(self, model: int) -> None:
        """The weights of a model are about to change, in several steps."""

    def session_ends(self, model: int) -> None:
        """The weights of a model are final again."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


class BackendMaker(NamedTuple):
    """What makes a storage backend: SGLang's tree of prefixes, and whether the engine is just starting."""

    tree: Any
    starting: bool

    def mend_prefixes(self) -> None:
        """Have SGLang say all of what the pages that it looks for follow.

        It leaves out the pages of the last node of the tree that a request has matched, and no page of a chain can be
        found without the one before it.
        """
        original = getattr(self.tree, "get_prefix_hash_values", None)
        if original is None or hasattr(original, "is_whole"):
            return

        def whole(node_id: Any) -> list[str]:
            return [*original(node_id), *(self.tree.tree_core.get_hash_values(node_id) or ())]

        whole.is_whole = True  # type: ignore[attr-defined]
        self.tree.get_prefix_hash_values = whole

    @property
    def stops(self) -> bool:
        """True if SGLang waits for the threads of its storage to end: it gives them 10 s, and ends if they take longer.

        It does so when it flushes, and the threads would first finish the whole request that they are at.
        """
        controller = getattr(self.tree, "cache_controller", None)
        return controller is not None and bool(controller.storage_stop_event.is_set())

    @property
    def says_prefixes(self) -> bool:
        """True if SGLang says what pages follow."""
        return bool(getattr(self.tree, "hicache_storage_pass_prefix_keys", True))

    def windows(self) -> dict[str, int]:
        """For each pool of which only the end of a prefix is needed, how many pages that is."""
        windows = {"mamba": 1}
        for component in getattr(self.tree, "components", {}).values():
            if pages := getattr(component, "full_window_pages", 0):
                windows[str(component.pool_name)] = pages
        if "swa" in windows:
            windows["draft_swa"] = windows["swa"]
        return windows

    def patience_s(self, pages: int) -> float:
        """How long SGLang waits for a prefetch of that many pages."""
        if getattr(self.tree, "prefetch_stop_policy", "") != "timeout":
            return float("inf")
        return float(self.tree.prefetch_timeout_base + pages * self.tree.prefetch_timeout_per_page)


def find_maker() -> BackendMaker:
    """The tree whose method makes a backend: SGLang does not pass it on, nor the length of windows."""
    tree, starting = None, False
    frame = inspect.currentframe()
    while frame is not None:
        starting = starting or frame.f_code.co_name == "init_hicache"
        for name in ("self", "cache", "tree_cache"):
            if isinstance(frame.f_locals.get(name), UnifiedRadixCache):
                tree = frame.f_locals[name]
        frame = frame.f_back
    return BackendMaker(tree, starting)


def hand_over_drafts(backend: type) -> None:
    """Have every rank hand the drafts of a model with MLA to such a backend, if SGLang divides their heads among ranks.

    Otherwise the first rank alone would store its heads, and no prefix would be found: the others lack theirs. SGLang
    does the same for its Mooncake backend.
    """
    original = HybridCacheController.should_backup
    if hasattr(original, "tells_tiercache"):
        return

    @functools.wraps(original)
    def should_backup(controller: Any, transfer: Any) -> bool:
        if original(controller, transfer):
            return True
        if transfer.name not in (PoolName.DRAFT, PoolName.DRAFT_SWA):
            return False
        storage = controller.storage_backend
        entry = controller.mem_pool_host.entry_map.get(transfer.name)
        ours = isinstance(getattr(storage, "_backend", storage), backend)  # SGLang may wrap it to inject faults
        return ours and entry is not None and isinstance(entry.host_pool, MHATokenToKVPoolHost)

    should_backup.tells_tiercache = True  # type: ignore[attr-defined]
    HybridCacheController.should_backup = should_backup


def random_of_engine() -> str:
    """Random digits that all tensor parallel ranks of this engine get. All of them must ask; blocks until they do."""
    digits = [os.urandom(KEY_BYTES).hex()]
    parallel = get_parallel()
    if parallel.tp_size > 1:
        group = parallel.tp_group
        torch.distributed.broadcast_object_list(digits, src=group.ranks[0], group=group.cpu_group)
    return digits[0]


def watch_updates(watcher: Watcher) -> None:
    """Tell of every change of weights in this process, before it begins."""
    _watchers.add(watcher)
    if hasattr(WeightUpdater.begin_weight_update, "tells_tiercache"):
        return
    for owner, name in UPDATES:
        _tell_before(owner, name, lambda _: _tell("weights_change"))
    _tell_before(WeightUpdater, "begin_weight_update", lambda updater: _tell("session_begins", id(updater)))
    _tell_before(sleep, "_export_static_state", _tell_if_lost)
    end = WeightUpdater.end_weight_update

    @functools.wraps(end)
    def end_and_tell(updater: Any, *arguments: Any, **options: Any) -> Any:
        result = end(updater, *arguments, **options)
        _tell("session_ends", id(updater))
        return result

    WeightUpdater.end_weight_update = end_and_tell


def unwatch_updates(watcher: Watcher) -> None:
    """Tell it no longer."""
    _watchers.discard(watcher)


def _tell(what: str, *arguments: Any) -> None:
    for watcher in tuple(_watchers):
        getattr(watcher, what)(*arguments)


def _tell_before(owner: Any, name: str, tell: Callable[[Any], None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def told(subject: Any, *arguments: Any, **options: Any) -> Any:
        tell(subject)
        return method(subject, *arguments, **options)

    told.tells_tiercache = True  # type: ignore[attr-defined]
    setattr(owner, name, told)


def _tell_if_lost(_: Any) -> None:
    """Weights that are released from the GPU without a backup are gone: others must come in their place."""
    arguments = get_server_args()
    if arguments.enable_memory_saver and not arguments.enable_weights_cpu_backup:
        _tell("weights_change")
