"""vLLM's own CPU offloading, made to run where vLLM runs on a CPU: its scheduler and manager, and a copy by torch.

vLLM's worker copies with CUDA and refuses a CPU. This one copies pages in a thread of its own, as fast as one
thread of torch can, so that the native tier can be measured beside ours, and ours below it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies pages between vLLM's KV tensors and tensors of as many pages as the tier has."""

    def __init__(self, own: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
        self._own = own
        self._kept = kept
        self._thread = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[None]] = {}

    def _submit(self, job_id: int, source: list[Any], from_ids: Any, target: list[Any], to_ids: Any) -> bool:
        sources, targets = torch.from_numpy(from_ids.copy()), torch.from_numpy(to_ids.copy())

        def copy() -> None:
            for taken, given in zip(source, target, strict=True):
                given[targets] = taken[sources]

        self._jobs[job_id] = self._thread.submit(copy)
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._own, src_spec.block_ids, self._kept, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._kept, src_spec.block_ids, self._own, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        for job_id in ended:
            self._jobs.pop(job_id).result()
        return [TransferResult(job_id, True) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].result()


class MemcpySpec(CPUOffloadingSpec):
    """The native CPU tier with that worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            own = [cache.tensor for cache in kv_caches.tensors]
            # Written once: else the first stores would pay for the page faults.
            kept = [torch.zeros(self.num_chunks, tensor.shape[1], dtype=tensor.dtype) for tensor in own]
            self._worker = MemcpyWorker(own, kept)
        return self._worker


class MemcpyTieringSpec(TieringOffloadingSpec):
    """The native CPU tier with that worker, in memory that the scheduler has too, and with tiers below it."""

    def get_manager(self) -> OffloadingManager:
        if not self._manager:
            super().get_manager()
            # The worker has it open by now: without a name nothing is left to clean up after a kill.
            os.unlink(self._scheduler_mmap.mmap_path)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                self._engine_id,
                self.num_chunks,
                self.config.parallel.rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            own = [cache.tensor for cache in kv_caches.tensors]
            self._worker = MemcpyWorker(own, [region.create_next_worker_view(tensor.shape[1]) for tensor in own])
        return self._worker
