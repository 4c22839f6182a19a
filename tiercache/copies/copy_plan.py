"""Copy planning: which bytes go where, and by which method. The part that needs no GPU.

A block lies in a pool as pieces and in a frame as one run. Pieces that are neighbours at both ends are merged, since
every copy costs the same whatever its size; runs are then cut where a registration of host memory begins or ends, since
no DMA may span two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tiercache.errors import LayoutError

Addresses = npt.NDArray[np.int64]
NO_ADDRESSES: Addresses = np.zeros(0, dtype=np.int64)

DMA_MIN_BYTES = 28 << 10
"""Below this a DMA descriptor costs more than its bytes, and a kernel is faster."""

Segments = Sequence[tuple[int, int, int]]
"""The pieces of a block in the order of a frame's bytes, each as (base, stride, bytes): the piece of
block b is at base + b * stride. `tiercache.copies.pool.Segment` is such a tuple."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyRuns:
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
    """How blocks are copied; see the top of `tiercache.copies.cuda`."""

    DIRECT = "direct"
    STAGED = "staged"
    ZERO_COPY = "zero_copy"


def merge_runs(
    sources: Sequence[int] | Addresses, targets: Sequence[int] | Addresses, lengths: int | Addresses
) -> CopyRuns:
    """The same copies in as few runs as possible: neighbours at both ends become one.

    The copies are independent (no target overlaps another or a source), so they are put in order
    of source to find neighbours.
    """
    source = np.asarray(sources, dtype=np.int64)
    target = np.asarray(targets, dtype=np.int64)
    length = np.broadcast_to(np.asarray(lengths, dtype=np.int64), source.shape)
    if not len(source):
        return CopyRuns(NO_ADDRESSES, NO_ADDRESSES, NO_ADDRESSES)
    order = np.argsort(source, kind="stable")
    source, target, length = source[order], target[order], length[order]
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(new)
    return CopyRuns(source[first], target[first], np.add.reduceat(length, first))


def split_runs(runs: CopyRuns, boundaries: Addresses, host_is_source: bool) -> CopyRuns:
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
    return CopyRuns(runs.sources[parent] + shift, runs.targets[parent] + shift, end - start)


def block_pieces(segments: Segments, block_ids: Addresses, frames: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Pool address, frame address and length of every piece of every block, segment by segment."""
    bases, strides, lengths = np.array(segments, dtype=np.int64).T
    offsets = np.cumsum(lengths) - lengths
    pool = bases[:, None] + block_ids * strides[:, None]
    frame = frames + offsets[:, None]
    length = np.broadcast_to(lengths[:, None], pool.shape)
    return pool.reshape(-1), frame.reshape(-1), length.reshape(-1)


def choose_method(segment_count: int, block_bytes: int, run_bytes_mean: float, kernels: bool) -> Method:
    """The method for blocks of this shape.

    Args:
        run_bytes_mean: bytes per run after merging, of the blocks to be copied.
        kernels: whether kernels can be used, and reach the frames.
    """
    if not kernels or run_bytes_mean >= DMA_MIN_BYTES:
        return Method.DIRECT
    if segment_count > 1 and block_bytes >= DMA_MIN_BYTES:
        return Method.STAGED
    return Method.ZERO_COPY


def check_block_ids(ids: Addresses, frames: Addresses, num_blocks: int | None, unique: bool) -> None:
    """Raise LayoutError unless there is a frame for each id and every id is in the pool."""
    if ids.ndim != 1 or ids.shape != frames.shape:
        raise LayoutError(f"{ids.size} blocks for {frames.size} frames")
    if len(ids) and (ids.min() < 0 or (num_blocks is not None and ids.max() >= num_blocks)):
        raise LayoutError(f"block ids {ids.min()} to {ids.max()} for a pool of {num_blocks or 'some'} blocks")
    if unique and len(np.unique(ids)) != len(ids):
        raise LayoutError("a block id is repeated: two frames cannot be loaded into one block")
