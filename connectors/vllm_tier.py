"""tiercache as a secondary tier below vLLM's own offloading.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000,
            "secondary_tiers": [{"type": "TierCacheTier", "module_path": "tiercache.connectors.vllm_tier"}]}}'

    GPU ◄─ vLLM's workers ─► rows of vLLM's CPU memory ◄─ this, in its scheduler ─► the daemon's DRAM, NVMe

vLLM stores every chunk that it computes here too, and loads chunks that its own memory lacks from here. It pins the
rows of a transfer until that is reported as ended, which happens after its last copy. Nothing here waits: slow work is
done in the background, and a failure is a miss. Settings, beside type and module_path, are those of
`TierCacheConnector` except `gds`; `load` has no effect here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tiercache.connector.connector import Connector
from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.connector.stores import StoreResult
from tiercache.connectors.vllm.compat import (
    VERSION,
    fit,
    join_vllm,
    locals_of_callers,
    probe,
    resolve_kv_cache_block_sizes,
    untested,
    window_in_chunks,
)
from tiercache.connectors.vllm.groups import (
    GroupPart,
    check_groups,
    check_steps,
    layer_specs,
    leaves_last_token,
    parts_of,
)
from tiercache.connectors.vllm.log import introduce
from tiercache.connectors.vllm.names import Names, check_hashes, lengths_of
from tiercache.connectors.vllm.orders import event_groups, name_blocks, of_group
from tiercache.connectors.vllm.settings import ConnectorSettings, absence
from tiercache.connectors.vllm.tier import (
    Chain,
    ChunkPlace,
    ChunkPlaces,
    ChunkRun,
    LoadJob,
    Orphan,
    StoreJob,
    TierLookups,
    has_ended,
    runs_of,
)
from tiercache.copies.pool import Pool, Segment
from tiercache.errors import ConfigError, DeadlineExceeded, ModelRefused, TierCacheError
from tiercache.protocol.messages import INSTANCE_BYTES, KEY_BYTES, MAX_KEYS
from tiercache.protocol.namespaces import NamespaceSpec

DRAIN_TIMEOUT_S = 60.0
MAX_ORPHANS = 64
REPAIRED_PER_STEP = 64
"""Chunks of a chain that one step of vLLM's offers again: as many as cost it some 100 us."""

