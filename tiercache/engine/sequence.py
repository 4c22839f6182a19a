"""One sequence in the engine, and the cuts of its prefill.

A prompt of P tokens is computed in chunks `[start, end)`. The ends (edges) are absolute:

    0        512      1024                 P      block_size 32, chunk_size 512, P = 1350
    |--------|--------|---------------|----|······
                                      1344        the last block boundary before P

The last piece, at most one block, is a separate chunk, so that a prompt whose whole prefix is found in
a cache computes exactly the chunk that a cold prompt computes last.

The result of a floating-point sum depends on how the work was split. In `exact` mode equal keys
therefore mean equal tokens *and* an equal split: blocks of a whole chunk have the plain key; blocks of
the cut chunk `[1024, 1344)` have keys that include the place of the cut; later and generated tokens
have none. A hit is rounded down to an edge. So the bytes under a key are a function of the key, and a
warm result equals the cold one, bit for bit.

A preempted sequence gives its blocks back and needs them again. Blocks without a key then get a unique key, from a
random number, so that they can be kept, stored and found like all others. Blocks not found again are computed in the
same chunks, and their keys are dropped: they name the old bytes. In a quantised pool what a token sees of its own
block depends on the split: raw tokens, or the quantised ones of a full block. So generated tokens are computed again in
chunks in which each sees what it saw when it was decoded.

A sequence has a block table for each group of layers (see `tiercache.engine.kv_pool`). With a window (see
`tiercache.engine.blocks`) it gives back the blocks that no later token sees.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.engine.blocks import NO_BLOCK, BlockTable, Window
from tiercache.engine.sampling import Sampler, SamplingParams, TokenLogprobs
from tiercache.engine.settings import EngineSettings
from tiercache.protocol.keys import KeyChain


class SequenceState(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks; some belong to a load until that is done
    RUNNING = "running"  # holds blocks for all tokens up to `computed` that it still sees, at least
    FINISHED = "finished"


class Rank(NamedTuple):
    """Rank in the queue, the least first: by priority, then by arrival."""

    priority: int
    request_id: int
    fork: int


class _Span(NamedTuple):
    """Keys of whole blocks up to token `end` of the chain include `extra` in their hash."""

    end: int
    extra: bytes


class Sequence:
    """Tokens, blocks and progress of one of the `n` sequences of a request. Owns its derived counts.

    It has a block table for each group of layers, with the windows `windows`; by default one group without a window.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        root: bytes,
        settings: EngineSettings,
        *,
        priority: int = 0,
        index: int = 0,
        windows: SequenceOf[Window] = (),
    ) -> None:
        if index and params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + index)
        self.rank = Rank(priority, request_id, index)
        self.tokens = prompt
        self.prompt_count = len(prompt)
        self.params = params
        self.tables = [BlockTable(window) for window in windows or [Window(settings.block_size)]]
        self.windowed = any(table.window.size for table in self.tables)
        self.has_sinks = any(table.window.sinks for table in self.tables)
        self.sampler = Sampler(params, prompt)
        self.state = SequenceState.WAITING
        self.forks_due = params.n - 1 if index == 0 else 0
        self.finish_reason = ""
        self.pool_hit_tokens = 0
        self.external_hit_tokens = 0
        self.preemptions = 0
        self.entered = False
        self.prefetched = False
        self.arrived_s = time.perf_counter()
        self.first_token_s: float | None = None
        self._root = root
        self._settings = settings
        self._nonce = secrets.token_bytes(8)
        self._spans = self._split_prompt()
        self.chain = KeyChain(root, settings.block_size)
        self._hash_spans()
        self.restart()

    def restart(self) -> None:
        """Reset all progress except the tokens and their keys: at the start, and after a preemption.

        The blocks must have been given back before.
        """
        for table in self.tables:
            table.clear()
        self.computed = 0
        self.registered_blocks = 0
        self.stored_blocks = 0
        self.skip_external = False
        self.store_retried = False
        self.short_since_s: float | None = None

    def fork(self, index: int) -> Sequence:
        """Another sequence of the same request, at the same point; the caller adds the references on its blocks."""
        assert self.computed == len(self.tokens) == self.prompt_count, "forks begin at the end of the prompt"
        rank, prompt = self.rank, list(self.tokens)
        other = Sequence(
            rank.request_id,
            prompt,
            self.params,
            self._root,
            self._settings,
            priority=rank.priority,
            index=index,
            windows=[table.window for table in self.tables],
        )
        other.state, other.entered = self.state, True
        other.arrived_s = self.arrived_s
        other.pool_hit_tokens, other.external_hit_tokens = self.pool_hit_tokens, self.external_hit_tokens
        other.tables = [table.fork() for table in self.tables]
        other.computed = self.computed
        other.registered_blocks, other.stored_blocks = self.registered_blocks, self.stored_blocks
        return other

    # --- keys

    def _split_prompt(self) -> list[_Span]:
        own = b"" if self._settings.enable_prefix_caching else self._nonce
        size = self._settings.block_size
        if not self._settings.exact:
            return [_Span(self.prompt_count // size * size, own)]
        last = self.last_edge
        whole = last - last % self._settings.chunk_size
        return [_Span(whole, own), _Span(last, own + b"cut after %d" % (last - whole))]

    def _hash_spans(self) -> None:
        hashed = len(self.chain) * self._settings.block_size
        for end, extra in self._spans:
            if end > hashed:
                self.chain.extend(self.tokens[hashed:end], extra=extra)
                hashed = end

    def keyed_full_blocks(self) -> int:
        """Number of full blocks with a key; hashes what was generated since the last call."""
        if not self._settings.exact and self.full_blocks > len(self.chain):
            # Generated tokens are hashed like those of a prompt.
            self._spans[-1] = self._spans[-1]._replace(end=self.full_blocks * self._settings.block_size)
            self._hash_spans()
        return min(self.full_blocks, len(self.chain))

    def key_all_full_blocks(self) -> None:
        """Before a preemption: give full blocks without a key unique keys."""
        if self.full_blocks > len(self.chain):
            extra = self._nonce + b"preemption %d" % self.preemptions
            self._spans.append(_Span(self.full_blocks * self._settings.block_size, extra))
            self._hash_spans()

    def drop_lost_keys(self) -> None:
        """After a preemption: drop the keys of blocks that were not found again and are computed again."""
        kept = max(self.full_blocks, self.last_edge // self._settings.block_size)
        if self._settings.exact and len(self.chain) > kept:
            end = kept * self._settings.block_size
            self._spans = [_Span(min(span.end, end), span.extra) for span in self._spans]
            # A new chain object: the pool and stores under way refer to blocks by the old one.
            self.chain = KeyChain(self._root, self._settings.block_size)
            self._hash_spans()

    @property
    def first_private_block(self) -> int:
        """Number of the block from which on no other sequence can use the chain."""
        if not self._settings.enable_prefix_caching:
            return 0
        return self.last_edge // self._settings.block_size if self._settings.exact else len(self.chain)

    @property
    def request_id(self) -> int:
        return self.rank.request_id

    @property
    def index(self) -> int:
        """Which of the request's `n` sequences this is."""
        return self.rank.fork

    # --- edges and hits

    @property
    def last_edge(self) -> int:
        """The last block boundary before the end of the prompt."""
        return (self.prompt_count - 1) // self._settings.block_size * self._settings.block_size

    @property
    def max_hit_blocks(self) -> int:
        """The furthest that a hit may reach: the last token is always computed."""
        return min(len(self.chain), (len(self.tokens) - 1) // self._settings.block_size)

    def usable_hit_blocks(self, blocks: int) -> int:
        """How many of `blocks` leading blocks that were found may be reused."""
        blocks = min(blocks, self.max_hit_blocks)
        if self._settings.exact and blocks < self.last_edge // self._settings.block_size:
            per_chunk = self._settings.chunk_size // self._settings.block_size
            return blocks - blocks % per_chunk
        return blocks

    def edge_after(self, start: int) -> int:
        """The end of the chunk that starts at `start`; one token further when decoding."""
        edge = (start // self._settings.chunk_size + 1) * self._settings.chunk_size
        if self._settings.exact and start < self.prompt_count:
            return min(edge, self.last_edge if start < self.last_edge else self.prompt_count)
        if self._settings.exact and self._settings.quantised:
            # When it was decoded, a token saw its own block raw unless it was the last in the block.
            size = self._settings.block_size
            edge = (start + 1) // size * size + size - 1
        return min(edge, len(self.tokens))

    def is_reusable(self, start: int) -> bool:
        """True if others may reuse the result of the chunk at `start`, so that its bits must not vary."""
        return self._settings.exact and start < self.last_edge

    @property
    def prefilling(self) -> bool:
        """True if more than one token is to be computed: the prompt, or everything again after a preemption."""
        return self.computed < max(self.prompt_count, len(self.tokens) - 1)

    # --- blocks

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]

    @property
    def full_blocks(self) -> int:
        """Blocks of each table with every slot computed or loaded."""
        return self.computed // self._settings.block_size

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of all tables that have not left a window."""
        return [block_id for table in self.tables for block_id in table.held]

    @property
    def most_blocks(self) -> int:
        """The most blocks held before decoding: for all tokens, or for a window and what a step computes."""
        return sum(table.window.most_blocks_of(len(self.tokens), self._settings) for table in self.tables)

    def blocks_due(self, table: BlockTable) -> int:
        """The number of blocks to which a table must reach for the next step."""
        if not self.prefilling:
            return self.full_blocks + 1
        bounded = table.window.most_blocks(self._settings) is not None
        ahead = self.computed + self._settings.step_tokens if bounded else len(self.tokens)
        return self._blocks_for(min(ahead, len(self.tokens)))

    @property
    def has_room(self) -> bool:
        """True if all tables reach far enough for the next step."""
        return all(len(table.ids) >= self.blocks_due(table) for table in self.tables)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._settings.block_size)

    def blocks_to_begin(self, window: Window, cut: int) -> int:
        """Blocks to have in a table to begin at block `cut`, including the needed ones before it."""
        gone = cut - len(window.needed(cut))
        whole = self._blocks_for(len(self.tokens))
        return min(window.most_blocks_of(len(self.tokens), self._settings), whole - gone)

    def can_go_on_from(self, cut: int) -> bool:
        """True if its tables have all blocks needed to continue from block `cut`."""
        return all(table.can_go_on_from(cut) for table in self.tables)

    def take_blocks(self) -> list[int]:
        """Remove and return all blocks for the caller to give back, those of the same tokens together."""
        columns = itertools.zip_longest(*(table.take(0) for table in self.tables), fillvalue=NO_BLOCK)
        return [block_id for column in columns for block_id in column if block_id != NO_BLOCK]

    def take_unseen(self) -> list[int]:
        """Remove and return the blocks that have left a window, for the caller to give back."""
        return [block_id for table in self.tables for block_id in table.take_unseen(self.computed)]


# --- outputs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request, or of sequence `index` of its `n` sequences.

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
    index: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A new token of sequence `index` of a request; `output` is set with the last token.

    `logprobs` is set if the request asked for it.
    """

    request_id: int
    token: int
    output: RequestOutput | None
    index: int
    logprobs: TokenLogprobs | None = None


def output_of(sequence: Sequence) -> RequestOutput:
    """The output of a sequence that has just ended."""
    now_s = time.perf_counter()
    return RequestOutput(
        request_id=sequence.request_id,
        tokens=sequence.output,
        finish_reason=sequence.finish_reason,
        prompt_tokens=sequence.prompt_count,
        pool_hit_tokens=sequence.pool_hit_tokens,
        external_hit_tokens=sequence.external_hit_tokens,
        ttft_s=(sequence.first_token_s or now_s) - sequence.arrived_s,
        latency_s=now_s - sequence.arrived_s,
        index=sequence.index,
    )
