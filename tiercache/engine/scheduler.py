"""What the next step computes. It decides only: nothing here runs a model or moves a byte.

Sequences are served in the order of their arrival. Each step takes every decoding sequence, then
prompt chunks up to the token budget; a sequence enters when blocks for all its tokens are there. When a
decoding sequence finds no block, the youngest one gives its blocks back and starts over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.engine.blocks import BlockManager
from tiercache.engine.offload import LoadOrder, Offload
from tiercache.engine.sequence import Sequence, SequenceState
from tiercache.engine.settings import EngineSettings


class Chunk(NamedTuple):
    """Tokens `[start, end)` of a sequence, to be computed in one forward pass."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class StepPlan:
    """`passes` are forward passes, to be run in this order; `loads` are to be started before them."""

    passes: list[list[Chunk]] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


class Scheduler:
    """Queues of sequences, and the policy over them."""

    def __init__(self, blocks: BlockManager, offload: Offload, settings: EngineSettings) -> None:
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._blocks = blocks
        self._offload = offload
        self._settings = settings

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    def schedule(self) -> StepPlan:
        """Decide one step. Takes blocks for everything in the plan; computes and copies nothing."""
        plan = StepPlan()
        decodes = self._plan_decodes()
        self._admit(plan)
        prefills = self._plan_prefills()
        if self._settings.exact:
            # What else is in a matrix product can change the last bits of a row. So a chunk, whose K and V
            # may be reused, is computed alone; tokens that are decoded are never reused.
            plan.passes += [[chunk] for chunk in prefills]
            plan.passes += [decodes] if decodes else []
        elif decodes or prefills:
            plan.passes.append(decodes + prefills)
        return plan

    def _plan_decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if sequence.state is SequenceState.RUNNING and not sequence.prefilling and self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.computed, sequence.next_edge()))
        return [chunk for chunk in chunks if chunk.sequence.state is SequenceState.RUNNING]

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the next token; False if the sequence sits out this step (or was preempted)."""
        while sequence.blocks_for(len(sequence.tokens)) > len(sequence.block_table):
            taken = self._blocks.allocate(1, after=sequence.block_table[-1])
            if taken is not None:
                sequence.add_blocks(taken)
            elif self._offload.makes_room():
                return False  # blocks come free when a transfer is done
            else:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._blocks.release(victim.take_blocks())
        victim.restart()
        victim.state = SequenceState.WAITING
        self.waiting.appendleft(victim)

    def _plan_prefills(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._settings.step_tokens
        for sequence in self.running:
            if sequence.prefilling:
                end = sequence.next_edge()
                if chunks and end - sequence.computed > budget:
                    break
                chunks.append(Chunk(sequence, sequence.computed, end))
                budget -= end - sequence.computed
        return chunks

    def _admit(self, plan: StepPlan) -> None:
        """Move sequences from `waiting` to `running` or `loading` while there is room."""
        budget = self._settings.step_tokens - sum(
            sequence.next_edge() - sequence.computed for sequence in self.running if sequence.prefilling
        )
        room = self._settings.max_sequences - len(self.running) - len(self.loading)
        skipped: list[Sequence] = []
        while self.waiting and room > 0 and budget > 0:
            sequence = self.waiting.popleft()
            chain, limit = sequence.chain, sequence.max_hit_blocks
            found = self._blocks.find(chain, limit)
            if len(found) < limit and self._offload.is_loading(chain.key(len(found))):
                skipped.append(sequence)  # another one brings the same blocks: wait for those
                continue
            if not self._place(sequence, found, plan):
                self.waiting.appendleft(sequence)
                break
            room -= 1
            if sequence.state is SequenceState.RUNNING:
                budget -= sequence.next_edge() - sequence.computed
        self.waiting.extendleft(reversed(skipped))

    def _place(self, sequence: Sequence, found: list[int], plan: StepPlan) -> bool:
        """Give a sequence its blocks: `found` in the pool, to be loaded, or blank. False: no room now."""
        match, reach = None, 0
        # First whether there is room at all: a match asks the cache and takes a lease there.
        kept = found[: sequence.usable_hit_blocks(len(found))]
        if not self._has_room(sequence, kept):
            return False
        if len(found) < sequence.max_hit_blocks and not sequence.skip_external:
            match = self._offload.match(sequence)
            reach = sequence.usable_hit_blocks(match.blocks) if match is not None else 0
        if reach > len(kept):
            kept = found[: min(len(found), reach)]
        self._blocks.hold(kept)
        new = self._blocks.allocate(
            sequence.blocks_for(len(sequence.tokens)) - len(kept), after=kept[-1] if kept else None
        )
        if new is None:
            # The match made more of the idle hits worth keeping, and fewer blocks are left than it takes.
            self._blocks.release(kept)
            self._offload.give_up(match)
            return False
        self._start(sequence, kept, new)
        if match is not None and reach > len(kept):
            sequence.state = SequenceState.LOADING
            self.loading.append(sequence)
            plan.loads.append(self._offload.order_load(sequence, match, len(kept), reach))
        else:
            self._offload.give_up(match)
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
        return True

    def _has_room(self, sequence: Sequence, kept: list[int]) -> bool:
        # One block for the growth of each running sequence, else admission would only cause preemption.
        needed = sequence.blocks_for(len(sequence.tokens)) - len(kept) + len(self.running)
        needed += sum(map(self._blocks.is_clean, kept))
        if needed <= self._blocks.clean_count:
            return True
        self._offload.ask_for(needed)
        return False

    def _start(self, sequence: Sequence, kept: list[int], new: list[int]) -> None:
        sequence.add_blocks(kept)
        sequence.add_blocks(new)
        sequence.computed = len(kept) * self._settings.block_size
        sequence.registered_blocks = len(kept)
        # What is in the pool may not be in the cache: the cache was away, or has lost it.
        sequence.stored_blocks = self._blocks.stored_run(kept)
        if sequence.first_token_s is None:
            sequence.pool_hit_tokens = sequence.computed

    def loaded(self, sequence: Sequence) -> None:
        """A load has ended, well or not: the rest is computed."""
        self.loading.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A load was given up while its copies may still run: start over without it, on other blocks.

        The sequence has given its blocks back.
        """
        self.loading.remove(sequence)
        sequence.restart()
        sequence.skip_external = True
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: take it out of its queue and give its blocks back."""
        queues = {SequenceState.WAITING: self.waiting, SequenceState.LOADING: self.loading}
        queues.get(sequence.state, self.running).remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._blocks.release(sequence.take_blocks())
