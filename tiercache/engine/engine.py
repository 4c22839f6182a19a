"""A paged-attention engine for Hugging Face decoders, on top of a cache of KV blocks.

    add_request ─► waiting ─► (loading) ─► running ─► finished
                      ▲         cache        │
                      └──── preempted ◄──────┘

A step: handle transfers that ended, decide (`Scheduler`), start loads, run the forward passes, and process their
results: prefix cache, stores, sampled tokens. For one thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch

from tiercache.connector.costs import CostModel
from tiercache.engine.attention import Batch
from tiercache.engine.blocks import BlockManager
from tiercache.engine.connect import Connect, GroupedCache, connect_groups, file_states, identify_model, tier_layout
from tiercache.engine.kv_pool import BatchSegment, count_pool_blocks, fit_model_len, pool_setting
from tiercache.engine.loads import LoadResult
from tiercache.engine.model import HostedModel, choose_device, read_shape
from tiercache.engine.offload import Offload
from tiercache.engine.probe import check_model, find_streaming
from tiercache.engine.sampling import Choice, SamplingParams, choose
from tiercache.engine.scheduler import Chunk, Scheduler
from tiercache.engine.sequence import RequestOutput, Sequence, SequenceState, StepOutput, output_of
from tiercache.engine.settings import Clock, EngineSettings
from tiercache.errors import ConfigError, DeadlineExceeded, ModelRefused
from tiercache.protocol.keys import salted_root
from tiercache.protocol.messages import ModelCard

# How long a step waits for a transfer when there is nothing to compute.
_IDLE_WAIT_S = 0.02
_CLOSE_TIMEOUT_S = 10.0


def _n(params: SamplingParams | None) -> int:
    return params.n if params is not None else 1


class Engine:
    """Serves one model from one thread.

    Args:
        model_dir: a Hugging Face decoder folder with safetensors.
        settings: see `EngineSettings`.
        connect: makes the cache's connector, e.g. `connect_to(address)`. None: no cache.
        clock: what deadlines and costs are measured by.

    Loading reads and hashes the weights and tests the model on ~100 tokens. Raises ModelRefused and
    ConfigError, each with one line that says what to do.
    """

    def __init__(
        self,
        model_dir: str | Path,
        settings: EngineSettings | None = None,
        connect: Connect | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock = clock or Clock()
        self.settings = settings = settings or EngineSettings()
        self.shape = read_shape(model_dir, settings)
        files = file_states(model_dir)
        self.namespaces, self._content = identify_model(model_dir, settings)
        self.root = salted_root(self._content, settings.salt)
        self.device = choose_device(settings.device)
        self._model = HostedModel(model_dir, self.shape, self.device)
        if file_states(model_dir) != files:
            raise ModelRefused(f"files of {model_dir} changed while they were read: start again when they are complete")
        check_model(self._model)
        self._streaming = find_streaming(self._model, settings)
        self._groups = groups = self.shape.groups(settings)
        num_blocks = self._count_blocks()
        self.pool = self._model.new_pool(
            num_blocks, settings.block_size, settings.kv_cache_dtype, settings.max_num_seqs, groups
        )
        if self._streaming is None:
            self._model.prepare(self.pool, settings.max_num_seqs, self.max_model_len)
        write_back = connect is not None and settings.write == "back"
        self._blocks = BlockManager(
            num_blocks, groups=len(groups.groups), write_back=write_back, on_blank=self.pool.retire
        )
        self._cache = self._connect(connect) if connect is not None else None
        self.announce([Path(model_dir).resolve().name, str(Path(model_dir).resolve())])
        self._cost = CostModel(settings.block_size, self.namespaces[0].block_bytes)
        self._offload = Offload(self._blocks, self._cache, self._cost, settings, clock)
        self._scheduler = Scheduler(self._blocks, self._offload, settings, clock)
        self._sequences: dict[int, list[Sequence]] = {}
        self._next_request_id = 0
        self._prompt_tokens = self._generation_tokens = 0

    def _count_blocks(self) -> int:
        """Blocks of the pool; sets `max_model_len`, which depends on them. Raises ConfigError."""
        settings, groups = self.settings, self._groups
        layout = self.shape.kv_layout(settings.block_size, settings.kv_cache_dtype, groups.block_layers)
        tail_bytes = layout.tail_bytes(settings.max_num_seqs * len(groups.groups))
        num_blocks = count_pool_blocks(settings, layout.block_bytes, self.device, tail_bytes)
        self.max_model_len = fit_model_len(
            settings,
            self.shape.max_context,
            layout.block_bytes,
            num_blocks,
            lambda tokens: groups.most_blocks(tokens, settings),
        )
        return num_blocks

    def _connect(self, connect: Connect) -> GroupedCache:
        layouts = [tier_layout(self.shape, group, self.settings) for group in self._groups.groups]
        staged = self.settings.tier_dtype != "auto"
        return connect_groups(connect, self.pool, self.namespaces, layouts, staged=staged)

    def announce(self, names: list[str]) -> None:
        """Announce this model under these names, for the daemon's affinity query."""
        if self._cache is not None:
            namespaces = [namespace.fingerprint() for namespace in self.namespaces]
            self._cache.announce([ModelCard(names, self._content, namespaces, self.settings.block_size)])

    def add_request(self, prompt: Iterable[int], params: SamplingParams | None = None, priority: int = 0) -> int:
        """Queue a prompt of token ids; returns its request id.

        Requests with a lower `priority` are served first, equal ones in order of arrival. With `params.n` above 1
        the prompt is computed once. Raises ConfigError for a prompt that cannot be served.
        """
        tokens, params = [int(token) for token in prompt], params or SamplingParams()
        self.check_request(tokens, params)
        request_id = self._next_request_id
        self._next_request_id += 1
        sequence = Sequence(
            request_id, tokens, params, self.root, self.settings, priority=priority, windows=self._groups.windows
        )
        self._sequences[request_id] = [sequence]
        self._scheduler.add(sequence)
        return request_id

    def check_request(self, tokens: list[int], params: SamplingParams) -> None:
        """Raises ConfigError for a request that cannot be served. Any thread may call it."""
        if not tokens:
            raise ConfigError("the prompt is empty: give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.shape.vocabulary:
            raise ConfigError(f"a prompt token is not in 0..{self.shape.vocabulary - 1}: wrong tokenizer")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(not 0 <= token < self.shape.vocabulary for token in ids):
                raise ConfigError(f"{name} names a token that is not in 0..{self.shape.vocabulary - 1}")
        if params.n > self.settings.max_num_seqs:
            raise ConfigError(
                f"n is {params.n}: lower it to max_num_seqs {self.settings.max_num_seqs} at most, or raise that"
            )
        limit, left = self.max_model_len, self.max_model_len - len(tokens)
        if left >= params.max_tokens:
            return
        remedies = ["shorten the prompt"]
        if left > 0:
            remedies.append(f"lower max_tokens to {left}")
        if limit < self.shape.max_context:
            remedies.append(f"raise {pool_setting(self.settings)}, since the KV pool holds no more")
        elif self.settings.max_model_len:
            remedies.append("raise max_model_len")
        raise ConfigError(
            f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} exceed the {limit} tokens that a sequence "
            f"may have: {', or '.join(remedies)}"
        )

    @property
    def unfinished(self) -> bool:
        """True if any request still has tokens to come."""
        return self._scheduler.unfinished

    @property
    def busy(self) -> bool:
        """True if a step has anything to do: compute, or handle transfers that end."""
        return self.unfinished or self._offload.busy

    def step(self) -> list[StepOutput]:
        """Compute one step; returns the new tokens, none while prompts are being computed or loaded.

        Waits a moment for a transfer when there is nothing else to do.
        """
        self._settle_loads()
        plan = self._scheduler.schedule()
        for source, target in plan.copies:
            self.pool.copy(source, target)
        for order in plan.loads:
            if not self._offload.loads.start(order):
                self._scheduler.settle_load(LoadResult.nothing(order, ended=True))
        began_s = self._clock.now_s()
        outputs = [output for chunks in plan.passes for output in self._settle(chunks, self._run(chunks))]
        waited = bool(outputs) or self.device.type == "cpu"
        spans = [(start, end) for chunks in plan.passes for _, start, end in chunks]
        if not self.settings.always_load:
            self._cost.note_step(spans, self._clock.now_s() - began_s, waited)
        self._offload.stores.clean()
        if not plan.passes:
            self._offload.wait(_IDLE_WAIT_S)
        if plan.passes and not self.unfinished:
            held = self._offload.holds()
            assert self._blocks.idle_count + len(held) == self._blocks.num_blocks, "an idle engine holds blocks"
        return outputs

    def _settle_loads(self) -> None:
        for result in self._offload.poll():
            self._scheduler.settle_load(result)

    def _run(self, chunks: list[Chunk]) -> torch.Tensor:
        """One forward pass; the logits after each chunk that ends its sequence, `[row, vocabulary]`."""
        segments: list[list[BatchSegment]] = [[] for _ in self._groups.groups]
        tokens: list[int] = []
        rows: list[int] = []
        for sequence, start, end in chunks:
            for own, table in zip(segments, sequence.tables, strict=True):
                own.append(BatchSegment(len(tokens), start, end, table.ids))
            tokens += sequence.tokens[start:end]
            if end == len(sequence.tokens):
                rows.append(len(tokens) - 1)
        batch = Batch(self.pool, segments[0], streaming=self._streaming, others=segments[1:])
        return self._model.forward(batch, tokens, rows)

    def _settle(self, chunks: list[Chunk], logits: torch.Tensor) -> list[StepOutput]:
        """Make the results of a pass available: to other sequences, to the cache, to the caller."""
        sampled: list[Sequence] = []
        rows: list[int] = []
        for sequence, _, end in chunks:
            sequence.computed = end
            self._scheduler.register_full_blocks(sequence)
            if self.settings.enable_prefix_caching:
                self._offload.stores.store_full_blocks(sequence)
            self._scheduler.release_unseen(sequence)
            if end == len(sequence.tokens):
                row = rows[-1] + 1 if rows else 0
                forks = self._scheduler.fork(sequence)
                self._sequences[sequence.request_id] += forks
                sampled += [sequence, *forks]
                rows += [row] * (1 + len(forks))
        if not sampled:
            return []
        if len(rows) > len(logits):
            logits = logits[rows]
        choices = choose(logits, [sequence.sampler for sequence in sampled], self.shape.eos_token_ids)
        return [self._append(sequence, choice) for sequence, choice in zip(sampled, choices, strict=True)]

    def _append(self, sequence: Sequence, choice: Choice) -> StepOutput:
        params, token = sequence.params, choice.token
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter()
            self._prompt_tokens += sequence.prompt_count if sequence.index == 0 else 0
        self._generation_tokens += 1
        sequence.tokens.append(token)
        if token in params.stop_token_ids or (token in self.shape.eos_token_ids and not params.ignore_eos):
            sequence.finish_reason = "stop"
        elif len(sequence.output) == params.max_tokens:
            sequence.finish_reason = "length"
        output = self._finish(sequence) if sequence.finish_reason else None
        return StepOutput(sequence.request_id, token, output, sequence.index, choice.logprobs)

    def _finish(self, sequence: Sequence) -> RequestOutput:
        self._scheduler.remove(sequence)
        others = self._sequences[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._sequences[sequence.request_id]
        return output_of(sequence)

    def abort(self, request_id: int, index: int | None = None) -> list[RequestOutput]:
        """End a request now, or sequence `index` of it that has a token.

        Returns the output so far of its unfinished sequences, nothing if none are left.
        """
        outputs = []
        for sequence in list(self._sequences.get(request_id, ())):
            if index not in (None, sequence.index):
                continue
            sequence.finish_reason = "abort"
            self._offload.loads.abandon(sequence)
            outputs.append(self._finish(sequence))
        return outputs

    def generate(
        self,
        prompts: SequenceOf[Iterable[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        stall_timeout_s: float = 60.0,
    ) -> list[RequestOutput]:
        """Serve `prompts` to the end; `n` outputs of each, in their order. Blocks.

        Raises ConfigError for a prompt that cannot be served, and DeadlineExceeded when nothing could be computed
        for `stall_timeout_s`. Then all of the prompts are aborted.
        """
        each = list(params) if isinstance(params, SequenceOf) else [params] * len(prompts)
        ids: list[int] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                ids.append(self.add_request(prompt, own))
            return self._serve(ids, [_n(own) for own in each], stall_timeout_s)
        finally:
            for request_id in ids:  # ended requests are no longer there
                self.abort(request_id)

    def _serve(self, ids: list[int], counts: list[int], stall_timeout_s: float) -> list[RequestOutput]:
        wanted = [(request_id, index) for request_id, n in zip(ids, counts, strict=True) for index in range(n)]
        outputs: dict[tuple[int, int], RequestOutput] = {}
        last_progress = (self.progress, self._clock.now_s())
        while len(outputs) < len(wanted):
            for step in self.step():
                if step.output is not None and step.request_id in ids:
                    outputs[step.request_id, step.index] = step.output
            if self.progress != last_progress[0]:
                last_progress = (self.progress, self._clock.now_s())
            elif self._clock.now_s() - last_progress[1] > stall_timeout_s:
                raise DeadlineExceeded(f"nothing advanced for {stall_timeout_s} s: transfers hold the pool")
        return [outputs[sequence] for sequence in wanted]

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever anything advances."""
        alive = self._alive
        return len(alive), sum(len(one.tokens) for one in alive), sum(one.computed for one in alive)

    @property
    def _alive(self) -> list[Sequence]:
        return [sequence for sequences in self._sequences.values() for sequence in sequences]

    def drain(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Store all that the cache should have and wait for all transfers; False at the deadline.

        With write-back that is every idle block; blocks of running requests stay.
        """
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            self._settle_loads()
            self._offload.stores.clean(all_blocks=True)
            if not self._offload.busy:
                return True
            if self._clock.now_s() >= deadline_s:
                return False
            self._offload.wait(_IDLE_WAIT_S)

    def reset_pool(self) -> None:
        """Drop every block in the pool; the cache keeps its own. Raises ConfigError while requests run."""
        if self.unfinished or not self.drain():
            raise ConfigError("the pool is in use: finish or abort all requests before reset_pool")
        self._blocks.forget_all()

    def check_integrity(self) -> None:
        """Recount all references; raises AssertionError if the bookkeeping is wrong. O(pool blocks)."""
        owners: Counter[int] = self._offload.holds()
        for sequence in self._alive:
            owners.update(sequence.held_blocks)
            in_use = sequence.state in (SequenceState.RUNNING, SequenceState.LOADING)
            for table in sequence.tables:
                assert in_use or not table.ids, f"request {sequence.request_id} waits and holds blocks"
                assert sequence.computed <= len(table.ids) * self.settings.block_size
        self._scheduler.check_integrity()
        self._blocks.check_integrity(owners)
        self.pool.check_integrity(set(owners))

    def stats(self) -> dict[str, int | float]:
        """The current state, and counters since the start.

        Requests count by their sequences: `running`, `waiting`, `loading`. `kv_cache_usage` is the share of the pool's
        blocks in use, for any group of layers. Tokens: `prompt_tokens` and `generation_tokens` served,
        `prefix_cache_queries` of prompts that entered and `prefix_cache_hits` of these found in the pool;
        `external_...` are the same for the cache, of tokens not found in the pool. Blocks: see `OffloadCounters`.
        Loads: see `CostModel`.
        """
        scheduler, blocks = self._scheduler, self._blocks
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "loading": len(scheduler.loading),
            "kv_cache_usage": 1 - blocks.idle_count / blocks.num_blocks,
            "pool_blocks": blocks.num_blocks,
            "idle_blocks": blocks.idle_count,
            "evictions": blocks.evictions,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            **asdict(scheduler.counters),
            **self._offload.stats(),
        }

    def close(self) -> None:
        """Abort running requests, wait for transfers (10 s at most) and close the connector."""
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
