"""One sequence on its way through the engine, and where its prefill is cut.

A prompt of P tokens is computed in chunks `[start, end)`. Their ends (edges) are absolute:

    0        512      1024                 P      block_size 32, chunk_size 512, P = 1350
    |--------|--------|---------------|----|······
                                      1344        the last block boundary before P

The last piece, at most one block, is a chunk of its own, so that a prompt whose whole prefix is
found in a cache computes exactly the chunk that a cold prompt computes last.

What a floating-point sum gives depends on how the work was split. In `exact` mode equal keys
therefore mean equal tokens *and* an equal split: blocks of a whole chunk have the plain key; blocks of
the cut chunk `[1024, 1344)` have keys that also say where it was cut; what comes after, and what was
generated, has none. A hit is rounded down to an edge. So bytes under a key are a function of
the key, and a warm result is the cold one, bit for bit.

A sequence that is preempted gives its blocks back and needs them again. Those without a key get one
then that nobody else can have, from a random number, and so can be kept, stored and found like all others. What is
not found again is computed in the same chunks, and its keys are thrown away: they name the old bytes. In a
quantised pool what a token sees of its own block depends on the split: raw, or as that is once it is full. So
generated tokens are computed again in chunks in which each sees what it saw when it was decoded.

With a window (see `tiercache.engine.window`) a sequence gives back the blocks that no later token sees, and has
`NO_BLOCK` in their places.
"""

from __future__ import annotations

import dataclasses
import enum
import secrets
import time
from typing import NamedTuple

from tiercache.engine.sampling import Sampler, SamplingParams
from tiercache.engine.settings import EngineSettings
from tiercache.engine.window import Window
from tiercache.keys import KeyChain

NO_BLOCK = -1
"""In a block table: the block has left the window. Whoever read it would read no other's block."""


