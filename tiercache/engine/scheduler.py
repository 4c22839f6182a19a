"""The scheduler decides what the next step computes. It neither runs a model nor changes a block's content.

Sequences are served by rank: priority first, then arrival. Each step takes every decoding sequence, then prompt chunks
while the token budget lasts. A sequence enters when there are blocks for all its tokens or, with a window, for the most
that it holds at a time. When a running sequence finds no block, the last in rank is preempted and gives its blocks
back: they are stored, and found again when its turn comes. Only the sequence that needs a load waits for it.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.engine.blocks import BlockManager, BlockTable
from tiercache.engine.loads import LoadOrder, LoadResult
from tiercache.engine.offload import Offload
from tiercache.engine.sequence import Rank, Sequence, SequenceState
from tiercache.engine.settings import Clock, EngineSettings

# --- the plan of one step ----------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens `[start, end)` of a sequence, to be computed in one forward pass."""

    sequence: Sequence
    start: int
    end: int


class BlockCopy(NamedTuple):
    """A whole pool block, to be copied to another."""

    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """To be done in this order: copies, start of loads, forward passes."""

    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    passes: list[list[Chunk]] = field(default_factory=list)


def next_chunks(sequence: Sequence, budget: int) -> list[Chunk]:
    """The next chunks of a sequence, as many as fit into `budget` tokens."""
    chunks: list[Chunk] = []
    start = sequence.computed
    while start < len(sequence.tokens):
        end = sequence.edge_after(start)
        if end - sequence.computed > budget:
            break
        chunks.append(Chunk(sequence, start, end))
        start = end
    return chunks


def pack(decodes: list[Chunk], prefills: list[list[Chunk]]) -> list[list[Chunk]]:
    """Forward passes with at most one chunk of each sequence.

    Other rows of a matrix product can change the last bits of a row. So a chunk whose K and V others may
    reuse is computed alone; all the rest are packed.
    """
    alone: list[list[Chunk]] = []
    packed = [decodes]
    for chunks in prefills:
        rest = []
        for chunk in chunks:
            if chunk.sequence.is_reusable(chunk.start):
                alone.append([chunk])
            else:
                rest.append(chunk)
        for place, chunk in enumerate(rest):
            packed += [[]] * (place + 1 - len(packed))
            packed[place] = [*packed[place], chunk]
    return [chunks for chunks in alone + packed if chunks]


# How far down the queue one step looks for sequences to admit, and for prefixes to promote from NVMe.
# --- scheduling --------------------------------------------------------------------------------------