logger = logging.getLogger("tiercache.connectors.vllm")


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. Used by vLLM's scheduler thread only."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self._groups: list[Connector] = []
        self._lookups: TierLookups | None = None
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._results: list[JobResult] = []  # of jobs that never began
        self.orphans: deque[Orphan] = deque(maxlen=MAX_ORPHANS)
        self._background = JobQueue("tiercache-jobs")
        join_vllm()
        try:
            self._begin(ConnectorSettings.read(settings))
        except TierCacheError as error:
            self._close()
            logger.error("vLLM's offloading is served without the cache: %s", error)

    def _begin(self, settings: ConnectorSettings) -> None:
        """Raises TierCacheError for what cannot be served."""
        if settings.gds != "off":
            raise ConfigError("gds is for TierCacheConnector, this tier copies to the memory of a CPU: leave it out")
        view, spec = self._primary_kv_view, self._offloading_spec
        rows, row_bytes = len(view), self.block_size_bytes
        self._caller = engine_of_caller()
        vllm_config, kv_cache_config, _ = self._caller
        self._parts: Sequence[GroupPart]
        self._parts, namespaces = zip(
            *make_namespaces(vllm_config, kv_cache_config, spec.config, row_bytes), strict=True
        )
        # Keep no array: vLLM frees its memory after our shutdown, and an array would prevent that.
        segment = Segment(np.asarray(view).ctypes.data, row_bytes, row_bytes)
        pool = Pool([segment], rows, "cpu", True, None)
        if warning := untested():
            probe(pool, [torch.from_numpy(np.asarray(view).reshape(rows, row_bytes))])
            logger.warning(warning)
        instance = os.urandom(INSTANCE_BYTES)

        def connected(name: str, namespace: NamespaceSpec, pool: Pool | None) -> Connector:
            return settings.connect(name=f"vllm tier {name}", namespace=namespace, pool=pool, instance=instance)

        self._chunk_tokens = namespaces[0].block_size
        self._hashes_per_chunk = self._chunk_tokens // resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
        self._places = ChunkPlaces(self._parts, self._chunk_tokens)
        named = event_groups(kv_cache_config)
        self._names = [named[part.group] if part.last else None for part in self._parts]
        for namespace in namespaces:
            self._groups.append(connected(namespace.group, namespace, pool))
        matcher = connected("lookups", namespaces[0], None)
        lengths = lengths_of(vllm_config)  # a tier does not see what the workers have built
        names = Names(vllm_config, settings.model_id, settings.salt, wait_s=0, lengths=lengths)
        names.read_later("vLLM's offloading")
        served = [group.namespace for group in self._groups]  # with the tenant
        longest = self._longest if leaves_last_token(kv_cache_config) else lambda request_id: MAX_KEYS
        self._lookups = TierLookups(matcher, served, names, settings.request_timeout_s, self._places, longest)
        introduce(matcher, 1)
        if why := absence(matcher):
            logger.warning("vLLM's offloading is served without the cache until that changes: %s", why)

    def _longest(self, request_id: str) -> int:
        """The most chunks of a request that vLLM can use, if it must compute the last token."""
        request = self._caller.request(request_id)
        return 0 if request is None else (request.num_tokens - 1) // self._chunk_tokens

    # --- requests and lookups --------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """A request has arrived. Its chunks in vLLM's own memory were stored here when they came there."""
        if self._lookups is not None:
            self._lookups.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See `TierLookups.lookup`."""
        return LookupResult.MISS if self._lookups is None else self._lookups.lookup(key, req_context)

    def on_request_finished(self, req_context: Any) -> None:
        """A request has ended."""
        if self._lookups is not None:
            self._lookups.remove(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """A step has been scheduled, and its loads have been submitted."""
        if self._lookups is not None:
            self._lookups.end_step(context.preempted_req_ids)

    # --- transfers -------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Load chunks that lookups have found."""
        lookup = None if self._lookups is None else self._lookups.take(job_metadata.req_context.req_id)
        if lookup is None:
            self._results.append(JobResult(job_metadata.job_id, False))
            return
        job = self._jobs[job_metadata.job_id] = LoadJob(job_metadata.req_context.req_id, lookup, len(job_metadata.keys))
        self._later(partial(self._begin_load, job, job_metadata))

    def submit_store(self, job_metadata: Any) -> None:
        """Store chunks that have come to vLLM's memory."""
        chain = None if self._lookups is None else self._lookups.chain(job_metadata.req_context)
        job = self._jobs[job_metadata.job_id] = StoreJob()
        if chain is None:
            job.begun = True
            return
        request = self._caller.request(job_metadata.req_context.req_id) if self._groups[0].wants_events else None
        self._later(partial(self._begin_store, job, job_metadata, chain, request))

    def _later(self, work: Callable[[], None]) -> None:
        """Run work in the background, at once."""
        self._background.later(work)
        self._background.begin()

    # --- in the background, some microseconds for each chunk

    def _begin_load(self, job: LoadJob, metadata: Any) -> None:
        parts: dict[int, tuple[ChunkRun, Transfer[int]]] = {}
        try:
            for run in self._runs(metadata):
                if run.part in parts:  # a hold on a match ends with one load: vLLM asks for the rest of a part again
                    job.left_out += run.keys
                else:
                    load = self._groups[run.part].load_async(job.lookup.ticket, run.rows, first=run.first)
                    parts[run.part] = run, load
        finally:
            job.parts, job.begun = list(parts.values()), True

    def _begin_store(self, job: StoreJob, metadata: Any, chain: Chain, request: Any) -> None:
        try:
            for run in self._runs(metadata, len(chain.hashes), chain.early):
                orphan = Orphan(run.part, chain, run.end)
                job.parts.append((orphan, self._store(run.part, chain, run.first, run.rows, request)))
            for place in [early for early in chain.early if early.position < len(chain.hashes)]:
                chain.early.remove(place)
                self.orphans.append(Orphan(place.part, chain, place.position + 1, place.position))
        finally:
            job.begun = True

    def _runs(self, metadata: Any, known: int = MAX_KEYS, early: set[ChunkPlace] | None = None) -> list[ChunkRun]:
        """The chunks of a job. Those that are not of the `known` first ones of the cache go to `early` instead.

        vLLM has whole blocks of one group before those of another make a block of the cache, which then has no key.
        """
        places = [self._places.of(key, metadata.req_context) for key in metadata.keys]
        if early is not None:
            without_key = {place for place in places if place is not None and place.position >= known}
            early |= without_key
            places = [None if place in without_key else place for place in places]
        return runs_of(places, metadata.chunk_ids.tolist(), metadata.keys)

    def _store(
        self, part: int, chain: Chain, first: int, rows: list[int], request: Any = None
    ) -> Transfer[StoreResult]:
        """Rows as chunks `first..` of a chain; of the chunks before them only the parent's key is needed."""
        base, end, events = max(0, first - 1), first + len(rows), None
        if request is not None and (name := self._names[part]) is not None:
            named = name_blocks(request, first, end, self._hashes_per_chunk, self._chunk_tokens)
            events = of_group(named, name, 0, len(rows))
        keys = chain.keys(end)[base * KEY_BYTES :]
        return self._groups[part].store_async(keys, rows, first=first - base, events=events)

    # --- the end of transfers

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs whose last copy has ended since the last call."""
        results, self._results = self._results, []
        for job_id, job in list(self._jobs.items()):
            if not has_ended(job):
                continue
            del self._jobs[job_id]
            results.append(job.result(job_id))
            if isinstance(job, StoreJob):
                self.orphans.extend(job.orphans())
            elif self._lookups is not None:
                self._lookups.ask_again(job.request_id, job.left_out)
                self._lookups.drop(job.lookup)
        return results

    def serve_external_requests(self, parent: Any) -> None:
        """Store chunks again that have lost their parents, together with these, as far as vLLM's memory has them.

        Otherwise a daemon that has dropped a prefix would get nothing that begins with it for as long as vLLM's memory
        keeps it, and vLLM keeps the most used prefixes forever. And store chunks that vLLM had before there was a key.
        """
        left = REPAIRED_PER_STEP
        while left > 0 and self.orphans and self._groups[0].available:
            left -= self._repair(parent, self.orphans.popleft(), left)

    def _repair(self, parent: Any, orphan: Orphan, most: int) -> int:
        """Store the first chunks of an orphan again, at most that many; returns how many were looked up."""
        number, chain, end, first = orphan
        context = ReqContext(f"tiercache {number} {chain.hashes[end - 1].hex()}")
        parent.on_new_request(context)
        held: list[bytes] = []
        last = min(end, first + most)
        for position in range(first, last):
            key = chain.vllm_key(ChunkPlace(number, position), self._parts[number])
            if key is None or parent.lookup(key, context) is not LookupResult.HIT:
                break
            held.append(key)
        if held:
            metadata = parent.create_store_job(held, context)
            job = self._jobs[metadata.job_id] = StoreJob()
            self._later(partial(self._begin_repair, job, orphan, metadata.chunk_ids.tolist()))
        parent.on_request_finished(context)
        if first + len(held) == last < end:
            self.orphans.appendleft(orphan._replace(first=last))
        return max(1, len(held))

    def _begin_repair(self, job: StoreJob, orphan: Orphan, rows: list[int]) -> None:
        """In the background. The tokens of these chunks are no longer known: KV events do not name them."""
        try:
            job.parts.append((None, self._store(orphan.part, orphan.chain, orphan.first, rows)))
        finally:
            job.begun = True

    # --- the end ---------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """End all transfers, because vLLM resets its memory, as it does when the weights are updated.

        Chunks found or stored so far are not used from here on. Blocks until no copy is in progress. Raises
        DeadlineExceeded if that cannot be known.
        """
        self._end_transfers(DRAIN_TIMEOUT_S)
        self._results = list(self.get_finished_jobs())
        self.orphans.clear()  # those of these jobs too: their keys are not those of what is computed from here on
        if self._lookups is not None:
            self._lookups.forget()

    def _end_transfers(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        begun = self._background.finish(timeout_s)
        transfers = [transfer for job in self._jobs.values() for _, transfer in job.parts]
        for transfer in transfers:
            transfer.void()
        if not begun:
            raise DeadlineExceeded(f"a job of vLLM's has not begun after {timeout_s:g} s")
        for transfer in transfers:
            if not transfer.wait(max(0.0, deadline_s - time.monotonic())):
                raise DeadlineExceeded(f"a copy to or from vLLM's memory has not ended after {timeout_s:g} s")

    def shutdown(self) -> None:
        """End all transfers and close the connection. Blocks for seconds; raises as `drain_jobs` does."""
        try:
            self._end_transfers(DRAIN_TIMEOUT_S)
        finally:
            self._close()

    def _close(self) -> None:
        self._background.close()
        if self._lookups is not None:
            self._lookups.close()
        for connector in self._groups:
            connector.close()
        self._groups.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        if self._lookups is not None:
            self._lookups.check_integrity()


def _refuse(tier: Any, job: Any, *more: Any) -> None:
    vars(tier).setdefault("_refused", []).append(JobResult(job.job_id, False))


ANSWERS: dict[str, Callable[..., Any]] = {
    "lookup": lambda *arguments: LookupResult.MISS,
    "on_new_request": lambda *arguments: RequestOffloadingContext(),
    "submit_load": _refuse,
    "submit_store": _refuse,
    "get_finished_jobs": lambda tier: tier.__dict__.pop("_refused", []),
}
"""Where vLLM runs as without a tier."""
fit(TierCacheTier, "vLLM's offloading", ANSWERS)


# --- namespaces --------------------------------------------------------------------------------------
#
# A row is one chunk of one KV cache group: the blocks of all workers, one after another. vLLM tells a tier how long a
# row is, and little of what determines the meaning of its bytes; the rest is in the configuration of the engine that
# makes the tier.


class Caller(NamedTuple):
    """The engine that makes a tier: its configuration, that of its KV caches, and its offloading scheduler."""

    vllm_config: Any
    kv_cache_config: Any
    scheduler: Any

    def request(self, request_id: str) -> Any:
        """vLLM's request of this id, or None: a tier is given no more than the id."""
        status = getattr(self.scheduler, "_req_status", {}).get(request_id)
        return getattr(status, "req", None)


