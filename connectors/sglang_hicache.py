"""tiercache as a storage backend of SGLang's HiCache.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "tiercache",
            "module_path": "tiercache.connectors.sglang_hicache", "class_name": "TierCacheHiCache",
            "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

    GPU ◄─ SGLang ─► pages of its host memory ◄─ this, in each of its schedulers ─► the daemon's DRAM, NVMe

SGLang asks how much of a prompt is stored, gives places in its host memory for that, and has them filled; pages that it
computes come to its host memory first, and from there here. It calls from threads of its own, which may wait: each call
has a deadline, and a failure is a miss.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from prometheus_client import Counter

from tiercache.connector.connector import Connector, connect
from tiercache.connector.outcomes import COUNTERS
from tiercache.connectors.sglang.settings import HiCacheSettings
from tiercache.connectors.sglang.version import VERSION, check_version, of_served_versions
from tiercache.copies.pool import Pool
from tiercache.errors import ConfigError, LayoutError, ModelRefused, TierCacheError
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS, Peek
from tiercache.protocol.namespaces import NamespaceSpec

with of_served_versions():
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

    from tiercache.connectors.sglang.engine import (
        BackendMaker,
        find_maker,
        hand_over_drafts,
        random_of_engine,
        unwatch_updates,
        watch_updates,
    )
    from tiercache.connectors.sglang.names import PageNames
    from tiercache.connectors.sglang.pools import HostPool, form_of, is_replicated, pool_of

KV = "kv"
GB = 1e9

logger = logging.getLogger("tiercache.connectors.sglang")


class TierCacheHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module. Made by SGLang, which calls it from the threads of its storage."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self.pools: dict[str, HostPool] = {}
        self._refused = ""
        self._said: set[str] = set()
        self.names: PageNames | None = None
        self.connector: Connector | None = None
        self._host: Any = None
        self._metrics = StorageMetrics()
        self._published: dict[str, int] = {}
        self.maker = BackendMaker(None, starting=False)
        try:
            check_version()
        except TierCacheError as error:
            self._refuse(error)
            return
        self.maker = find_maker()
        engine = random_of_engine()  # before anything that may fail on one rank only
        try:
            self._settings = HiCacheSettings.read(storage_config.extra_config or {})
            if storage_config.dcp_size > 1:
                raise ConfigError("pages of decode context parallelism are not served: start without it")
            self.names = PageNames(get_server_args(), self._settings, engine, known=self.maker.starting)
            watch_updates(self.names)
            self.maker.mend_prefixes()
            hand_over_drafts(TierCacheHiCache)
        except TierCacheError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._refused = str(error)
        logger.error("SGLang is served without the cache: %s", error)

    # --- SGLang's host memory --------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of K and V. When SGLang empties it, it has emptied its tree, and all transfers have ended."""
        super().register_mem_pool_host(mem_pool_host)
        self._host, clear = mem_pool_host, mem_pool_host.clear

        def cleared() -> None:
            clear()
            if self.names is not None:
                self.names.emptied()

        mem_pool_host.clear = cleared
        self._add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, or the first one again."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def _add(self, name: str, host: Any) -> None:
        if self._refused or name in self.pools:
            return
        try:
            if name != KV and name.endswith("swa") and name not in self.maker.windows():
                raise ModelRefused(f"this SGLang does not show how long the window of its {name} pool is")
            pool = pool_of(name, host)
            window = self.maker.windows().get(name, 0)
            form = form_of(name, host, pool, self._config, self._host.page_size, window, VERSION)
            stores = bool(self._config.is_storage_writer) or not is_replicated(host, self._config)
            self.pools[name] = HostPool(self._connected(form, pool), host.page_size, stores)
        except TierCacheError as error:
            self._refuse(error)

    def _connected(self, form: NamespaceSpec, pool: Pool) -> Connector:
        settings = self._settings
        if self.connector is not None:
            return self.connector.sibling(form.of_tenant(settings.tenant) if settings.tenant else form, pool)
        self.connector = connect(
            settings.address or None,
            namespace=form,
            pool=pool,
            name=f"sglang rank {self._config.tp_rank}",
            tenant=settings.tenant,
            load_timeout_s=settings.load_timeout_s,
            request_timeout_s=settings.request_timeout_s,
        )
        return self.connector

    # --- lookups ---------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored. Those on NVMe begin to come to DRAM."""
        return self._count(keys, [KV], extra_info)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that all pools can restore: all of its pages, or the window at its end."""
        transfers = [one for one in pool_transfers or () if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        pools = list(dict.fromkeys([KV, *(str(one.name) for one in transfers)]))
        pages = self._count(keys, pools, extra_info)
        trailing = any(one.hit_policy == PoolHitPolicy.TRAILING_PAGES for one in transfers)
        return PoolTransferResult(pages, dict.fromkeys(pools, pages), [pages] * (pages > 0) if trailing else None)

    def _count(self, hashes: list[str], names: list[str], extra_info: Any = None) -> int:
        before = _prefix_of(extra_info)
        packed = self._packed([*before, *hashes][:MAX_KEYS])
        if not packed or any(name not in self.pools for name in names):
            return 0
        connectors = [self.pools[name].connector for name in names]
        specs = [one.namespace for one in connectors]
        total = len(packed) // KEY_BYTES
        found = total if self._all_in_dram(packed, specs) else connectors[0].prefetch(packed, namespaces=specs)
        return max(0, found - len(before))

    def _all_in_dram(self, packed: bytes, specs: list[NamespaceSpec]) -> bool:
        """True if there is nothing to promote, and nothing to look for in other stores; at a quarter of the cost."""
        assert self.connector is not None
        try:
            session = self.connector.client.session()
            numbers = [session.namespace_id(spec) for spec in specs]
            found = session.call(Peek, namespaces=numbers, keys=packed).dram_blocks
        except TierCacheError:
            return False
        return found == len(packed) // KEY_BYTES

    def _packed(self, hashes: list[str]) -> bytes:
        """The keys of pages; empty while there are no names."""
        if self.names is None or self._refused or self.maker.stops or not (root := self.names.root()):
            return b""
        if not self.maker.says_prefixes:
            self._say(
                "SGLang does not say what a page follows: set hicache_storage_pass_prefix_keys to true in "
                "--hicache-storage-backend-extra-config"
            )
            return b""
        try:
            return self.names.keys(root, hashes)
        except ValueError as error:
            self._say(str(error))
            return b""

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("a miss: %s", what)

    # --- transfers -------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill places in the host memory; those of pages that are not reported as good hold anything."""
        return self._get(KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for places in several pools."""
        results: dict[str, list[bool]] = {}
        for one in transfers:
            good = self._get(str(one.name), one.keys or [], one.host_indices, extra_info)
            results.setdefault(one.name, []).extend(good)
        return results

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages that follow those of `extra_info.prefix_keys`."""
        return self._set(KV, keys, host_indices, extra_info)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1`, from several pools."""
        results: dict[str, list[bool]] = {}
        for one in transfers:
            stored = self._set(str(one.name), one.keys or [], one.host_indices, extra_info)
            results.setdefault(one.name, []).extend(stored)
        return results

    def _get(self, name: str, hashes: list[str], indices: Any, extra_info: Any) -> list[bool]:
        before = _prefix_of(extra_info)
        pool, keys = self.pools.get(name), self._packed([*before, *hashes])
        if pool is None or not keys or not hashes:
            return [False] * len(hashes)
        begin_s, good = time.perf_counter(), 0
        try:
            pages = pool.pages(indices, len(hashes))  # first, as it may fail: a match has to be ended by a load
            match = pool.connector.match(keys)
            timeout_s = min(self._settings.load_timeout_s, self.maker.patience_s(len(hashes)))
            pages = pages[: max(0, match.blocks - len(before))]
            good = pool.connector.load(match, pages, first=len(before), timeout_s=timeout_s)
        except LayoutError as error:
            self._say(str(error))
        if good and self._config.enable_storage_metrics:
            self._metrics.prefetch_pgs.append(good)
            self._metrics.prefetch_bandwidth.append(_speed(good * pool.connector.namespace.block_bytes, begin_s))
        return [True] * good + [False] * (len(hashes) - good)

    def _set(self, name: str, hashes: list[str], indices: Any, extra_info: Any) -> list[bool]:
        pool, before = self.pools.get(name), _prefix_of(extra_info)
        if pool is not None and not pool.stores:
            return [True] * len(hashes)  # another rank does
        parent = before[-1:]
        keys = self._packed([*parent, *hashes])
        if pool is None or not keys or not hashes:
            return [False] * len(hashes)
        begin_s, kept = time.perf_counter(), 0
        try:
            pages = pool.pages(indices, len(hashes))
            result = pool.connector.store(keys, pages, first=len(parent))
            kept = result.stored + result.present
        except LayoutError as error:
            self._say(str(error))
        if kept and self._config.enable_storage_metrics:
            self._metrics.backup_pgs.append(kept)
            self._metrics.backup_bandwidth.append(_speed(kept * pool.connector.namespace.block_bytes, begin_s))
        return [True] * kept + [False] * (len(hashes) - kept)

    # --- the interface for single pages, which SGLang uses without interface_v1 ----------------------

    def exists(self, key: str) -> bool:
        """True if the page is stored."""
        return self._count([key], [KV]) > 0

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores nothing."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores nothing."""
        return False

    # --- operators -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all pages of this form, those of other engines too. Raises TierCacheError, after all were tried."""
        failed = list[TierCacheError]()
        for pool in self.pools.values():
            try:
                pool.connector.flush()
            except TierCacheError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def get_stats(self) -> Any:
        """Pages and speeds of transfers since the last call, for SGLang's metrics. Our counts go there too."""
        metrics, self._metrics = self._metrics, StorageMetrics()
        totals = [pool.connector.counters for pool in self.pools.values()]
        for name in COUNTERS:
            total = sum(counts[name] for counts in totals)
            counter(name).inc(total - self._published.get(name, 0))
            self._published[name] = total
        return metrics

    def close(self) -> None:
        """End all transfers and the connection."""
        if self._host is not None:
            del self._host.clear
            self._host = None
        self.pools.clear()
        if self.names is not None:
            unwatch_updates(self.names)
        if self.connector is not None:
            self.connector.close()
            self.connector = None


_counters: dict[str, Counter] = {}


def counter(name: str) -> Counter:
    """SGLang's metric for one of the connector's counts."""
    if name not in _counters:
        _counters[name] = Counter(
            f"sglang:tiercache_{name}", f"{name.replace('_', ' ')}, as tiercache's connector counts them."
        )
    return _counters[name]


def _prefix_of(extra_info: Any) -> list[str]:
    """Hashes of the pages before those of a call: none at the root."""
    return getattr(extra_info, "prefix_keys", None) or []


def _speed(size: int, begin_s: float) -> float:
    return size / GB / max(1e-9, time.perf_counter() - begin_s)
