"""What the next step computes. It decides only: nothing here runs a model or changes a block.

Sequences are served by their rank: priority first, then arrival. Each step takes every decoding sequence,
then prompt chunks while the token budget lasts; a sequence enters when blocks for all its tokens are there.
When a decoding sequence finds no block, the last in rank gives its blocks back: they are
stored, and found again when its turn comes. Nobody waits for a load but who needs it.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass

from tiercache.engine.blocks import BlockManager
from tiercache.engine.cost import LoadChoice
from tiercache.engine.loads import LoadOrder, LoadResult
from tiercache.engine.offload import Offload
from tiercache.engine.sequence import Rank, Sequence, SequenceState
from tiercache.engine.settings import EngineSettings
from tiercache.engine.step_plan import BlockCopy, Chunk, StepPlan, next_chunks, pack

# How far down the queue one step looks for sequences to admit, and for prefixes to bring up from NVMe.
_MAX_LOOKS = 64
_MAX_PREFETCHED = 16
# Exchanges with the daemon that one step may spend on bringing up prefixes.
_PREFETCHES_PER_STEP = 2
# How long decoding waits for blocks that transfers hold, before it takes those of another sequence.
_ROOM_TIMEOUT_S = 0.25


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start, in tokens unless named otherwise. Every sequence is asked for once, when it first enters."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Scheduler:
    """Queues of sequences, and the policy over them."""

    def __init__(self, blocks: BlockManager, offload: Offload, settings: EngineSettings) -> None:
        self.waiting: list[Sequence] = []  # by rank
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        self._blocks = blocks
        self._offload = offload
        self._settings = settings

    def add(self, sequence: Sequence) -> None:
        """A new sequence, or one that has given its blocks back."""
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_rank)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    def schedule(self) -> StepPlan:
        """Decide one step. Takes blocks for everything in the plan, and starts stores of preempted sequences."""
        plan = StepPlan()
        decodes = self._plan_decodes(plan)
        budget = self._settings.step_tokens - len(decodes)
        self._admit(plan, budget)
        plan.passes = pack(decodes, self._plan_prefills(budget))
        self._prefetch()
        return plan

    # --- running sequences

    def _plan_decodes(self, plan: StepPlan) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.state is SequenceState.RUNNING and not sequence.prefilling and self._grow(sequence, plan):
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
        return [chunk for chunk in chunks if chunk.sequence.state is SequenceState.RUNNING]

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make room for the next token; False if the sequence sits out this step (or was preempted)."""
        table, tail = sequence.block_table, sequence.computed // self._settings.block_size
        shared = tail < len(table) and self._blocks.references(table[tail]) > 1
        if tail < len(table) and not shared:
            return True
        while (taken := self._blocks.allocate(1, after=table[tail - 1] if tail else None)) is None:
            if self._waits_for_room(sequence):
                return False
            victim = max((*self.running, *self.loading), key=_rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.short_since_s = None
        if shared:
            # Forks write their own tokens behind a prompt that ends within a block: each into a copy.
            [old] = sequence.take_blocks(keep=tail)
            self._blocks.release([old])
            plan.copies.append(BlockCopy(old, taken[0]))
        sequence.block_table += taken
        return True

    def _waits_for_room(self, sequence: Sequence) -> bool:
        """Whether transfers are about to free blocks. Not for ever: a copy may hang."""
        now_s = time.monotonic()
        if sequence.short_since_s is None:
            sequence.short_since_s = now_s
        return self._offload.makes_room() and now_s < sequence.short_since_s + _ROOM_TIMEOUT_S

    def _preempt(self, victim: Sequence) -> None:
        self.counters.preemptions += 1
        if victim.state is SequenceState.LOADING:
            self.loading.remove(victim)
            self._offload.loads.abandon(victim)
        else:
            self.running.remove(victim)
            victim.key_all_full_blocks()
            self.register_full_blocks(victim)
            if self._is_worth_storing(victim):
                self._offload.stores.store_full_blocks(victim)
        victim.preemptions += 1
        self._give_back(victim)

    def _is_worth_storing(self, victim: Sequence) -> bool:
        """Whether loading what is not stored yet should take less than computing it again."""
        first, end = victim.stored_blocks, victim.keyed_full_blocks()
        size, cost = self._settings.block_size, self._offload.cost
        return cost.load_s(end - first, 0) < cost.prefill_s(first * size, end * size)

    def _give_back(self, sequence: Sequence) -> None:
        """Back into the queue without blocks."""
        self._blocks.release(sequence.take_blocks())
        sequence.restart()
        self.add(sequence)

    def _plan_prefills(self, budget: int) -> list[list[Chunk]]:
        """Chunks that fit into the budget, for each sequence that gets any."""
        planned: list[list[Chunk]] = []
        for sequence in sorted(self.running, key=_rank):
            if not sequence.prefilling:
                continue
            left = len(sequence.tokens) - sequence.computed
            if self._settings.enable_chunked_prefill:
                chunks = next_chunks(sequence, budget)
            else:
                chunks = next_chunks(sequence, left) if left <= budget or not planned else []
            if chunks:
                planned.append(chunks)
                budget -= chunks[-1].end - sequence.computed
        return planned

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Put what was computed into the prefix cache of the pool."""
        full = sequence.keyed_full_blocks()
        for index in range(sequence.registered_blocks, full):
            self._blocks.register(sequence.block_table[index], sequence.chain, index)
        sequence.registered_blocks = max(sequence.registered_blocks, full)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The request's other sequences, now that its prompt is computed; they share all blocks."""
        forks = [sequence.fork(index) for index in range(1, sequence.forks_due + 1)]
        sequence.forks_due = 0
        for other in forks:
            self._blocks.hold(other.block_table)
            self.running.append(other)
        return forks

    # --- waiting sequences

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Move sequences from `waiting` to `running` or `loading` while there is room."""
        room = self._settings.max_num_seqs - sum(1 + one.forks_due for one in (*self.running, *self.loading))
        for sequence in self.waiting[:_MAX_LOOKS]:
            ahead = sum(
                len(one.tokens) - one.computed for one in self.running if one.prefilling and one.rank < sequence.rank
            )
            if 1 + sequence.forks_due > room or ahead >= budget:
                return
            found = self._blocks.find(sequence.chain, sequence.max_hit_blocks)
            if len(found) < sequence.max_hit_blocks and self._is_coming(sequence.chain.key(len(found)), len(found)):
                continue
            if not self._place(sequence, found, plan):
                return
            room -= 1 + sequence.forks_due

    def _is_coming(self, key: bytes, index: int) -> bool:
        """Whether another sequence is loading or computing block `index` of the same chain."""
        return any(
            one.registered_blocks <= index < len(one.chain) and one.chain.key(index) == key
            for one in (*self.loading, *self.running)
            if one.computed < len(one.chain) * self._settings.block_size
        )

    def _place(self, sequence: Sequence, found: list[int], plan: StepPlan) -> bool:
        """Give a sequence its blocks: `found` in the pool, to be loaded, or blank. False: no room now."""
        kept = found[: sequence.usable_hit_blocks(len(found))]
        # First whether there is room at all: a match asks the cache and takes a lease there.
        if not self._has_room(sequence, kept):
            return False
        match, choice = None, LoadChoice(len(kept), len(kept))
        if len(found) < sequence.max_hit_blocks and not sequence.skip_external:
            match = self._offload.loads.match(sequence)
        if match is not None:
            choice = self._offload.loads.choose(sequence, match, len(kept), len(found))
            kept = found[: choice.first]
        self._blocks.hold(kept)
        count = sequence.blocks_for(len(sequence.tokens)) - len(kept)
        new = self._blocks.allocate(count, after=kept[-1] if kept else None)
        assert new is not None, "a load keeps more of what was found, and so takes fewer blocks, never more"
        self.waiting.remove(sequence)
        sequence.block_table = [*kept, *new]
        sequence.registered_blocks = len(kept)
        # What is in the pool may not be in the cache: the cache was away, or has lost it.
        sequence.stored_blocks = self._blocks.stored_run(kept)
        if match is not None and choice.end > choice.first:
            sequence.state = SequenceState.LOADING
            self.loading.append(sequence)
            plan.loads.append(LoadOrder(sequence, match, choice))
        else:
            self._offload.loads.give_up(match)
            self._enter(sequence, len(kept), len(kept))
        return True

    def _has_room(self, sequence: Sequence, kept: list[int]) -> bool:
        # One block for the growth of each running sequence, else admission would only cause preemption.
        needed = sequence.blocks_for(len(sequence.tokens)) - len(kept) + len(self.running)
        needed += sum(map(self._blocks.is_clean, kept))
        if needed <= self._blocks.clean_count:
            return True
        self._offload.stores.ask_for(needed)
        return False

    def _enter(self, sequence: Sequence, pool_blocks: int, good_blocks: int) -> None:
        """A sequence runs: its first `good_blocks` blocks were found, the first `pool_blocks` of them in the pool."""
        size, counters = self._settings.block_size, self.counters
        sequence.state = SequenceState.RUNNING
        sequence.computed = good_blocks * size
        sequence.drop_lost_keys()
        self.running.append(sequence)
        if sequence.entered:
            return
        sequence.entered = True
        sequence.pool_hit_tokens = pool_blocks * size
        sequence.external_hit_tokens = sequence.computed - sequence.pool_hit_tokens
        counters.prefix_cache_queries += sequence.prompt_count
        counters.prefix_cache_hits += sequence.pool_hit_tokens
        if self._offload.exists:
            counters.external_prefix_cache_queries += sequence.prompt_count - sequence.pool_hit_tokens
            counters.external_prefix_cache_hits += sequence.external_hit_tokens

    def settle_load(self, result: LoadResult) -> None:
        """A load has ended, well or not, or was given up: what is missing is computed."""
        (sequence, _, choice), good_blocks, ended = result
        self.loading.remove(sequence)
        usable = sequence.usable_hit_blocks(choice.first + good_blocks)
        if not ended or usable < choice.first:
            # Its blocks are not its own to compute into: the copies still run, or others read them.
            self._give_back(sequence)
            sequence.skip_external = True
            return
        for index in range(choice.first, usable):
            self._blocks.register(sequence.block_table[index], sequence.chain, index, stored=True)
        sequence.registered_blocks = sequence.stored_blocks = usable
        self._enter(sequence, choice.first, usable)

    def _prefetch(self) -> None:
        """Bring prefixes up to DRAM while their sequences wait for room."""
        asked = 0
        for sequence in self.waiting[:_MAX_PREFETCHED]:
            if not sequence.prefetched and asked < _PREFETCHES_PER_STEP:
                sequence.prefetched = True
                self._offload.loads.prefetch(sequence)
                asked += 1

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: take it out of its queue and give its blocks back."""
        queues = {SequenceState.WAITING: self.waiting, SequenceState.LOADING: self.loading}
        queues.get(sequence.state, self.running).remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._blocks.forget(sequence.chain, sequence.first_private_block)
        self._blocks.release(sequence.take_blocks())

    def check_integrity(self) -> None:
        """Raises AssertionError where a queue is wrong."""
        queues = {
            SequenceState.WAITING: self.waiting,
            SequenceState.LOADING: self.loading,
            SequenceState.RUNNING: self.running,
        }
        for state, queue in queues.items():
            for sequence in queue:
                assert sequence.state is state, f"request {sequence.request_id} is {sequence.state} and queued {state}"
        assert sorted(self.waiting, key=_rank) == self.waiting, "the queue is out of order"
        seats = sum(1 + sequence.forks_due for sequence in (*self.loading, *self.running))
        assert seats <= self._settings.max_num_seqs, f"{seats} sequences hold blocks"
