"""Jobs of vLLM's offloading: their transfers, and the results reported to vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tiercache.connector.jobs import Transfer
from tiercache.connector.stores import StoreResult
from vllm.v1.kv_offload.tiering.base import JobResult

from .lookups import Lookup
from .tier_lookups import Chain, ChunkPlace


class ChunkRun(NamedTuple):
    """Consecutive chunks of a job: the position of the first in its chain, and rows and keys of all."""

    part: int
    first: int
    rows: list[int]
    keys: list[bytes]

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + len(self.rows)


def runs_of(places: Iterable[ChunkPlace | None], rows: Iterable[int], keys: Iterable[bytes]) -> list[ChunkRun]:
    """The chunks of a job by part, in the order of their chains; those without a place are left out."""
    runs: list[ChunkRun] = []
    placed = ((place, row, key) for place, row, key in zip(places, rows, keys, strict=True) if place is not None)
    for (part, position), row, key in sorted(placed):
        if not runs or runs[-1].part != part or runs[-1].end != position:
            runs.append(ChunkRun(part, position, [], []))
        runs[-1].rows.append(row)
        runs[-1].keys.append(key)
    return runs


class Orphan(NamedTuple):
    """Chunks `first ..< end` of a chain in one part, of which the last were stored and found no parent."""

    part: int
    chain: Chain
    end: int
    first: int = 0


class LoadJob:
    """A load; the background thread makes its `parts` until it has `begun`."""

    def __init__(self, request_id: str, lookup: Lookup, chunks: int) -> None:
        self.request_id = request_id
        self.lookup = lookup
        self.chunks = chunks
        self.parts: list[tuple[ChunkRun, Transfer[int]]] = []
        self.left_out: list[bytes] = []  # keys of chunks that are not loaded after all
        self.begun = False

    def result(self, job_id: int) -> JobResult:
        """For vLLM, when it has ended."""
        good = [key for run, transfer in self.parts for key in run.keys[: transfer.result(0)]]
        whole = len(good) == self.chunks
        return JobResult(job_id, whole, None if whole else good, _seconds(self.parts))


class StoreJob:
    """A store; the background thread makes its `parts` until it has `begun`."""

    def __init__(self) -> None:
        self.parts: list[tuple[Orphan | None, Transfer[StoreResult]]] = []
        self.begun = False

    def result(self, job_id: int) -> JobResult:
        """For vLLM, when it has ended."""
        dropped = any(transfer.result(0).dropped for _, transfer in self.parts)
        return JobResult(job_id, not dropped and bool(self.parts), None, _seconds(self.parts))

    def orphans(self) -> Iterator[Orphan]:
        """Chunks that have found no parent, once it has ended."""
        for orphan, transfer in self.parts:
            if orphan is not None and transfer.result(0).parent_missing:
                yield orphan


def has_ended(job: LoadJob | StoreJob) -> bool:
    """True if its last copy has ended."""
    return job.begun and all(transfer.done() for _, transfer in job.parts)


def _seconds(parts: Iterable[tuple[Any, Transfer[Any]]]) -> float:
    """Total time of transfers that have ended."""
    times = [(transfer.began_s, transfer.ended_s) for _, transfer in parts if transfer.ended_s]
    return max(end for _, end in times) - min(begin for begin, _ in times) if times else 0.0
