"""tiercache as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TierCacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tiercache.connectors.vllm_v1"}'

This class only passes vLLM's calls to the half that they are for: `vllm/scheduler.py` decides, `vllm/worker.py` copies.
What cannot be served is logged in one line, and vLLM runs without a cache. Settings, in `kv_connector_extra_config`,
are the fields of `vllm/settings.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.connectors.vllm.compat import (
    CacheHitSource,
    base,
    come_before_writes,
    fit,
    join_vllm,
    layer_views,
    probe,
    register,
    resolve_kv_cache_block_sizes,
    untested,
)
from tiercache.connectors.vllm.costs import EngineCosts
from tiercache.connectors.vllm.groups import (
    check_groups,
    check_steps,
    leaves_last_token,
    make_pools,
    parts_of,
    replicated,
)
from tiercache.connectors.vllm.log import ConnectorStats, PromMetrics, RequestLog, introduce
from tiercache.connectors.vllm.names import Cards, Names, check_hashes
from tiercache.connectors.vllm.orders import Orders, RankForm, WorkerReport, event_groups
from tiercache.connectors.vllm.scheduler import RequestPlanner
from tiercache.connectors.vllm.settings import ConnectorSettings, absence
from tiercache.connectors.vllm.siblings import Roll, check_parent, come_first, parent_of_caller
from tiercache.connectors.vllm.stores import EngineFacts
from tiercache.connectors.vllm.weights import (
    RunnerTensors,
    Weights,
    describe_built,
    models_of,
    runner_of_caller,
    weights_stay,
)
from tiercache.connectors.vllm.worker import RankWorker
from tiercache.errors import ConfigError, TierCacheError
from tiercache.protocol.messages import INSTANCE_BYTES

logger = logging.getLogger("tiercache.connectors.vllm")


class TierCacheConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.planner: RequestPlanner | None = None
        self.worker: RankWorker | None = None
        self._form = RankForm([])
        self._begun: Any = None  # orders that have been begun
        self._known = False  # the scheduler's half has the forms of all ranks
        self._roll: Roll | None = None  # beside other connectors, until then
        self._reset_due = False  # vLLM's caches were reset before then
        join_vllm()
        # A failed load is recomputed: no request may fail because its cache did.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._parent = parent_of_caller(self)
        try:
            self._settings = ConnectorSettings.read(self._kv_transfer_config.kv_connector_extra_config)
            if self._parent is not None:
                check_parent(self._parent)
            check_hashes(vllm_config)
            check_groups(vllm_config, kv_cache_config)
            if role is base.KVConnectorRole.SCHEDULER:
                check_steps(vllm_config, kv_cache_config)
        except TierCacheError as error:
            self._form = RankForm([], str(error))
        if self._parent is not None and role is base.KVConnectorRole.SCHEDULER:
            if self._form.problem:
                self._start([])
            else:
                self._roll = Roll(vllm_config.parallel_config.world_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss."""
        return False

    def _connect(self, **options: Any) -> Connector:
        name = f"vllm {self.role.name.lower()} {self._vllm_config.parallel_config.rank}"
        engine = str(self._kv_transfer_config.engine_id).encode()
        instance = hashlib.blake2b(engine, digest_size=INSTANCE_BYTES).digest()
        return self._settings.connect(name=name, instance=instance, **options)

    # --- the worker's half -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's KV memory."""
        if self._form.problem:
            return
        groups: list[Connector] = []
        parallel = self._vllm_config.parallel_config
        try:
            hook = self.handle_preemptions if self._parent is None else come_first(self._parent, self)
            # Where vLLM moves experts between ranks, theirs are not watched: a change to them changes other weights
            # too.
            runner = runner_of_caller()
            come_before_writes(runner, hook)
            weights = Weights(RunnerTensors(runner, experts=not parallel.enable_eplb))
            built = describe_built(models_of(runner))
            parts = parts_of(self._kv_cache_config)
            pools = make_pools(self._vllm_config, self._kv_cache_config, kv_caches, built)
            for part, (spec, pool) in zip(parts, pools, strict=True):
                if untested():
                    probe(pool, layer_views(self._kv_cache_config, kv_caches, part.group))
                direct = {"gds": self._settings.gds, "gds_store": self._settings.gds_store}
                groups.append(self._connect(namespace=spec, pool=pool, **direct))
        except TierCacheError as error:
            self._form = RankForm([], str(error))
            for connector in groups:
                connector.close()
            return
        first = parallel.rank % parallel.tensor_parallel_size == 0
        of_model = self._kv_cache_config.kv_cache_groups
        writers = [first or not replicated(self._vllm_config, of_model[part.group]) for part in parts]
        names = None
        if parallel.rank == 0:
            named = event_groups(self._kv_cache_config)
            names = [named[part.group] if part.last else None for part in parts]
        self.worker = RankWorker(groups, writers, names, weights, parallel.rank)
        specs = [connector.namespace for connector in groups]
        self._form = RankForm(specs, absence=next(filter(None, map(absence, groups)), ""))

    def unregister_kv_caches(self) -> None:
        """vLLM is about to take its KV memory away, for a sleep. Afterwards the memory is at the same addresses."""
        if self.worker is not None:
            self.worker.end_copies()

    def get_handshake_metadata(self) -> Any:
        """For the scheduler's half: the form of this rank's blocks. Beside other connectors the handshake is theirs."""
        return self._form if self._parent is None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called before every step, and twice beside other connectors and by the second model runner of vLLM."""
        if kv_connector_metadata is self._begun:
            return
        self._begun, self._known = kv_connector_metadata, kv_connector_metadata.known
        if self.worker is not None:
            self.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads have begun before the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a step begins only when its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored, after the step."""

    def wait_for_save(self) -> None:
        """Nothing: no step waits for a store."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that have ended."""
        if self.worker is None:
            return base.KVConnectorTransferResults()
        orders = self._connector_metadata
        ended, failed = self.worker.ended_loads(isinstance(orders, Orders) and orders.idle)
        return base.KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed."""
        return self.worker.take_bad_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        """Stores and loads that have ended."""
        report = self.worker.report() if self.worker is not None else None
        if self._parent is None or self._known:
            return report
        report = report or WorkerReport()
        report.forms[self._vllm_config.parallel_config.rank] = self._form
        return report

    def get_kv_connector_stats(self) -> Any:
        """Blocks moved, and blocks not loaded because of their cost, since the last call."""
        half = self.worker or self.planner
        counts = half.counters() if half is not None else {}
        return ConnectorStats(counts) if counts else None

    # --- the scheduler's half --------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The forms of all ranks' blocks: from here on there is a cache."""
        if self._parent is None:
            self._start([metadata[rank] for rank in sorted(metadata)])

    def _start(self, ranks: list[RankForm]) -> None:
        """Connect the scheduler's half. `ranks` are the forms of all ranks' blocks."""
        problem = next((form.problem for form in (self._form, *ranks) if form.problem), "")
        try:
            if problem:
                raise ConfigError(problem)
            _, hash_size = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)
            connector = self._connect(namespace=ranks[0].specs[0])
        except TierCacheError as error:
            logger.error("vLLM is served without the cache: %s", error)
            return
        settings = self._settings
        names = Names(self._vllm_config, settings.model_id, settings.salt, wait_s=settings.request_timeout_s)
        specs = [spec for form in ranks for spec in form.specs]
        names.on_use = Cards(self._vllm_config, connector, specs, hash_size).add
        block_size = connector.namespace.block_size
        engine = EngineFacts(
            [form.specs for form in ranks],
            per_block=block_size // hash_size,
            batches=self._vllm_config.max_concurrent_batches,
            media_ids=settings.media_ids == "content",
            parts=parts_of(self._kv_cache_config),
            leaves_last=leaves_last_token(self._kv_cache_config),
            alone=self._parent is None,
        )
        costs = None
        if settings.load == "auto":
            block_bytes = max(sum(spec.block_bytes for spec in form.specs) for form in ranks)
            costs = EngineCosts(block_size, block_bytes, engine.batches, partial=not engine.windowed)
        log, introduction = RequestLog(settings.log_requests), partial(introduce, connector, len(ranks))
        self.planner = RequestPlanner(connector, engine, names, self._kv_cache_manager, costs, log, introduction)
        if self._reset_due:
            self.planner.reset()
        if warning := untested():
            logger.warning(warning)
        for why in dict.fromkeys(filter(None, (absence(connector), *(form.absence for form in ranks)))):
            logger.warning("vLLM is served without the cache until that changes: %s", why)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._roll is not None:
            self._roll.add(request)
        if self.planner is not None:
            self.planner.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of a request can be loaded, always asynchronously."""
        if self._roll is not None and self._roll.waits(request.request_id):
            return None, False
        if self.planner is None:
            return 0, False
        tokens = self.planner.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        if self.planner is not None:
            self.planner.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """DRAM or NVMe."""
        if self.planner is None:
            return {}
        return self.planner.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """A step has been scheduled."""
        if self.planner is None:
            return Orders(known=self._roll is None)
        return self.planner.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Results of the workers."""
        report = connector_output.kv_connector_worker_meta
        if self._roll is not None and report is not None and (ranks := self._roll.call(report)):
            waiting, self._roll = self._roll.waiting.values(), None
            self._start(ranks)
            for request in waiting:
                self.on_new_request(request)
        if self.planner is None:
            return
        if report is not None:
            self.planner.reported(report)
        if connector_output.invalid_block_ids:
            self.planner.lost(connector_output.invalid_block_ids)
        if connector_output.finished_recving:
            self.planner.loads_ended(connector_output.finished_recving, connector_output.failed_recving)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks are never held back: see `vllm/stores.py`."""
        if self._roll is not None:
            self._roll.remove(request.request_id)
        return False, self.planner.finished(request) if self.planner is not None else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: MultiConnector calls this if a sibling does not know KV cache groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """vLLM's caches are reset, as after an update of the weights, or because vLLM goes to sleep."""
        if self.planner is not None:
            self.planner.reset(weights_stay=weights_stay())
        else:
            self._reset_due = True
        return True

    def shutdown(self) -> None:
        """End transfers and close the connection. Blocks for seconds at most."""
        for half in (self.worker, self.planner):
            if half is not None:
                half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """For vLLM's log lines."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        """For vLLM's Prometheus page."""
        return PromMetrics(*args)


ANSWERS: dict[str, Callable[..., Any]] = {
    "get_num_new_matched_tokens": lambda *arguments: (0, False),
    "build_connector_meta": lambda *arguments: base.KVConnectorMetadata(),
    "request_finished_all_groups": lambda *arguments: (False, None),
}
"""Where vLLM runs as without a connector."""
if fit(TierCacheConnector, "vLLM", ANSWERS):
    register(TierCacheConnector)