class SequenceState(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks; some belong to a load until that is done
    RUNNING = "running"  # holds blocks for all tokens up to `computed` that it still sees, at least
    FINISHED = "finished"


class Rank(NamedTuple):
    """Who comes first, the least of all: by priority, then in the order of arrival."""

    priority: int
    request_id: int
    fork: int


class _Span(NamedTuple):
    """Whole blocks up to token `end` of the chain have keys with `extra` hashed in."""

    end: int
    extra: bytes


class Sequence:
    """Tokens, blocks and progress of one of the `n` sequences of a request. It owns its derived counts.

    Block i of `block_table` holds tokens `[i * block_size, (i + 1) * block_size)`; the sequence has
    one reference on each. `window` is everything unless given.
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
        window: Window | None = None,
    ) -> None:
        if index and params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + index)
        self.rank = Rank(priority, request_id, index)
        self.tokens = prompt
        self.prompt_count = len(prompt)
        self.params = params
        self.window = window or Window(settings.block_size)
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
        """Forget all progress but the tokens and their keys: at the start, and after a preemption.

        The blocks must have been given back before.
        """
        self.block_table: list[int] = []
        self._left_blocks = 0
        self.computed = 0
        self.registered_blocks = 0
        self.stored_blocks = 0
        self.skip_external = False
        self.store_retried = False
        self.short_since_s: float | None = None

    def fork(self, index: int) -> Sequence:
        """Another sequence of the same request, as far as this one; the caller adds the references on its blocks."""
        assert self.computed == len(self.tokens) == self.prompt_count, "forks begin at the end of the prompt"
        rank, prompt = self.rank, list(self.tokens)
        other = Sequence(
            rank.request_id, prompt, self.params, self._root, self._settings, priority=rank.priority, index=index,
            window=self.window,
        )  # fmt: skip
        other.state, other.entered = self.state, True
        other.arrived_s = self.arrived_s
        other.pool_hit_tokens, other.external_hit_tokens = self.pool_hit_tokens, self.external_hit_tokens
        other.block_table = list(self.block_table)
        other._left_blocks, other.computed = self._left_blocks, self.computed
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
        """Full blocks that have a key; hashes what was generated since the last call."""
        if not self._settings.exact and self.full_blocks > len(self.chain):
            # Generated tokens are hashed like those of a prompt.
            self._spans[-1] = self._spans[-1]._replace(end=self.full_blocks * self._settings.block_size)
            self._hash_spans()
        return min(self.full_blocks, len(self.chain))

    def key_all_full_blocks(self) -> None:
        """Before a preemption: keys of its own for the full blocks that have none."""
        if self.full_blocks > len(self.chain):
            extra = self._nonce + b"preemption %d" % self.preemptions
            self._spans.append(_Span(self.full_blocks * self._settings.block_size, extra))
            self._hash_spans()

    def drop_lost_keys(self) -> None:
        """After a preemption: no key for what was not found again and is computed anew."""
        kept = max(self.full_blocks, self.last_edge // self._settings.block_size)
        if self._settings.exact and len(self.chain) > kept:
            end = kept * self._settings.block_size
            self._spans = [_Span(min(span.end, end), span.extra) for span in self._spans]
            # A new chain: the pool and stores under way know blocks by the old one.
            self.chain = KeyChain(self._root, self._settings.block_size)
            self._hash_spans()

    @property
    def first_private_block(self) -> int:
        """Blocks of the chain from here on are of no use to any other sequence."""
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
        """How far a hit may reach: the last token is always computed."""
        return min(len(self.chain), (len(self.tokens) - 1) // self._settings.block_size)

    def usable_hit_blocks(self, blocks: int) -> int:
        """How many of `blocks` leading blocks found somewhere may be reused."""
        blocks = min(blocks, self.max_hit_blocks)
        if self._settings.exact and blocks < self.last_edge // self._settings.block_size:
            per_chunk = self._settings.chunk_size // self._settings.block_size
            return blocks - blocks % per_chunk
        return blocks

    def edge_after(self, start: int) -> int:
        """Where the chunk that starts at `start` ends; one token further once decoding."""
        edge = (start // self._settings.chunk_size + 1) * self._settings.chunk_size
        if self._settings.exact and start < self.prompt_count:
            return min(edge, self.last_edge if start < self.last_edge else self.prompt_count)
        if self._settings.exact and self._settings.quantised:
            # Decoded, a token saw its own block raw unless it was the last in it.
            size = self._settings.block_size
            edge = (start + 1) // size * size + size - 1
        return min(edge, len(self.tokens))

    def is_reusable(self, start: int) -> bool:
        """Whether others may reuse what the chunk at `start` computes, so that nothing may change its bits."""
        return self._settings.exact and start < self.last_edge

    @property
    def prefilling(self) -> bool:
        """More is to be computed than one token: the prompt, or all of it again after a preemption."""
        return self.computed < max(self.prompt_count, len(self.tokens) - 1)

    # --- blocks

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]

    @property
    def full_blocks(self) -> int:
        """Blocks of `block_table` whose every slot has been computed or loaded."""
        return self.computed // self._settings.block_size

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of `block_table` that have not left the window."""
        return [block_id for block_id in self.block_table if block_id != NO_BLOCK]

    def held_runs(self, first: int, end: int) -> list[tuple[int, list[int]]]:
        """What is held of the blocks `[first, end)`: runs of them, each with the number of its first block."""
        runs: list[tuple[int, list[int]]] = []
        for number in range(first, end):
            if self.block_table[number] == NO_BLOCK:
                continue
            if not runs or self.block_table[number - 1] == NO_BLOCK:
                runs.append((number, []))
            runs[-1][1].append(self.block_table[number])
        return runs

    @property
    def most_blocks(self) -> int:
        """The most blocks that it holds before it decodes: for all its tokens, or a window and what a step computes."""
        whole, most = self._blocks_for(len(self.tokens)), self.window.most_blocks(self._settings)
        return whole if most is None else min(whole, most)

    @property
    def blocks_due(self) -> int:
        """Blocks that its table must reach for the next step."""
        if not self.prefilling:
            return self.full_blocks + 1
        bounded = self.window.most_blocks(self._settings) is not None
        ahead = self.computed + self._settings.step_tokens if bounded else len(self.tokens)
        return self._blocks_for(min(ahead, len(self.tokens)))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._settings.block_size)

    def blocks_to_begin(self, cut: int) -> int:
        """Blocks to have when it begins at block `cut`, those that it needs from before the cut among them."""
        gone = cut - len(self.window.needed(cut))
        return min(self.most_blocks, self._blocks_for(len(self.tokens)) - gone)

    def begin(self, cut: int, block_ids: list[int]) -> None:
        """Take `blocks_to_begin(cut)` blocks as the table."""
        self._left_blocks = self.window.first_block(cut * self._settings.block_size)
        kept = min(self.window.sink_blocks, self._left_blocks)
        self.block_table = [*block_ids[:kept], *[NO_BLOCK] * (self._left_blocks - kept), *block_ids[kept:]]

    def can_go_on_from(self, cut: int) -> bool:
        """Whether its table has all blocks that are needed to go on from block `cut`."""
        return self.window.first_block(cut * self._settings.block_size) >= self._left_blocks

    def take_blocks(self, keep: int = 0) -> list[int]:
        """Remove and return the blocks from `keep` on, for the caller to give back."""
        taken = [block_id for block_id in self.block_table[keep:] if block_id != NO_BLOCK]
        del self.block_table[keep:]
        return taken

    def take_unseen(self) -> list[int]:
        """Remove and return the blocks that have left the window, for the caller to give back."""
        first = max(self._left_blocks, self.window.sink_blocks)
        self._left_blocks = self.window.first_block(self.computed)
        taken = self.block_table[first : self._left_blocks]
        self.block_table[first : first + len(taken)] = [NO_BLOCK] * len(taken)
        return taken
