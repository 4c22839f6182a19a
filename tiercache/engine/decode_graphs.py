"""Decode as CUDA graphs: a step of one token per sequence, launched as a whole.

A model launches some ten kernels per layer, and launching one takes longer than running it when there is one token per
sequence. So the step is captured, once for each of a few batch sizes (buckets), over tables and tokens at fixed
addresses; a smaller batch is padded to the bucket with sequences of no tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiercache.engine.attention import Batch, GroupedPass
from tiercache.engine.cuda_attention import KernelPass, KernelTables
from tiercache.engine.kv_pool import BatchSegment

_LOG = logging.getLogger(__name__)

RunModel = Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs the model over a batch: tokens int64 `[1, token]`, rows int64 `[row]` to logits `[row, vocabulary]`."""


def buckets(largest: int) -> list[int]:
    """Batch sizes with a graph: 1, 2, 4, then multiples of 8, the last at least `largest`."""
    return [1, 2, 4, *range(8, largest + 8, 8)]


class _Recording:
    """A bucket: its tables for each group of layers, its tokens, and its graph once captured."""

    def __init__(self, parts: Sequence[KernelPass], rows: int, longest: int) -> None:
        pool = parts[0].pool
        self.tables = [KernelTables(pool, part.segments, part.tails, rows=rows, longest=longest) for part in parts]
        empty = [BatchSegment(row, 0, 1, ()) for row in range(rows)]
        work = self.tables[0] if len(parts) == 1 else GroupedPass(self.tables, pool.places)
        self.batch = Batch(pool, empty, work)
        self.tokens = torch.zeros((1, rows), dtype=torch.int64, device=pool.device)
        self.kept = torch.arange(rows, device=pool.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None

    def fill(self, parts: Sequence[KernelPass], tokens: Sequence[int]) -> None:
        for tables, part in zip(self.tables, parts, strict=True):
            tables.refill(part.segments, part.tails)
        padded = torch.tensor([[*tokens, *[0] * (self.tokens.shape[1] - len(tokens))]])
        self.tokens.copy_(padded.pin_memory() if self.tokens.is_cuda else padded, non_blocking=True)


def _kernel_passes(batch: Batch) -> list[KernelPass]:
    """The pass of each group of layers; none unless the kernels run all of them."""
    parts = batch.work.parts if isinstance(batch.work, GroupedPass) else [batch.work]
    passes = [part for part in parts if isinstance(part, KernelPass)]
    return passes if len(passes) == len(parts) else []


class DecodeGraphs:
    """The graphs of one model over one pool.

    Args:
        run: runs the model, in inference mode.
        max_rows: most sequences in a step. longest: most tokens of a sequence.
    """

    def __init__(self, run: RunModel, max_rows: int, longest: int) -> None:
        self._run = run
        self._buckets = buckets(max_rows)
        self._longest = longest
        self._recordings: dict[int, _Recording] = {}
        self._given_up = False
        self._failed: torch.cuda.CUDAGraph | None = None
        self._memory: Any = None

    def forward(self, batch: Batch, tokens: Sequence[int]) -> torch.Tensor | None:
        """The logits of a pass of one token per sequence, `[sequence, vocabulary]`; None for any other pass.

        They are valid until the next pass. The first pass of a bucket runs without a graph, so that all kernels are
        compiled when the second is captured.
        """
        parts = _kernel_passes(batch)
        if self._given_up or not parts or len(parts[0].segments) != len(tokens):
            return None
        rows = next((size for size in self._buckets if size >= len(tokens)), 0)
        if not rows:
            return None
        recording = self._recordings.get(rows)
        if recording is None:
            recording = self._recordings[rows] = _Recording(parts, rows, self._longest)
            recording.fill(parts, tokens)
            return self._run(recording.batch, recording.tokens, recording.kept)[: len(tokens)]
        recording.fill(parts, tokens)
        if recording.graph is None and not self._record(recording):
            return None
        assert recording.graph is not None
        recording.graph.replay()
        assert recording.logits is not None
        return recording.logits[: len(tokens)]

    def _record(self, recording: _Recording) -> bool:
        """Capture the bucket's step; False, and no graphs from here on, if the model cannot be captured."""
        graph = stream = None
        try:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            # Capture only this thread's calls: transfers have their own threads.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                recording.logits = self._run(recording.batch, recording.tokens, recording.kept)
        except RuntimeError as error:
            # torch leaves the thread on the stream of a capture that it cannot end, and its allocator a reference to
            # the graph.
            if stream is not None:
                torch.cuda.set_stream(stream)
            self._failed = graph
            self._given_up = True
            self._recordings.clear()
            line = (str(error).strip().splitlines() or ["no reason given"])[0]
            _LOG.warning("decode runs without CUDA graphs, kernel by kernel: the model cannot be captured: %s", line)
            return False
        recording.graph = graph
        self._memory = self._memory or graph.pool()
        return True
