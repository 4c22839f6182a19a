"""CUDA copies: asynchronous, between the blocks of a device's pool and frames in host memory.

Only processes that keep KV blocks on a GPU load this. The method (`choose_method`) depends on the pieces of a block:

    DIRECT      pool ═══ DMA ═══ frame                  pieces from 28 KiB: block-first pools
    STAGED      pool ── kernel ── staging ═══ DMA ═══ frame    many small pieces: layer-first pools
    ZERO_COPY   pool ── kernel over the bus ── frame    whole blocks smaller than that

Loads and stores have a stream each. The memory of a copy belongs to it until it is `done()`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.copies.copy_plan import (
    DMA_MIN_BYTES,
    Addresses,
    CopyRuns,
    Method,
    Segments,
    block_pieces,
    check_block_ids,
    choose_method,
    merge_runs,
    split_runs,
)
from tiercache.copies.cuda_driver import Driver, beside_captures, driver
from tiercache.copies.cuda_lane import CudaCopy, Lane
from tiercache.copies.host_memory import HostMemory, process_memory
from tiercache.errors import ArenaError, LayoutError

if TYPE_CHECKING:
    import torch

    from tiercache.kernels import block_copy

log = logging.getLogger("tiercache.cuda")

STAGING_BYTES = 32 << 20
"""Device memory for staging, for loads and stores each, if the pool needs it."""


class CudaCopier:
    """Copies blocks between one device's pool and frames in host memory, in both directions.

    Thread-safe. Submit nothing while a CUDA graph is being captured on the device: in the graph it would run with every
    replay. `mark` refuses a stream that is being captured, and so do copies without an `after`; any other stream may be
    captured by another thread, for torch hands out its streams again after 32. Copies in progress, and waiting for
    them, do not disturb a capture.
    """

    def __init__(
        self,
        device: int | str,
        segments: Segments,
        num_blocks: int | None = None,
        *,
        method: Method | None = None,
        staging_bytes: int = STAGING_BYTES,
        memory: HostMemory = process_memory,
        owner: object = None,
    ) -> None:
        """Prepare streams, and the kernels if such a pool needs them (a second or so, once).

        Args:
            device: the CUDA device that holds the pool: `cuda:1`, or its index.
            segments: where the pieces of the blocks are.
            num_blocks: ids are checked to be below this; with None they are the caller's to check,
                and a wrong one reads or writes outside the pool.
            method: None chooses for each call.
            memory: knows which frames are registered; others are copied too, but slowly, and a
                store blocks.
            owner: whatever must stay alive while the pool is in use, such as its tensors.

        Raises LayoutError without CUDA, or for segments that make no pool.
        """
        if not segments or any(not 0 < length <= stride for _, stride, length in segments):
            raise LayoutError("a pool has segments, of at least 1 byte and at most their stride")
        self._driver = require_cuda()
        import torch

        name = f"cuda:{device}" if isinstance(device, int) else device
        self.device = torch.empty(0, device=name).device  # through a tensor: `cuda` gets its index
        self.segments = tuple(segments)
        self.num_blocks = num_blocks
        self.block_bytes = sum(length for _, _, length in segments)
        self._memory = memory
        self._method = method
        self._owner = owner
        self._kernels: Any = None
        self._table: block_copy.PoolTable | None = None
        with torch.cuda.device(self.device):
            self._loads, self._stores = Lane(self.device), Lane(self.device)
            small = self.block_bytes / len(segments) < DMA_MIN_BYTES
            if method in (Method.STAGED, Method.ZERO_COPY) or (method is None and small):
                self._prepare_kernels(max(1, staging_bytes // self.block_bytes))

    def mark(self) -> torch.cuda.Event:
        """An event behind all work of the caller's current stream so far: the `after` of a copy.

        Raises LayoutError while that stream is being captured.
        """
        import torch

        with torch.cuda.device(self.device), beside_captures():
            _refuse_capture()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record(torch.cuda.current_stream(self.device))
        return event

    def copy_in(
        self,
        frame_addresses: Sequence[int] | Addresses,
        block_ids: Sequence[int] | Addresses,
        after: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Load: frame i into block `block_ids[i]`. Ids must differ.

        The copies start after `after` (or after what the caller's current stream has been given so
        far), since kernels in flight may still read the blocks' old contents. Does not block if the
        frames are registered. Raises LayoutError for ids that are not in the pool, and while a stream
        that it should follow is being captured.
        """
        return self._start(self._loads, frame_addresses, block_ids, after, load=True)

    def copy_out(
        self,
        block_ids: Sequence[int] | Addresses,
        frame_addresses: Sequence[int] | Addresses,
        after: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Store: block `block_ids[i]` into frame i.

        The copies start after `after`, an event recorded behind the kernels that write the blocks
        (or after what the caller's current stream has been given so far). Does not block if the
        frames are registered. Raises LayoutError for ids that are not in the pool, and while a stream
        that it should follow is being captured.
        """
        return self._start(self._stores, frame_addresses, block_ids, after, load=False)

    def fence(self, *, load: bool) -> CudaCopy:
        """A copy that is done when everything submitted in one direction so far is over.

        For a caller that has lost track of a copy, because an exception came between it and its result.
        """
        import torch

        lane = self._loads if load else self._stores
        with lane.lock, torch.cuda.device(self.device), beside_captures():
            return lane.mark("")

    def idle(self) -> bool:
        """True if everything submitted is over, so that the pool may be freed. Never blocks."""
        return self._loads.last.done() and self._stores.last.done()

    def _start(
        self,
        lane: Lane,
        frame_addresses: Sequence[int] | Addresses,
        block_ids: Sequence[int] | Addresses,
        after: torch.cuda.Event | None,
        load: bool,
    ) -> CudaCopy:
        import torch

        frames = np.array(frame_addresses, dtype=np.int64)  # copies: torch wants them writable
        ids = np.array(block_ids, dtype=np.int64)
        check_block_ids(ids, frames, self.num_blocks, unique=load)
        if not len(ids):
            return CudaCopy(None)
        known = self._memory.registered
        registered = known.covers(frames, self.block_bytes)
        kernels = registered and known.mapped_in_place and self._kernels is not None
        method, runs = self._plan(frames, ids, kernels, load)
        with lane.lock, torch.cuda.device(self.device), beside_captures():
            try:
                if after is None:
                    _refuse_capture()
                    lane.stream.wait_stream(torch.cuda.current_stream(self.device))
                else:
                    lane.stream.wait_event(after)
                with torch.cuda.stream(lane.stream):
                    if method is Method.DIRECT:
                        error = self._copy_runs(lane, runs, registered, load)
                    elif method is Method.STAGED:
                        error = self._copy_staged(lane, frames, ids, load)
                    else:
                        error = self._copy_by_kernel(frames, ids, load)
            except _gpu_errors() as problem:
                error = f"the copy was not submitted: {problem}"
            return lane.mark(error)

    def _plan(self, frames: Addresses, ids: Addresses, kernels: bool, load: bool) -> tuple[Method, CopyRuns | None]:
        """The method for these blocks, and the runs if it is DIRECT."""
        count = len(self.segments)
        method = self._method if kernels else Method.DIRECT
        if method is None and count > 1:  # the frames interleave the segments: nothing would merge
            method = choose_method(count, self.block_bytes, self.block_bytes / count, kernels)
        if method in (Method.STAGED, Method.ZERO_COPY):
            return method, None
        pool, frame, length = block_pieces(self.segments, ids, frames)
        runs = merge_runs(frame, pool, length) if load else merge_runs(pool, frame, length)
        if method is None:
            mean = self.block_bytes * len(ids) / len(runs)
            method = choose_method(count, self.block_bytes, mean, kernels)
        return method, runs

    def _copy_runs(self, lane: Lane, runs: CopyRuns | None, registered: bool, load: bool) -> str:
        assert runs is not None
        # A DMA must not leave the registration that it begins in.
        runs = split_runs(runs, self._memory.registered.borders, host_is_source=load)
        with self._driver.context(self.device.index):
            # Unregistered memory is copied one by one: a batch treats it differently.
            return self._driver.copy(runs, lane.stream.cuda_stream, batched=registered)

    def _copy_staged(self, lane: Lane, frames: Addresses, ids: Addresses, load: bool) -> str:
        """Copy through the staging rows, as many blocks at a time as there are rows."""
        import torch

        assert lane.staging is not None
        rows = lane.staging.data_ptr() + np.arange(len(lane.staging), dtype=np.int64) * self.block_bytes
        # Freed to this stream's own pool, behind the kernels that read it: no record_stream needed.
        device_ids = torch.from_numpy(ids).pin_memory().to(self.device, non_blocking=True)
        for first in range(0, len(ids), len(rows)):
            part = slice(first, first + len(rows))
            staged, there = rows[: len(ids[part])], frames[part]
            staging = lane.staging[: len(staged)]
            if not load:
                self._kernels.gather_blocks(self._table, device_ids[part], staging)
            sources, targets = (there, staged) if load else (staged, there)
            error = self._copy_runs(lane, merge_runs(sources, targets, self.block_bytes), True, load)
            if error:
                return error
            if load:
                self._kernels.scatter_blocks(self._table, device_ids[part], staging)
        return ""

    def _copy_by_kernel(self, frames: Addresses, ids: Addresses, load: bool) -> str:
        import torch

        copy = self._kernels.scatter_blocks if load else self._kernels.gather_blocks
        copy(
            self._table,
            torch.from_numpy(ids),
            torch.from_numpy(frames),
            programs=self._kernels.HOST_PROGRAMS,
        )
        return ""

    def _prepare_kernels(self, staging_rows: int) -> None:
        """Compile the kernels and allocate staging now, or do without both for good.

        Triton needs a C compiler at run time and the device may be full; a pool of small pieces is then copied by DMA
        all the same, more slowly.
        """
        import torch

        try:
            from tiercache.kernels import block_copy as kernels

            table = kernels.PoolTable.from_segments(
                [base for base, _, _ in self.segments],
                [stride for _, stride, _ in self.segments],
                [length for _, _, length in self.segments],
                self.num_blocks or 1 << 40,
                self.device,
            )
            scratch = torch.zeros((2, table.max_length), dtype=torch.uint8, device=self.device)
            trial = kernels.PoolTable.from_layers([scratch[:1]])
            target = torch.tensor([scratch[1].data_ptr()], device=self.device)
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            for copy in (kernels.gather_blocks, kernels.scatter_blocks):
                copy(trial, first, target, frame_align=table.align_bytes)
            staged = len(self.segments) > 1 and self.block_bytes >= DMA_MIN_BYTES
            if self._method is Method.STAGED or (self._method is None and staged):
                for lane in (self._loads, self._stores):
                    lane.allocate(staging_rows, self.block_bytes)
            torch.cuda.synchronize(self.device)
        except _gpu_errors() as problem:
            log.warning("no copy kernels for this pool, it is copied piece by piece: %s", problem)
            return
        self._kernels, self._table = kernels, table


def require_cuda() -> Driver:
    """The driver, if torch can use it too. Raises LayoutError with the remedy."""
    import torch

    found = driver()
    if not torch.cuda.is_available() or found is None:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is usable"
        raise LayoutError(f"{why}: keep the pool on the CPU, or install what the GPU needs")
    return found


def _refuse_capture() -> None:
    """Raises LayoutError if the caller's current stream is being captured into a CUDA graph."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise LayoutError("blocks cannot be copied inside of a CUDA graph: load and store outside of its capture")


def _gpu_errors() -> tuple[type[Exception], ...]:
    """What enqueuing may raise: RuntimeError is every CUDA error of torch; then our own and Triton's."""
    triton = sys.modules.get("triton.errors")
    ours = (ImportError, ArenaError, OSError, RuntimeError, ValueError, subprocess.SubprocessError)
    return ours if triton is None else (*ours, triton.TritonError)
