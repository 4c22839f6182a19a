"""An engine's KV pool, and the copies between it and the arena.

A `Pool` is a list of *segments*: for block `b`, segment `s` is the bytes
`base_s + b * stride_s ..< base_s + b * stride_s + bytes_s`. The bytes of a block, as they are
stored, are its segments one after another. A pool whose blocks are contiguous has one segment; a
layer-first engine has one for each layer (or two, for K and V).

A `Copier` moves blocks between pool and memory addresses of this process. Its calls return when the last copy they
began has finished, never before; `stop` and the deadline only prevent further ones.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiercache.copies.memcpy import copy_moves, memmove
from tiercache.errors import ArenaError, LayoutError, TierCacheError
from tiercache.ground.uninterrupted import interrupted

if TYPE_CHECKING:
    from tiercache.copies.cuda_lane import CudaCopy

logger = logging.getLogger("tiercache.transfer")

MERGE_BYTES = 8 << 20
"""Most bytes of one memmove: a copy can be stopped between two of them."""
SMALL_BLOCK_BYTES = 512 << 10
"""Smaller blocks are copied many at a time where one side is one piece of memory."""
SUBMIT_BYTES = 64 << 20
"""Most bytes handed to a GPU copier at once."""
COPY_GIVE_UP_S = 60.0
"""A GPU copy that takes longer counts as hung; its memory is then never given back."""

Addresses = npt.NDArray[np.int64]
BlockIds = Sequence[int] | npt.NDArray[np.integer]


class Segment(NamedTuple):
    """One part of every block: address of block 0's part, distance between blocks, length; in bytes."""

    base: int
    stride: int
    bytes: int