_MAX_LOOKS = 64
_MAX_PREFETCHED = 16
# Prefixes that one step may ask the daemon to promote.
_PREFETCHES_PER_STEP = 2
# How long decoding waits for blocks that transfers hold, before it takes those of another sequence.
_ROOM_TIMEOUT_S = 0.25


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens unless named otherwise. Every sequence counts once, when it first enters."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Scheduler:
    """Queues of sequences and the policy for them."""

    def __init__(self, blocks: BlockManager, offload: Offload, settings: EngineSettings, clock: Clock) -> None:
        self.waiting: list[Sequence] = []  # by rank
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        self._blocks = blocks
        self._placement = Placement(blocks, settings)
        self._offload = offload
        self._settings = settings
        self._clock = clock

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, or one that has given its blocks back."""
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_rank)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    def schedule(self) -> StepPlan:
        """Decide one step. Takes blocks for everything in the plan, and starts stores of preempted sequences."""
        plan = StepPlan()
        decodes = self._plan_running(plan)
        budget = self._settings.step_tokens - len(decodes)
        self._admit(plan, budget)
        self._offload.loads.drop_old_answers()
        plan.passes = pack(decodes, self._plan_prefills(budget))
        self._prefetch()
        return plan

    # --- running sequences

    def _plan_running(self, plan: StepPlan) -> list[Chunk]:
        """Make room for what is computed next; returns the chunks of the decoding sequences."""
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.state is SequenceState.RUNNING and self._grow(sequence, plan) and not sequence.prefilling:
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
        return chunks

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make room for the next step; False if the sequence skips it (or was preempted)."""
        tables = sequence.tables
        keeps = [self._own_blocks(sequence, table) for table in tables]
        counts = [max(0, sequence.blocks_due(table) - keep) for table, keep in zip(tables, keeps, strict=True)]
        count = sum(counts)
        if not count:
            return True
        ends = [table.ids[keep - 1] if keep else None for table, keep in zip(tables, keeps, strict=True)]
        while (taken := self._blocks.allocate_each(counts, ends)) is None:
            if self._waits_for_room(sequence, count):
                return False
            victim = max((*self.running, *self.loading), key=_rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.short_since_s = None
        for table, keep, new in zip(tables, keeps, taken, strict=True):
            for old in table.take(keep):
                self._blocks.release([old])
                plan.copies.append(BlockCopy(old, new[0]))
            table.ids += new
        return True

    def _own_blocks(self, sequence: Sequence, table: BlockTable) -> int:
        """The leading blocks of a table that stay: all, unless the next write goes to a block shared with others.

        If a prompt ends within a block, each fork writes its own tokens into a copy of it.
        """
        tail = sequence.full_blocks
        shared = not sequence.prefilling and tail < len(table.ids) and self._blocks.references(table.ids[tail]) > 1
        return tail if shared else len(table.ids)

    def _waits_for_room(self, sequence: Sequence, count: int) -> bool:
        """True if transfers are about to free blocks, of which `count` are wanted. Limited in time: a copy may hang."""
        now_s = self._clock.now_s()
        if sequence.short_since_s is None:
            sequence.short_since_s = now_s
        return self._offload.makes_room(count) and now_s < sequence.short_since_s + _ROOM_TIMEOUT_S

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
        """True if loading what is not stored yet is expected to take less time than computing it again."""
        first, end = victim.stored_blocks, victim.keyed_full_blocks()
        size, cost = self._settings.block_size, self._offload.cost
        runs = (run for table in victim.tables for run in table.held_runs(first, end))
        count = sum(len(block_ids) for _, block_ids in runs)
        return cost.load_s(count, 0) < cost.prefill_s(first * size, end * size)

    def _give_back(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue, without blocks."""
        self._blocks.release(sequence.take_blocks())
        sequence.restart()
        self.add(sequence)

    def _plan_prefills(self, budget: int) -> list[list[Chunk]]:
        """Chunks within the budget, for each sequence that gets any."""
        planned: list[list[Chunk]] = []
        for sequence in sorted(self.running, key=_rank):
            if not sequence.prefilling or not sequence.has_room:
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
        """Put computed blocks into the prefix cache of the pool."""
        full = sequence.keyed_full_blocks()
        for group, table in enumerate(sequence.tables):
            for first, block_ids in table.held_runs(sequence.registered_blocks, full):
                for index, block_id in enumerate(block_ids, first):
                    self._blocks.register(block_id, sequence.chain, index, group)
        sequence.registered_blocks = max(sequence.registered_blocks, full)

    def release_unseen(self, sequence: Sequence) -> None:
        """Give back the blocks that have left a sequence's window."""
        self._blocks.release(sequence.take_unseen())

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Create the request's other sequences once its prompt is computed; they share all blocks."""
        forks = [sequence.fork(index) for index in range(1, sequence.forks_due + 1)]
        sequence.forks_due = 0
        for other in forks:
            self._blocks.hold(other.held_blocks)
            self.running.append(other)
        return forks

    # --- waiting sequences

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Move sequences from `waiting` to `running` or `loading` while there is room."""
        promised = 0  # blocks for sequences that are being looked up
        first_keys: set[bytes] = set()  # of what is being looked up for them
        room = self._settings.max_num_seqs - sum(1 + one.forks_due for one in (*self.running, *self.loading))
        for sequence in self.waiting[:_MAX_LOOKS]:
            ahead = sum(
                len(one.tokens) - one.computed for one in self.running if one.prefilling and one.rank < sequence.rank
            )
            if 1 + sequence.forks_due > room or ahead >= budget:
                return
            found = self._placement.find(sequence)
            whole = found == sequence.max_hit_blocks
            key = b"" if whole else sequence.chain.key(found)
            if not whole and (key in first_keys or self._is_coming(key, found)):
                continue
            kept = sequence.usable_hit_blocks(found)
            # Check first whether there is room at all: a lookup takes a lease.
            if not self._has_room(sequence, kept, promised):
                return
            room -= 1 + sequence.forks_due
            if whole or self._offload.loads.looked_up(sequence):
                self._place(sequence, found, kept, plan)
            else:
                first_keys.add(key)
                promised += self._placement.new_blocks(sequence, kept)

    def _is_coming(self, key: bytes, index: int) -> bool:
        """True if another sequence is loading or computing block `index` of the same chain."""
        return any(
            one.registered_blocks <= index < len(one.chain) and one.chain.key(index) == key
            for one in (*self.loading, *self.running)
            if one.computed < len(one.chain) * self._settings.block_size
        )

    def _place(self, sequence: Sequence, found: int, kept: int, plan: StepPlan) -> None:
        """Give a sequence its blocks: `found` in the pool, to be loaded, or blank."""
        hit, choice = self._offload.loads.choose(sequence, kept)
        missing = self._offload.loads.missing(sequence, choice.end)
        self.waiting.remove(sequence)
        self._placement.take_blocks(sequence, choice.end)
        sequence.registered_blocks = min(found, choice.end)
        if hit is None:
            self._enter(sequence, kept, kept)
        else:
            sequence.state = SequenceState.LOADING
            self.loading.append(sequence)
            plan.loads.append(LoadOrder(sequence, hit, choice, missing))

    def _has_room(self, sequence: Sequence, kept: int, promised: int) -> bool:
        needed = promised + self._placement.new_blocks(sequence, kept)
        # One block for the growth of each table of each running sequence, else admission would only cause preemption.
        needed += len(self.running) * len(sequence.tables)
        if needed <= self._blocks.clean_count:
            return True
        self._offload.stores.ask_for(needed)
        return False

    def _enter(self, sequence: Sequence, pool_blocks: int, good_blocks: int) -> None:
        """Start running a sequence: its first `good_blocks` blocks were found, `pool_blocks` of them in the pool."""
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
        """Handle a load that has ended, failed or been given up: missing blocks are computed."""
        order, good_blocks, ended = result
        sequence = order.sequence
        self.loading.remove(sequence)
        usable = sequence.usable_hit_blocks(order.end_of(good_blocks))
        if not ended or not order.is_own(usable) or not sequence.can_go_on_from(usable):
            # It may not compute into its blocks: the copies still run, or others read the blocks.
            self._give_back(sequence)
            sequence.skip_external = True
            return
        for group, (positions, good) in enumerate(zip(order.positions, good_blocks, strict=True)):
            for position in positions[:good]:
                if position < usable:
                    block_id = sequence.tables[group].ids[position]
                    self._blocks.register(block_id, sequence.chain, position, group, stored=True)
        sequence.registered_blocks = usable
        sequence.stored_blocks = min(usable, self._offload.loads.named_end(order.hit))
        self._enter(sequence, order.in_pool, usable)

    def _prefetch(self) -> None:
        """Promote prefixes to DRAM while their sequences wait for room."""
        asked = 0
        for sequence in self.waiting[:_MAX_PREFETCHED]:
            if not sequence.prefetched and asked < _PREFETCHES_PER_STEP:
                sequence.prefetched = self._offload.loads.prefetch(sequence)
                asked += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence from its queue and give its blocks back."""
        queues = {SequenceState.WAITING: self.waiting, SequenceState.LOADING: self.loading}
        queues.get(sequence.state, self.running).remove(sequence)
        self._offload.loads.drop_lookup(sequence)
        sequence.state = SequenceState.FINISHED
        self._blocks.forget(sequence.chain, sequence.first_private_block)
        self._blocks.release(sequence.take_blocks())

    def check_integrity(self) -> None:
        """Raises AssertionError if a queue is wrong."""
        queues = {
            SequenceState.WAITING: self.waiting,
            SequenceState.LOADING: self.loading,
            SequenceState.RUNNING: self.running,
        }
        for state, queue in queues.items():
            for sequence in queue:
                assert sequence.state is state, f"request {sequence.request_id} is {sequence.state} and queued {state}"
                for table in sequence.tables:
                    held, most = len(table.held), table.window.most_blocks(self._settings)
                    assert most is None or held <= most, f"request {sequence.request_id} holds {held} of {most} blocks"
        assert sorted(self.waiting, key=_rank) == self.waiting, "the queue is out of order"
        seats = sum(1 + sequence.forks_due for sequence in (*self.loading, *self.running))
        assert seats <= self._settings.max_num_seqs, f"{seats} sequences hold blocks"


class Placement:
    """See the module's docstring."""

    def __init__(self, blocks: BlockManager, settings: EngineSettings) -> None:
        self._blocks = blocks
        self._settings = settings

    def find(self, sequence: Sequence) -> int:
        """The block of its chain at which a sequence can begin with the pool's blocks, not yet rounded to an edge."""
        chain, cut = sequence.chain, sequence.max_hit_blocks
        for group, table in enumerate(sequence.tables):
            if not table.window.size:
                cut = len(self._blocks.find(chain, range(cut), group))
        while sequence.windowed and (cut := sequence.usable_hit_blocks(cut)):
            missing = [self._missing(sequence, group, cut) for group in range(len(sequence.tables))]
            if min(missing) == cut:
                break
            cut = min(missing)  # all cuts in between need it too
        return cut

    def _missing(self, sequence: Sequence, group: int, cut: int) -> int:
        """Of the blocks that a group's window needs before block `cut`, the last that the pool lacks; else `cut`."""
        window, chain = sequence.tables[group].window, sequence.chain
        numbers = reversed(window.needed(cut)) if window.size else ()
        return next((one for one in numbers if self._blocks.block_of(chain.key(one), group) is None), cut)

    def new_blocks(self, sequence: Sequence, kept: int) -> int:
        """The most clean blocks that a sequence takes to begin at block `kept`, or further on with a load."""
        return sum(self._new_blocks(sequence, group, kept) for group in range(len(sequence.tables)))

    def _new_blocks(self, sequence: Sequence, group: int, kept: int) -> int:
        window = sequence.tables[group].window
        if window.first_block(sequence.max_hit_blocks * self._settings.block_size):
            # A load that reaches further than the pool may need other blocks.
            return window.most_blocks_of(len(sequence.tokens), self._settings)
        # A load that reaches further needs the same blocks and more, and so takes fewer new ones, never more.
        held = self._blocks.find(sequence.chain, range(kept), group)
        return sequence.blocks_to_begin(window, kept) - len(held) + sum(map(self._blocks.is_clean, held))

    def take_blocks(self, sequence: Sequence, cut: int) -> None:
        """Give a sequence the blocks to begin at block `cut`: those in the pool, and blank blocks."""
        blocks, tables = self._blocks, sequence.tables
        numbers = [table.window.needed(cut) for table in tables]
        held = [blocks.find(sequence.chain, needed, group) for group, needed in enumerate(numbers)]
        for block_ids in held:
            blocks.hold(block_ids)
        counts = [
            sequence.blocks_to_begin(table.window, cut) - len(block_ids)
            for table, block_ids in zip(tables, held, strict=True)
        ]
        new = blocks.allocate_each(counts, [block_ids[-1] if block_ids else None for block_ids in held])
        assert new is not None, "there was room for whatever is loaded"
        for table, found, blank in zip(tables, held, new, strict=True):
            table.begin(cut, [*found, *blank])
        # Blocks in the pool may not be in the cache: it was unreachable, or has lost them.
        stored = ([*needed, cut][blocks.stored_run(found)] for needed, found in zip(numbers, held, strict=True))
        sequence.stored_blocks = min(stored)
