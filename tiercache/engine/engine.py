"""A paged-attention engine for Hugging Face decoders, on top of a cache of KV blocks.

    add_request ─► waiting ─► (loading) ─► running ─► finished
                      ▲         cache        │
                      └──── preempted ◄──────┘

A step is: take note of transfers that ended, decide (`Scheduler`), start loads, run the forward passes,
and settle what they computed: prefix cache, stores, sampled tokens. One thread; not to be shared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

import tiercache
from tiercache.engine.attention import Batch, Segment
from tiercache.engine.blocks import BlockManager
from tiercache.engine.model import HostedModel, choose_device, describe_model, read_shape
from tiercache.engine.offload import CacheLike, LoadResult, Offload
from tiercache.engine.probe import check_model
from tiercache.engine.sampling import SamplingParams, choose_tokens
from tiercache.engine.scheduler import Chunk, Scheduler
from tiercache.engine.sequence import Sequence, SequenceState
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError, DeadlineExceeded
from tiercache.layout import NamespaceSpec

Connect = Callable[[NamespaceSpec, torch.Tensor], CacheLike]
"""Makes a connector for the blocks of a namespace in a pool `[block, layer, 2, slot, kv_head, head_dim]`."""
# How long a step waits for a transfer when there is nothing to compute.
_IDLE_WAIT_S = 0.02
_CLOSE_TIMEOUT_S = 10.0


def connect_to(address: str | Path | None = None, *, name: str = "engine", required: bool = False) -> Connect:
    """Connects an engine to the daemon at `address` (by default where a daemon runs by default).

    With `required`, the engine raises DaemonUnavailable when no daemon answers; else it starts without
    its cache and finds the daemon when it comes.
    """

    def connect(namespace: NamespaceSpec, pool: torch.Tensor) -> CacheLike:
        blocks = tiercache.Pool.from_blocks(pool)
        return tiercache.connect(address, namespace=namespace, pool=blocks, name=name, required=required)

    return connect


class RequestOutput(NamedTuple):
    """What became of a request.

    `finish_reason` is `stop` (an end token), `length` or `abort`. Tokens of the prompt were found in the
    engine's pool (`pool_hit_tokens`), loaded from the cache (`external_hit_tokens`) or computed (the rest).
    """

    request_id: int
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    pool_hit_tokens: int
    external_hit_tokens: int
    ttft_s: float
    latency_s: float


class StepOutput(NamedTuple):
    """A new token of a request; `output` is set when it was the last one."""

    request_id: int
    token: int
    output: RequestOutput | None


class Engine:
    """Serves one model from one thread.

    Args:
        model_dir: a Hugging Face decoder folder with safetensors.
        settings: see `EngineSettings`.
        connect: makes the cache's connector, e.g. `connect_to(address)`. None: no cache.

    Loading reads and hashes the weights and tries the model on ~100 tokens. Raises ModelRefused and
    ConfigError, each with one line that says what to do.
    """

    def __init__(
        self, model_dir: str | Path, settings: EngineSettings | None = None, connect: Connect | None = None
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        self.shape = read_shape(model_dir, settings)
        self.namespace, self.root = describe_model(model_dir, settings)
        self.device = choose_device(settings.device)
        num_blocks = settings.pool_blocks or settings.pool_bytes // self.namespace.block_bytes
        if num_blocks < 1:
            needed = self.namespace.block_bytes
            raise ConfigError(f"pool_bytes is {settings.pool_bytes}: one block takes {needed}")
        self._model = HostedModel(model_dir, self.shape, self.device)
        check_model(self._model)
        self.pool = self._model.new_pool(num_blocks, settings.block_size)
        self._blocks = BlockManager(num_blocks, write_back=connect is not None and settings.write == "back")
        self._cache = connect(self.namespace, self.pool) if connect is not None else None
        self._offload = Offload(self._blocks, self._cache, settings)
        self._scheduler = Scheduler(self._blocks, self._offload, settings)
        self._sequences: dict[int, Sequence] = {}
        self._next_request_id = 0

    def add_request(self, prompt: Iterable[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt of token ids; returns its request id.

        Raises ConfigError for a prompt that cannot be served.
        """
        tokens, params = [int(token) for token in prompt], params or SamplingParams()
        if not tokens:
            raise ConfigError("the prompt is empty: give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.shape.vocabulary:
            raise ConfigError(f"a prompt token is not in 0..{self.shape.vocabulary - 1}: wrong tokenizer")
        total, capacity = len(tokens) + params.max_tokens, self._blocks.num_blocks * self.settings.block_size
        if total > self.shape.max_context:
            raise ConfigError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} exceed the context of "
                f"{self.shape.max_context}: shorten one of them"
            )
        if total > capacity:
            raise ConfigError(f"{total} tokens exceed the KV pool of {capacity}: raise pool_bytes")
        request_id = self._next_request_id
        self._next_request_id += 1
        sequence = Sequence(request_id, tokens, params, self.root, self.settings)
        self._sequences[request_id] = sequence
        self._scheduler.add(sequence)
        return request_id

    @property
    def unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return self._scheduler.unfinished

    def step(self) -> list[StepOutput]:
        """Compute one step; returns the new tokens, none while prompts are being computed or loaded.

        Waits a moment for a transfer when there is nothing else to do.
        """
        self._settle_loads(self._offload.poll())
        plan = self._scheduler.schedule()
        for order in plan.loads:
            if not self._offload.start_load(order):
                self._scheduler.loaded(order.sequence)
        outputs = [output for chunks in plan.passes for output in self._settle(chunks, self._run(chunks))]
        self._offload.clean()
        if not plan.passes:
            self._offload.wait(_IDLE_WAIT_S)
        if not self.unfinished:
            self.check_integrity()
        return outputs

    def _settle_loads(self, results: Iterable[LoadResult]) -> None:
        for order, good_blocks, ended in results:
            sequence = order.sequence
            usable = sequence.usable_hit_blocks(order.first + good_blocks)
            if not ended or usable < order.first:
                # Its blocks are not its own to compute into: the copies still run, or others read them.
                self._blocks.release(sequence.take_blocks())
                self._scheduler.requeue(sequence)
                continue
            for index in range(order.first, usable):
                self._blocks.register(sequence.block_table[index], sequence.chain, index, stored=True)
            sequence.registered_blocks = sequence.stored_blocks = usable
            sequence.computed = usable * self.settings.block_size
            if sequence.first_token_s is None:
                sequence.pool_hit_tokens = order.first * self.settings.block_size
                sequence.external_hit_tokens = sequence.computed - sequence.pool_hit_tokens
            self._scheduler.loaded(sequence)

    def _run(self, chunks: list[Chunk]) -> torch.Tensor:
        """One forward pass; the logits after each chunk that ends its sequence, `[row, vocabulary]`."""
        segments: list[Segment] = []
        tokens: list[int] = []
        rows: list[int] = []
        for sequence, start, end in chunks:
            segments.append(Segment(len(tokens), start, end, sequence.block_table, sequence.contiguous))
            tokens += sequence.tokens[start:end]
            if end == len(sequence.tokens):
                rows.append(len(tokens) - 1)
        return self._model.forward(Batch(self.pool, segments), tokens, rows)

    def _settle(self, chunks: list[Chunk], logits: torch.Tensor) -> list[StepOutput]:
        """Make what a pass computed available: to other sequences, to the cache, to the caller."""
        sampled = [chunk.sequence for chunk in chunks if chunk.end == len(chunk.sequence.tokens)]
        tokens = choose_tokens(logits, [sequence.sampler for sequence in sampled]) if sampled else []
        for sequence, _, end in chunks:
            sequence.computed = end
            self._register_full_blocks(sequence)
        for chunk in chunks:
            self._offload.store_full_blocks(chunk.sequence)
        return [self._append(sequence, token) for sequence, token in zip(sampled, tokens, strict=True)]

    def _register_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.keyed_full_blocks()
        for index in range(sequence.registered_blocks, full):
            self._blocks.register(sequence.block_table[index], sequence.chain, index)
        sequence.registered_blocks = max(sequence.registered_blocks, full)

    def _append(self, sequence: Sequence, token: int) -> StepOutput:
        params = sequence.params
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter()
        sequence.tokens.append(token)
        if token in params.stop_token_ids or (token in self.shape.eos_token_ids and not params.ignore_eos):
            sequence.finish_reason = "stop"
        elif len(sequence.output) == params.max_tokens:
            sequence.finish_reason = "length"
        output = self._finish(sequence) if sequence.finish_reason else None
        return StepOutput(sequence.request_id, token, output)

    def _finish(self, sequence: Sequence) -> RequestOutput:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        now_s = time.perf_counter()
        return RequestOutput(
            sequence.request_id,
            sequence.output,
            sequence.finish_reason,
            sequence.prompt_count,
            sequence.pool_hit_tokens,
            sequence.external_hit_tokens,
            (sequence.first_token_s or now_s) - sequence.arrived_s,
            now_s - sequence.arrived_s,
        )

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now; None if there is no such request (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        self._offload.abandon(sequence)
        return self._finish(sequence)

    def generate(
        self,
        prompts: SequenceOf[Iterable[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        stall_timeout_s: float = 60.0,
    ) -> list[RequestOutput]:
        """Serve `prompts` to the end; outputs in their order. Blocks.

        Raises DeadlineExceeded when nothing could be computed for `stall_timeout_s`.
        """
        each = list(params) if isinstance(params, SequenceOf) else [params] * len(prompts)
        ids = [self.add_request(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        outputs: dict[int, RequestOutput] = {}
        last_progress = (self._progress(), time.monotonic())
        while len(outputs) < len(ids):
            for step_output in self.step():
                if step_output.output is not None and step_output.request_id in ids:
                    outputs[step_output.request_id] = step_output.output
            if self._progress() != last_progress[0]:
                last_progress = (self._progress(), time.monotonic())
            elif time.monotonic() - last_progress[1] > stall_timeout_s:
                raise DeadlineExceeded(f"nothing advanced for {stall_timeout_s} s: transfers hold the pool")
        return [outputs[request_id] for request_id in ids]

    def _progress(self) -> tuple[int, int, int]:
        alive = self._sequences.values()
        return len(alive), sum(len(one.tokens) for one in alive), sum(one.computed for one in alive)

    def drain(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Give the cache everything that it is due and wait for all transfers; False at the deadline.

        With write-back that is every idle block; blocks of requests under way stay.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._settle_loads(self._offload.poll())
            self._offload.clean(all_blocks=True)
            if not self._offload.busy:
                return True
            if time.monotonic() >= deadline_s:
                return False
            self._offload.wait(_IDLE_WAIT_S)

    def reset_pool(self) -> None:
        """Forget every block in the pool; the cache keeps its own. Raises ConfigError while requests run."""
        if self.unfinished or not self.drain():
            raise ConfigError("the pool is in use: finish or abort all requests before reset_pool")
        self._blocks.forget_all()

    def check_integrity(self) -> None:
        """Recount who holds what; raises AssertionError where the books are wrong. O(pool blocks)."""
        owners: Counter[int] = self._offload.holds()
        for sequence in self._sequences.values():
            owners.update(sequence.block_table)
            in_use = sequence.state in (SequenceState.RUNNING, SequenceState.LOADING)
            assert in_use or not sequence.block_table, f"request {sequence.request_id} waits and holds blocks"
            assert sequence.computed <= len(sequence.block_table) * self.settings.block_size
        self._blocks.check_integrity(owners)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what the pool holds now (in blocks)."""
        return {
            "pool_blocks": self._blocks.num_blocks,
            "idle_blocks": self._blocks.idle_count,
            "evictions": self._blocks.evictions,
            "preemptions": self._scheduler.preemptions,
            **asdict(self._offload.counters),
        }

    def close(self) -> None:
        """Abort what runs, wait for transfers (10 s at most) and close the connector."""
        for request_id in list(self._sequences):
            self.abort(request_id)
        self.drain()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