class Pool:
    """Where the KV blocks of an engine live. Holds the arrays; moves nothing itself.

    Attributes:
        segments: the parts of a block, in the order in which they are stored.
        num_blocks, block_bytes: how many blocks, and the length of each as stored.
        device: `cpu`, or as torch writes it, e.g. `cuda:0`.
        writable: False for read-only arrays, which can be stored from but not loaded into.
        arrays: what the pool was made from.
    """

    def __init__(self, segments: Sequence[Segment], num_blocks: int, device: str, writable: bool, arrays: Any) -> None:
        self.segments = tuple(segments)
        self.num_blocks = num_blocks
        self.block_bytes = sum(segment.bytes for segment in self.segments)
        self.device = device
        self.writable = writable
        self.arrays = arrays
        assert self.segments
        assert num_blocks > 0

    @classmethod
    def from_blocks(cls, array: Any) -> Pool:
        """A pool in one numpy array or torch tensor `[num_blocks, ...]`, each block contiguous.

        The blocks themselves may have gaps between them. Raises LayoutError.
        """
        return cls.from_layers([array])

    @classmethod
    def from_layers(cls, arrays: Sequence[Any], block_axis: int = 0) -> Pool:
        """A pool in one array for each layer.

        Args:
            arrays: numpy arrays or torch tensors of equal block count on one device, of any dtype:
                `[num_blocks, ...]`, or `[parts, num_blocks, ...]` with `block_axis=1` (K and V).
            block_axis: 0 or 1. What follows that axis must be contiguous.

        Raises LayoutError.
        """
        if block_axis not in (0, 1):
            raise LayoutError(f"block_axis is {block_axis}: must be 0, or 1 for [parts, num_blocks, ...]")
        views = [_view(array) for array in arrays]
        if not views:
            raise LayoutError("a pool needs at least one array")
        segments: list[Segment] = []
        for number, view in enumerate(views):
            first = views[0]
            if len(view.shape) <= block_axis:
                raise LayoutError(f"array {number} has shape {list(view.shape)}: no block axis {block_axis}")
            if (view.shape[block_axis], view.device) != (first.shape[block_axis], first.device):
                raise LayoutError(
                    f"array {number} has {view.shape[block_axis]} blocks on {view.device}, array 0 has "
                    f"{first.shape[block_axis]} on {first.device}: all must be equal"
                )
            segments += _segments(view, block_axis, f"array {number}")
        if _overlap(segments, views[0].shape[block_axis]):
            raise LayoutError("parts of the pool overlap: the same memory would be loaded twice; pass each array once")
        writable = all(view.writable for view in views)
        return cls(segments, views[0].shape[block_axis], views[0].device, writable, list(arrays))

    def check_ids(self, block_ids: BlockIds, *, writing: bool = False) -> Addresses:
        """`block_ids` as int64. Raises LayoutError for ids that this pool does not have.

        With `writing` the blocks are about to be overwritten: no id may come twice.
        """
        given = np.asarray(block_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise LayoutError("block ids must be a flat list of integers")
        ids = given.astype(np.int64, copy=False)
        listed = ids.tolist()
        if listed and (min(listed) < 0 or max(listed) >= self.num_blocks):
            raise LayoutError(f"block ids must be 0 to {self.num_blocks - 1}, not {min(listed)} to {max(listed)}")
        if writing:
            if not self.writable:
                raise LayoutError("this pool is read-only: blocks cannot be loaded into it")
            if len(set(listed)) != len(listed):
                raise LayoutError("a block id comes twice: each loaded block needs a place of its own")
        return ids


class _View(NamedTuple):
    """Address, shape and strides (in bytes) of an array of either library."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    device: str
    writable: bool


def _view(array: Any) -> _View:
    if isinstance(array, np.ndarray):
        writable = bool(array.flags.writeable)
        return _View(array.ctypes.data, array.shape, array.strides, array.itemsize, "cpu", writable)
    if not (hasattr(array, "data_ptr") and hasattr(array, "element_size")):
        raise LayoutError(f"a pool is made of numpy arrays or torch tensors, not {type(array).__name__}")
    device = str(array.device)
    if array.device.type not in ("cpu", "cuda"):
        raise LayoutError(f"a pool on {device} is not served: only cpu and cuda are")
    if not str(array.layout).endswith("strided"):
        raise LayoutError("a pool must be dense: sparse tensors are not served")
    item = int(array.element_size())
    strides = tuple(step * item for step in array.stride())
    return _View(int(array.data_ptr()), tuple(array.shape), strides, item, device, True)


def _segments(view: _View, block_axis: int, name: str) -> list[Segment]:
    """The segments of one array: one, or one for each part before the block axis."""
    if 0 in view.shape:
        raise LayoutError(f"{name} of shape {list(view.shape)} has no blocks, or blocks of no bytes")
    inner = view.shape[block_axis + 1 :]
    expected = view.item_bytes
    for size, stride in zip(reversed(inner), reversed(view.strides[block_axis + 1 :]), strict=True):
        if size != 1 and stride != expected:
            raise LayoutError(
                f"{name} of shape {list(view.shape)} has gaps or swapped axes inside a block "
                f"(strides {list(view.strides)} bytes): pass it contiguous, or split it with from_layers"
            )
        expected *= size
    length = view.item_bytes * math.prod(inner)
    stride = view.strides[block_axis]
    if view.shape[block_axis] > 1 and stride < length:
        raise LayoutError(f"the blocks of {name} overlap (stride {stride}, block {length} bytes)")
    parts = view.shape[0] if block_axis == 1 else 1
    step = view.strides[0] if block_axis == 1 else 0
    return [Segment(view.address + part * step, stride, length) for part in range(parts)]


def _overlap(segments: Sequence[Segment], num_blocks: int) -> bool:
    """True if two segments share a byte."""
    by_address = sorted(segments)
    ends: list[tuple[int, Segment]] = []  # of those whose memory may reach the next ones
    for segment in by_address:
        ends = [(end, other) for end, other in ends if end > segment.base]
        if any(_share(other, segment, num_blocks) for _, other in ends):
            return True
        ends.append((segment.base + (num_blocks - 1) * segment.stride + segment.bytes, segment))
    return False


def _share(one: Segment, other: Segment, num_blocks: int) -> bool:
    """True if two segments share a byte; the first begins first, and their memory interleaves."""
    if num_blocks == 1:
        return one.base + one.bytes > other.base
    if one.stride == other.stride:
        # The other's block 0 lies behind the beginning of block k of the first, and before that of block k + 1.
        k, offset = divmod(other.base - one.base, one.stride)
        return (k < num_blocks and offset < one.bytes) or (k + 1 < num_blocks and offset + other.bytes > one.stride)
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = np.concatenate([one.base + blocks * one.stride, other.base + blocks * other.stride])
    lengths = np.repeat([one.bytes, other.bytes], num_blocks)
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][:-1] + lengths[order][:-1] > starts[order][1:]).any())


# --- copying -----------------------------------------------------------------------------------


class Limit:
    """When to begin no further copy. Copied blocks that `proof` rejects are not committed."""

    __slots__ = ("_void", "deadline_s", "proof", "stopped")

    def __init__(self, deadline_s: float = math.inf) -> None:
        self.deadline_s = deadline_s
        self.stopped = self._void = False
        self.proof: Callable[[], bool] | None = None

    def annul(self) -> None:
        """Never commit what has not been committed yet: its source is about to change."""
        self._void = self.stopped = True

    @property
    def void(self) -> bool:
        """True if what has been copied must not be committed."""
        return self._void or (self.proof is not None and not self.proof())

    def stop(self) -> None:
        """Begin no further copy."""
        self.stopped = True

    def reached(self) -> bool:
        """True when no further copy may begin. Called where no lock is held: signals are handled here."""
        if interrupted():
            self.stopped = True
        return self.passed()

    def passed(self) -> bool:
        """As `reached`, for places where a lock is held: signals wait."""
        return self.stopped or time.monotonic() >= self.deadline_s


class CopyLost(TierCacheError):
    """A copy was begun and its end cannot be known: the device broke, or hangs.

    Both ends of it must be treated as in use for as long as the process lives.
    """


class Copier(Protocol):
    """Copies between the blocks of one pool and addresses of this process.

    Both directions copy `block_bytes` for each block and return how many leading blocks are complete. `after` is the
    result of `mark` in the thread that queued the work on the blocks. Raise CopyLost, and nothing else once a copy has
    begun.
    """

    def copy_in(self, addresses: Addresses, block_ids: Addresses, limit: Limit, after: Any = None) -> int:
        """From addresses into blocks."""

    def copy_out(self, block_ids: Addresses, addresses: Addresses, limit: Limit, after: Any = None) -> int:
        """From blocks to addresses."""

    def mark(self) -> Any:
        """The work that the calling thread has queued so far, where there is a queue."""


def make_copier(pool: Pool) -> Copier:
    """The copier for the device of `pool`. On CUDA this imports torch."""
    return CpuCopier(pool) if pool.device == "cpu" else GpuCopier(pool)


class CpuCopier:
    """memmove, with neighbouring blocks merged where both sides are neighbours.

    Small blocks that are neighbours only in the arena are gathered from the pool, or scattered into it, many with one
    numpy call: that is 10% faster, and the interpreter's lock, which another thread may hold for milliseconds, is taken
    once instead of for every block.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._items: npt.NDArray[np.void] | None = None  # the pool, an item for each block
        base, stride, length = pool.segments[0]
        if len(pool.segments) == 1 and length < SMALL_BLOCK_BYTES and (stride == length or pool.num_blocks == 1):
            self._items = _items(base, length, pool.num_blocks)

    def copy_in(self, addresses: Addresses, block_ids: Addresses, limit: Limit, after: Any = None) -> int:
        """See `Copier`; a CPU has no queue to wait for."""
        return self._copy(block_ids, addresses, limit, into_pool=True)

    def copy_out(self, block_ids: Addresses, addresses: Addresses, limit: Limit, after: Any = None) -> int:
        """See `Copier`; a CPU has no queue to wait for."""
        return self._copy(block_ids, addresses, limit, into_pool=False)

    def mark(self) -> Any:
        """Nothing: copies of a CPU happen in order."""
        return None

    def _copy(self, block_ids: Addresses, addresses: Addresses, limit: Limit, *, into_pool: bool) -> int:
        segments = self._pool.segments
        if len(segments) > 1:
            return self._copy_scattered(block_ids, addresses, limit, into_pool=into_pool)
        base, stride, length = segments[0]
        if not len(block_ids) or limit.reached():
            return 0
        if len(block_ids) == 1:
            block, address = base + int(block_ids[0]) * stride, int(addresses[0])
            target, source = (block, address) if into_pool else (address, block)
            return copy_moves([(target, source, length)], limit.reached, shared=True)
        blocks = block_ids * stride + base
        starts = run_starts(blocks, addresses, length, max(1, MERGE_BYTES // length))
        targets, sources = (blocks, addresses) if into_pool else (addresses, blocks)
        if self._items is not None and len(starts) * SMALL_BLOCK_BYTES > len(block_ids) * length:
            return self._copy_items(self._items, block_ids, addresses, limit, into_pool=into_pool)
        ends = [*starts[1:], len(block_ids)]
        lengths = [(end - start) * length for start, end in zip(starts, ends, strict=True)]
        moves = list(zip(targets[starts].tolist(), sources[starts].tolist(), lengths, strict=True))
        # With small blocks the daemon is busy meanwhile: it makes better use of the second core.
        complete = copy_moves(moves, limit.reached, shared=length >= SMALL_BLOCK_BYTES)
        return ends[complete - 1] if complete else 0

    def _copy_items(
        self,
        items: npt.NDArray[np.void],
        block_ids: Addresses,
        addresses: Addresses,
        limit: Limit,
        *,
        into_pool: bool,
    ) -> int:
        length = items.itemsize
        starts = run_starts(addresses, addresses, length, max(1, MERGE_BYTES // length))
        for start, end in pairwise([*starts, len(block_ids)]):
            if start and limit.reached():
                return start
            arena, ids = _items(int(addresses[start]), length, end - start), block_ids[start:end]
            # "clip" never clips, for the ids were checked; but only with it numpy copies straight to the target.
            if into_pool:
                np.put(items, ids, arena, mode="clip")
            else:
                np.take(items, ids, out=arena, mode="clip")
        return len(block_ids)

    def _copy_scattered(self, block_ids: Addresses, addresses: Addresses, limit: Limit, *, into_pool: bool) -> int:
        segments = self._pool.segments
        for done, (block, address) in enumerate(zip(block_ids.tolist(), addresses.tolist(), strict=True)):
            if limit.reached():
                return done
            for base, stride, length in segments:
                if into_pool:
                    memmove(base + block * stride, address, length)
                else:
                    memmove(address, base + block * stride, length)
                address += length
        return len(block_ids)


def _items(address: int, length: int, count: int) -> npt.NDArray[np.void]:
    """Memory of this process as `count` items of `length` bytes. The caller keeps the memory alive."""
    memory: Any = (ctypes.c_char * (length * count)).from_address(address)
    return np.frombuffer(memory, np.dtype((np.void, length)))


def run_starts(left: Addresses, right: Addresses, length: int, most: int) -> list[int]:
    """Where runs begin that are contiguous on both sides, none longer than `most` blocks.

    >>> run_starts(np.array([0, 4, 8, 99]), np.array([40, 44, 48, 52]), 4, 2)
    [0, 2, 3]
    """
    count = len(left)
    if count < 2 or most < 2:
        return list(range(count))
    joined = (np.diff(left) == length) & (np.diff(right) == length)
    breaks = [0, *(np.flatnonzero(~joined) + 1).tolist(), count]
    return [start for begin, end in pairwise(breaks) for start in range(begin, end, most)]


_lost_pools: list[Pool] = []
"""Pools that a lost copy may still read or write: their memory is not given back."""


class GpuCopier:
    """Copies by `tiercache.copies.cuda`, in steps, at most two of them in flight.

    Call `mark`, and methods that call it, outside the capture of a CUDA graph; see `CudaCopier`.
    """

    def __init__(self, pool: Pool) -> None:
        cuda: Any = importlib.import_module("tiercache.copies.cuda")
        self._pool = pool
        self._copier = cuda.CudaCopier(pool.device, pool.segments, pool.num_blocks, owner=pool)
        self._step = max(1, SUBMIT_BYTES // pool.block_bytes)

    def copy_in(self, addresses: Addresses, block_ids: Addresses, limit: Limit, after: Any = None) -> int:
        """See `Copier`. Work queued afterwards on any stream sees the blocks."""

        def submit(part: slice) -> CudaCopy:
            copy: CudaCopy = self._copier.copy_in(addresses[part], block_ids[part], after)
            return copy

        return self._run(len(block_ids), submit, limit, load=True)

    def copy_out(self, block_ids: Addresses, addresses: Addresses, limit: Limit, after: Any = None) -> int:
        """See `Copier`."""

        def submit(part: slice) -> CudaCopy:
            copy: CudaCopy = self._copier.copy_out(block_ids[part], addresses[part], after)
            return copy

        return self._run(len(block_ids), submit, limit, load=False)

    def mark(self) -> Any:
        """An event on the caller's current stream. Raises LayoutError while that is being captured."""
        return self._copier.mark()

    def _run(self, count: int, submit: Callable[[slice], CudaCopy], limit: Limit, *, load: bool) -> int:
        try:
            return self._copy_in_steps(count, submit, limit)
        except BaseException as error:
            # Ctrl-C too: no caller may learn that the copies are over before they are.
            if not isinstance(error, CopyLost) and self._settles(load):
                raise
            _lost_pools.append(self._pool)
            raise CopyLost(str(error)) from error

    def _copy_in_steps(self, count: int, submit: Callable[[slice], CudaCopy], limit: Limit) -> int:
        flying: deque[tuple[int, CudaCopy]] = deque()
        begin = complete = 0
        failed = ""
        while flying or (begin < count and not failed and not limit.reached()):
            if begin < count and not failed and len(flying) < 2 and not limit.reached():
                end = min(begin + self._step, count)
                flying.append((end, submit(slice(begin, end))))
                begin = end
                continue
            end, copy = flying.popleft()
            try:
                copy.wait(COPY_GIVE_UP_S)
                complete = complete if failed else end
            except ArenaError as error:
                if not copy.done():
                    raise CopyLost(str(error)) from error
                failed = str(error)
        if failed:
            logger.warning("a GPU copy failed: %s", failed)
        return complete

    def _settles(self, load: bool) -> bool:
        """Wait until all copies of a direction are over. False if that cannot be known."""
        try:
            self._copier.fence(load=load).wait(COPY_GIVE_UP_S)
        except BaseException:
            logger.exception("it cannot be known when the copies of a GPU end")
            return False
        return True