def engine_of_caller() -> Caller:
    """The engine that is making a tier.

    vLLM gives a tier neither configuration: it gives the model's name, which says nothing of weights, revision or
    overrides. But it makes a tier from the constructor of a scheduler that has been given both, so they are on the
    stack, and so is the scheduler. Raises ModelRefused where they are not.
    """
    for known in locals_of_callers():
        vllm_config, kv_cache_config = known.get("vllm_config"), known.get("kv_cache_config")
        if isinstance(vllm_config, VllmConfig) and isinstance(kv_cache_config, KVCacheConfig):
            return Caller(vllm_config, kv_cache_config, known.get("self"))
    raise ModelRefused("this vLLM does not show which model a tier is for: use TierCacheConnector")


def make_namespaces(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int
) -> list[tuple[GroupPart, NamespaceSpec]]:
    """The parts of the KV cache groups, in chunks, and the namespace of each.

    Raises ModelRefused for what cannot be named or served.

    Args:
        offloading: vLLM's OffloadingConfig.
        row_bytes: length of a row of the offload memory.
    """
    check_hashes(vllm_config)
    unit = check_groups(vllm_config, kv_cache_config)
    check_steps(vllm_config, kv_cache_config)
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        raise ModelRefused("vLLM does not tell a tier which adapter a request uses: use TierCacheConnector for LoRA")
    if parallel.nnodes_within_dp > 1:
        raise ModelRefused("the offload memory of one node does not hold the blocks of all: use TierCacheConnector")
    if [group.group_id for group in offloading.groups] != list(range(len(groups))):
        raise ModelRefused("vLLM offloads only some of the model's KV cache groups: the tier is not used")
    blocks_per_chunk = offloading.cache.blocks_per_chunk
    extra = {
        "workers": f"tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}",
        "rows": f"{blocks_per_chunk} x {offloading.worker_kv_bytes_per_block}, "
        f"replicated {offloading.replicated_layout}, canonical {offloading.canonical_layout}",
        "pages": _pages(vllm_config, kv_cache_config),
        "device": _device(),
    }

    def window_chunks(spec: Any) -> int:
        """As many chunks as vLLM looks for: of a windowed group it stores no more than that either."""
        return int(window_in_chunks(spec, spec.block_size * blocks_per_chunk))

    namespaces = []
    for part in parts_of(kv_cache_config, window_chunks):
        group = groups[part.group]
        spec = next(iter(layer_specs(group).values()))
        name = f"{part.group} of {type(spec).__name__}"
        if part.every > 1:
            name += f" chunk {part.offset} of {part.every}"
        namespace = NamespaceSpec(
            engine=f"vllm/{VERSION} offload",
            layout=f"{offloading.kv_cache_layout} rows",
            dtype=offloading.model.dtype,
            block_size=unit * blocks_per_chunk,
            block_bytes=row_bytes,
            layers=len(group.layer_names),
            kv_heads=getattr(spec, "num_kv_heads", 0),
            head_dim=getattr(spec, "head_size", 0),
            group=name,
            quantization=str(getattr(spec, "kv_quant_mode", "none")),
            window_blocks=part.window,
            extra=extra,
        )
        namespaces.append((part, namespace))
    return namespaces


def _pages(vllm_config: Any, kv_cache_config: Any) -> str:
    """A hash of what else determines the place of a value in a row: layers, their order and specs, attention
    backends."""
    groups = [(group.layer_names, str(layer_specs(group))) for group in kv_cache_config.kv_cache_groups]
    placed = [tensor.layers for tensor in kv_cache_config.kv_cache_tensors]
    described = repr((groups, placed, vllm_config.attention_config))
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _device() -> str:
    """The kind of device: vLLM chooses an attention backend by it, and that how it packs a block."""
    if current_platform.is_cpu():
        amx = torch.cpu.get_capabilities().get("amx_tile", False)
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx {amx}"
    return f"{current_platform.device_type} {current_platform.get_device_name()}"
