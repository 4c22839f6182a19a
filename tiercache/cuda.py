"""CUDA: page-locked arena memory, and asynchronous copies between a device's pool and frames.

Only processes that keep KV blocks on a GPU load this. The driver is called through ctypes:

- registering memory through the runtime (`torch.cuda.cudart()`) leaves a failure behind as the
  thread's "last error", and an innocent kernel launch later raises it; the driver has no such memory;
- the batched copy takes address arrays as they are, without a Python object per descriptor.

How a block travels (`choose_method`) depends on the pieces that it is made of:

    DIRECT      pool ═══ DMA ═══ frame                  pieces from 28 KiB: block-first pools
    STAGED      pool ── kernel ── staging ═══ DMA ═══ frame    many small pieces: layer-first pools
    ZERO_COPY   pool ── kernel over the bus ── frame    whole blocks smaller than that

Loads and stores have a stream each. What a copy touches belongs to it until it is `done()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.errors import ArenaError, LayoutError

if TYPE_CHECKING:
    import torch

    from tiercache.kernels import block_copy

log = logging.getLogger(__name__)
Addresses = npt.NDArray[np.int64]

DMA_MIN_BYTES = 28 << 10
"""Below this a DMA descriptor costs more than its bytes, and a kernel is faster."""
MAX_BATCH = 4096
"""Descriptors in one call to the driver."""
STAGING_BYTES = 32 << 20
"""Device memory for staging, once for loads and once for stores, if the pool needs it."""
PIN_CHUNK_BYTES = 64 << 20
"""Registered at a time: about 10 ms, in which the driver keeps other calls waiting."""

_REGISTER_PORTABLE_AND_MAPPED = 3
_SOURCE_IN_STREAM_ORDER = 1


# --- the driver --------------------------------------------------------------------------------


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, two location hints of (type, id), flags."""

    _fields_ = [
        ("source_access_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """The few driver calls that are needed here. They release the GIL; 0 means success.

    Raises OSError where there is no driver library and AttributeError where it is too old.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._init = self._function(library.cuInit, ctypes.c_uint)
        self._error_name = self._function(library.cuGetErrorName, ctypes.c_int, pointer)
        self._retain = self._function(library.cuDevicePrimaryCtxRetain, pointer, ctypes.c_int)
        state = library.cuDevicePrimaryCtxGetState
        self._context_state = self._function(state, ctypes.c_int, pointer, pointer)
        self._device_count = self._function(library.cuDeviceGetCount, pointer)
        self._push = self._function(library.cuCtxPushCurrent_v2, pointer)
        self._pop = self._function(library.cuCtxPopCurrent_v2, pointer)
        self._register = self._function(library.cuMemHostRegister_v2, pointer, size, ctypes.c_uint)
        self._unregister = self._function(library.cuMemHostUnregister, pointer)
        self._mapped = self._function(library.cuMemHostGetDevicePointer_v2, pointer, pointer, ctypes.c_uint)
        self._copy = self._function(library.cuMemcpyAsync, address, address, size, pointer)
        # Since CUDA 12.8. The plain name keeps the first signature, with a place for the failed index.
        batch = getattr(library, "cuMemcpyBatchAsync", None)
        self._batch = None if batch is None else self._function(
            batch, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )  # fmt: skip
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @staticmethod
    def _function(function: Any, *arguments: Any) -> Any:
        function.restype, function.argtypes = ctypes.c_int, arguments
        return function

    @property
    def batches(self) -> bool:
        """Whether many copies can go in one call."""
        return self._batch is not None

    def error_name(self, code: int) -> str:
        """`CUDA_ERROR_INVALID_VALUE` and the like."""
        text = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(text))
        return (text.value or str(code).encode()).decode()

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context (torch's) is current on this thread. Raises ArenaError."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            code = self._init(0) or self._retain(ctypes.byref(context), device)
            if code:
                raise ArenaError(f"CUDA device {device} cannot be used: {self.error_name(code)}")
            self._contexts[device] = context
        code = self._push(self._contexts[device])
        if code:
            raise ArenaError(f"CUDA device {device} cannot be used: {self.error_name(code)}")
        try:
            yield
        finally:
            self._pop(ctypes.byref(ctypes.c_void_p()))

    def any_context(self) -> contextlib.AbstractContextManager[None]:
        """The context of a device that this process uses already: a new one costs device memory."""
        count, flags, active = ctypes.c_int(0), ctypes.c_uint(0), ctypes.c_int(0)
        self._init(0)
        self._device_count(ctypes.byref(count))
        for device in range(count.value):
            self._context_state(device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                return self.context(device)
        return self.context(0)

    def register(self, address: int, length: int) -> int:
        """Page-lock host memory and map it for all devices. Blocks (about 0.1 s per GiB)."""
        return int(self._register(address, length, _REGISTER_PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Undo one `register`. No copy may be using the memory."""
        return int(self._unregister(address))

    def is_mapped_in_place(self, address: int) -> bool:
        """Whether kernels see registered host memory at the address that the host uses."""
        seen = ctypes.c_void_p()
        return self._mapped(ctypes.byref(seen), address, 0) == 0 and seen.value == address

    def copy(self, runs: Runs, stream: int, *, batched: bool) -> str:
        """Enqueue copies on a stream that is not the default one; "" or what went wrong.

        After a failure some of the copies may be under way: record an event all the same.
        """
        if batched and self._batch is not None and len(runs) > 1:
            return self._copy_batches(runs, stream)
        for source, target, length in runs:
            code = self._copy(target, source, length, stream)
            if code:
                return f"{self.error_name(code)} in a copy of {length} bytes"
        return ""

    def _copy_batches(self, runs: Runs, stream: int) -> str:
        assert self._batch is not None
        attributes = _CopyAttributes(source_access_order=_SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        for start in range(0, len(runs), MAX_BATCH):
            part = [np.ascontiguousarray(column[start : start + MAX_BATCH]) for column in runs.columns()]
            source, target, length = (column.ctypes.data for column in part)
            code = self._batch(
                target, source, length, len(part[0]), ctypes.byref(attributes), ctypes.byref(first), 1,
                ctypes.byref(failed), stream,
            )  # fmt: skip
            if code:
                return f"{self.error_name(code)} in a batch of {len(part[0])} copies (copy {failed.value})"
        return ""


@functools.cache
def driver() -> Driver | None:
    """The driver of this machine, or None."""
    try:
        return Driver()
    except (OSError, AttributeError) as problem:
        log.debug("no CUDA driver: %s", problem)
        return None


def require_cuda() -> Driver:
    """The driver, if torch can use it too. Raises LayoutError with the remedy."""
    import torch

    found = driver()
    if not torch.cuda.is_available() or found is None:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is usable"
        raise LayoutError(f"{why}: keep the pool on the CPU, or install what the GPU needs")
    return found


# --- page-locked memory ------------------------------------------------------------------------


class _Registered(NamedTuple):
    """What is registered, as a snapshot for lookups without a lock.

    `starts` and `ends` of whole regions, sorted; `chunks` are the starts of all registrations, and
    `mapped_in_place` says whether kernels reach every one of them at its host address.
    """

    starts: Addresses
    ends: Addresses
    chunks: Addresses
    mapped_in_place: bool

    def covers(self, addresses: Addresses, length: int) -> bool:
        """Whether every `addresses[i] ..< addresses[i] + length` is inside a registered region."""
        if not len(self.starts):
            return False
        region = np.searchsorted(self.starts, addresses, side="right") - 1
        return bool(((region >= 0) & (addresses + length <= self.ends[region])).all())


class _Region(NamedTuple):
    end: int
    chunks: Addresses
    mapped_in_place: bool


_EMPTY: Addresses = np.zeros(0, dtype=np.int64)


class HostMemory:
    """The host memory that this process has registered with CUDA. Thread-safe.

    Register from a background thread and go on serving: frames of a region that is not registered
    yet are copied too, only more slowly.
    """

    def __init__(self, chunk_bytes: int = PIN_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._regions: dict[int, _Region] = {}
        self.registered = _Registered(_EMPTY, _EMPTY, _EMPTY, True)

    def register(self, address: int, length: int) -> None:
        """Page-lock a region for all devices. Blocks (about 0.1 s per GiB), chunk by chunk.

        Raises ArenaError, and then nothing of the region is registered.
        """
        found = driver()
        if found is None:
            raise ArenaError("memory cannot be registered with CUDA: there is no driver (libcuda.so.1)")
        with self._lock:
            if length <= 0 or address in self._regions:
                raise ArenaError(f"{length} bytes at {address:#x} are none, or registered already")
            # Reserves the address; nothing is offered to copies before `_refresh`.
            self._regions[address] = _Region(address, _EMPTY, True)
        try:
            region = self._register_chunks(found, address, length)
        except ArenaError:
            with self._lock:
                del self._regions[address]
            raise
        with self._lock:
            self._regions[address] = region
            self._refresh()

    def _register_chunks(self, found: Driver, address: int, length: int) -> _Region:
        chunks: Addresses = np.arange(address, address + length, self._chunk_bytes, dtype=np.int64)
        in_place = True
        for count, start in enumerate(chunks.tolist()):
            with found.any_context():
                code = found.register(start, min(self._chunk_bytes, address + length - start))
                in_place = in_place and code == 0 and found.is_mapped_in_place(start)
            if code:
                self._unregister_chunks(found, chunks[:count])
                raise ArenaError(f"memory cannot be registered with CUDA: {found.error_name(code)}")
        return _Region(address + length, chunks, in_place)

    def unregister(self, address: int) -> None:
        """Undo `register(address, ...)`; no copy of the region may be under way. Idempotent."""
        with self._lock:
            region = self._regions.pop(address, None)
            self._refresh()
        found = driver()
        if region is not None and found is not None:
            self._unregister_chunks(found, region.chunks)

    def _refresh(self) -> None:
        known = sorted(self._regions.items())
        self.registered = _Registered(
            np.array([start for start, _ in known], dtype=np.int64),
            np.array([region.end for _, region in known], dtype=np.int64),
            np.concatenate([_EMPTY, *(region.chunks for _, region in known)]),
            all(region.mapped_in_place for _, region in known),
        )

    @staticmethod
    def _unregister_chunks(found: Driver, chunks: Addresses) -> None:
        with found.any_context():
            for start in chunks.tolist():
                code = found.unregister(start)
                if code:
                    log.warning("host memory stays registered with CUDA: %s", found.error_name(code))


host_memory = HostMemory()
"""Of this process: registrations belong to it as a whole."""


def register(address: int, length: int) -> None:
    """See `HostMemory.register`."""
    host_memory.register(address, length)


def unregister(address: int) -> None:
    """See `HostMemory.unregister`."""
    host_memory.unregister(address)


# --- what to copy ------------------------------------------------------------------------------


Segments = Sequence[tuple[int, int, int]]
"""The pieces of a block in the order of a frame's bytes, each as (base, stride, bytes): the piece of
block b is at base + b * stride. `tiercache.transfer.Segment` is such a tuple."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Copies to make, as three int64 columns of equal length. Iterates as (source, target, bytes)."""

    sources: Addresses
    targets: Addresses
    lengths: Addresses

    def columns(self) -> tuple[Addresses, Addresses, Addresses]:
        """Sources, targets, lengths."""
        return self.sources, self.targets, self.lengths

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.sources.tolist(), self.targets.tolist(), self.lengths.tolist(), strict=True)


class Method(str, Enum):
    """How blocks travel; see the top of this file."""

    DIRECT = "direct"
    STAGED = "staged"
    ZERO_COPY = "zero_copy"


def merge_runs(
    sources: Sequence[int] | Addresses, targets: Sequence[int] | Addresses, lengths: int | Addresses
) -> Runs:
    """The same copies in as few runs as can be: neighbours at both ends become one.

    The copies are independent (no target overlaps another or a source), so they are put in order
    of source to find neighbours.
    """
    source = np.asarray(sources, dtype=np.int64)
    target = np.asarray(targets, dtype=np.int64)
    length = np.broadcast_to(np.asarray(lengths, dtype=np.int64), source.shape)
    if not len(source):
        return Runs(_EMPTY, _EMPTY, _EMPTY)
    order = np.argsort(source, kind="stable")
    source, target, length = source[order], target[order], length[order]
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(new)
    return Runs(source[first], target[first], np.add.reduceat(length, first))


def split_runs(runs: Runs, boundaries: Addresses, host_is_source: bool) -> Runs:
    """Cut runs so that none has one of the sorted `boundaries` inside its host side."""
    host = runs.sources if host_is_source else runs.targets
    low = np.searchsorted(boundaries, host, side="right")
    cuts = np.searchsorted(boundaries, host + runs.lengths, side="left") - low
    if not cuts.any():
        return runs
    parent = np.repeat(np.arange(len(host)), cuts + 1)
    # The k-th part of a run begins at the run's own start (k = 0) or at the k-th boundary inside.
    part = np.arange(len(parent)) - np.repeat(np.cumsum(cuts + 1) - (cuts + 1), cuts + 1)
    start = host[parent].copy()
    start[part > 0] = boundaries[low[parent][part > 0] + part[part > 0] - 1]
    end = (host + runs.lengths)[parent]
    more = part < cuts[parent]
    end[more] = boundaries[low[parent][more] + part[more]]
    shift = start - host[parent]
    return Runs(runs.sources[parent] + shift, runs.targets[parent] + shift, end - start)


def block_pieces(
    segments: Segments, block_ids: Addresses, frames: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Pool address, frame address and length of every piece of every block, segment by segment."""
    bases, strides, lengths = np.array(segments, dtype=np.int64).T
    offsets = np.cumsum(lengths) - lengths
    pool = bases[:, None] + block_ids * strides[:, None]
    frame = frames + offsets[:, None]
    length = np.broadcast_to(lengths[:, None], pool.shape)
    return pool.reshape(-1), frame.reshape(-1), length.reshape(-1)


def choose_method(segment_count: int, block_bytes: int, run_bytes_mean: float, kernels: bool) -> Method:
    """The way for blocks of this shape.

    Args:
        run_bytes_mean: bytes per run after merging, of the blocks to be copied.
        kernels: whether kernels can be used, and reach the frames.
    """
    if not kernels or run_bytes_mean >= DMA_MIN_BYTES:
        return Method.DIRECT
    if segment_count > 1 and block_bytes >= DMA_MIN_BYTES:
        return Method.STAGED
    return Method.ZERO_COPY


# --- copies ------------------------------------------------------------------------------------


class CudaCopy:
    """One submitted copy. What it touches belongs to it until `done()` is true.

    Attributes:
        error: "" or why the bytes at the target are not all right. A copy can fail and still have
            parts under way: it is `done()` when the last of them is over. If the device itself
            broke, completion cannot be known any more: `error` is set and `done()` stays false;
            treat both ends as in use for as long as the process lives.
    """

    def __init__(self, event: torch.cuda.Event | None, error: str = "", lost: bool = False) -> None:
        self.event = event
        self.error = error
        self._lost = lost

    def done(self) -> bool:
        """Whether nothing of this copy is under way any more. Never blocks."""
        if self._lost:
            return False
        if self.event is not None:
            try:
                if not self.event.query():  # type: ignore[no-untyped-call, unused-ignore]
                    return False
            except RuntimeError as problem:  # how torch reports that the context is broken
                self._lost = True
                self.error = f"the GPU failed during a copy: {problem}"
                return False
            self.event = None
        return True

    def wait(self, timeout_s: float) -> bool:
        """Poll until every byte has arrived; returns True.

        Raises ArenaError if the copy failed, or was not done after `timeout_s`. `done()` then says
        whether its memory is free again.
        """
        deadline = time.monotonic() + timeout_s
        pause = 20e-6
        while not self.done() and not self._lost:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ArenaError(f"a GPU copy was not done after {timeout_s} s: its memory is still in use")
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-3)
        if self.error:
            raise ArenaError(self.error)
        return True


class _Lane:
    """A direction: its stream, its staging rows, and the last copy submitted."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self.lock = threading.Lock()
        self.staging: torch.Tensor | None = None
        self.last = CudaCopy(None)

    def allocate(self, rows: int, block_bytes: int) -> None:
        """Staging that only this stream ever touches, so stream order alone protects it."""
        import torch

        with torch.cuda.stream(self.stream):
            self.staging = torch.empty((rows, block_bytes), dtype=torch.uint8, device=self.stream.device)

    def mark(self, error: str) -> CudaCopy:
        """A copy that is done when all that the stream has been given so far is done."""
        import torch

        try:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record(self.stream)
            self.last = CudaCopy(event, error)
        except RuntimeError as problem:
            self.last = CudaCopy(None, error or f"the GPU failed during a copy: {problem}", lost=True)
        return self.last


class CudaCopier:
    """Copies blocks between one device's pool and frames in host memory, in both directions.

    Thread-safe. Do not submit while a CUDA graph is being captured on the device.
    """

    def __init__(
        self,
        device: int | str,
        segments: Segments,
        num_blocks: int | None = None,
        *,
        method: Method | None = None,
        staging_bytes: int = STAGING_BYTES,
        memory: HostMemory = host_memory,
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
        self.device = torch.empty(0, device=name).device  # by way of a tensor: `cuda` gets its index
        self.segments = tuple(segments)
        self.num_blocks = num_blocks
        self.block_bytes = sum(length for _, _, length in segments)
        self._memory = memory
        self._method = method
        self._owner = owner
        self._kernels: Any = None
        self._table: block_copy.PoolTable | None = None
        with torch.cuda.device(self.device):
            self._loads, self._stores = _Lane(self.device), _Lane(self.device)
            small = self.block_bytes / len(segments) < DMA_MIN_BYTES
            if method in (Method.STAGED, Method.ZERO_COPY) or (method is None and small):
                self._prepare_kernels(max(1, staging_bytes // self.block_bytes))

    def mark(self) -> torch.cuda.Event:
        """An event behind all work of the caller's current stream so far: the `after` of a copy."""
        import torch

        with torch.cuda.device(self.device):
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
        frames are registered. Raises LayoutError for ids that are not in the pool.
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
        frames are registered. Raises LayoutError for ids that are not in the pool.
        """
        return self._start(self._stores, frame_addresses, block_ids, after, load=False)

    def idle(self) -> bool:
        """Whether all that was submitted is over, so that the pool may be freed. Never blocks."""
        return self._loads.last.done() and self._stores.last.done()

    def _start(
        self,
        lane: _Lane,
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
        with lane.lock, torch.cuda.device(self.device):
            try:
                if after is None:
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

    def _plan(
        self, frames: Addresses, ids: Addresses, kernels: bool, load: bool
    ) -> tuple[Method, Runs | None]:
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

    def _copy_runs(self, lane: _Lane, runs: Runs | None, registered: bool, load: bool) -> str:
        assert runs is not None
        # A registration ends where the next chunk begins, and no DMA may span two.
        runs = split_runs(runs, self._memory.registered.chunks, host_is_source=load)
        with self._driver.context(self.device.index):
            # Memory that is not registered goes one by one: a batch takes it on other terms.
            return self._driver.copy(runs, lane.stream.cuda_stream, batched=registered)

    def _copy_staged(self, lane: _Lane, frames: Addresses, ids: Addresses, load: bool) -> str:
        """By way of the staging rows, as many blocks at a time as there are rows."""
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

        Triton needs a C compiler at run time and the device may be full; a pool of small pieces is
        then copied by DMA all the same, more slowly.
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


def check_block_ids(ids: Addresses, frames: Addresses, num_blocks: int | None, unique: bool) -> None:
    """Raise LayoutError unless there is a frame for each id and every id is in the pool."""
    if ids.ndim != 1 or ids.shape != frames.shape:
        raise LayoutError(f"{ids.size} blocks for {frames.size} frames")
    if len(ids) and (ids.min() < 0 or (num_blocks is not None and ids.max() >= num_blocks)):
        raise LayoutError(f"block ids {ids.min()} to {ids.max()} for a pool of {num_blocks or 'some'} blocks")
    if unique and len(np.unique(ids)) != len(ids):
        raise LayoutError("a block id is repeated: two frames cannot be loaded into one block")


def _gpu_errors() -> tuple[type[Exception], ...]:
    """What enqueuing may raise: RuntimeError is every CUDA error of torch; then our own and Triton's."""
    triton = sys.modules.get("triton.errors")
    ours = (ImportError, ArenaError, OSError, RuntimeError, ValueError, subprocess.SubprocessError)
    return ours if triton is None else (*ours, triton.TritonError)
