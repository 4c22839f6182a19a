"""One request on its way through the engine, and where its prefill is cut.

A prompt of P tokens is computed in chunks `[start, end)`. Their ends (edges) are absolute:

    0        512      1024                 P      block_size 32, chunk_size 512, P = 1350
    |--------|--------|---------------|----|
                                      1344        the last block boundary before P

The last piece, at most one block, is a chunk of its own, so that a prompt whose whole prefix is
found in a cache computes exactly the chunk that a cold prompt computes last.

What a floating-point sum gives depends on how the work was split. In `exact` mode equal keys
therefore mean equal tokens *and* an equal split: blocks of a whole chunk have the plain key; blocks of
the cut chunk `[1024, 1344)` have keys that also say where it was cut; what comes after, and what was
generated, has none. A hit is rounded down to an edge. So bytes under a key are a function of
the key, and a warm result is the cold one, bit for bit.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable

from tiercache.engine.sampling import Sampler, SamplingParams
from tiercache.engine.settings import EngineSettings
from tiercache.keys import KeyChain


class SequenceState(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks; some belong to a load until that is done
    RUNNING = "running"  # holds blocks for all tokens up to `computed` at least
    FINISHED = "finished"


class Sequence:
    """Tokens, blocks and progress of one request. It owns its derived counts.

    Block i of `block_table` holds tokens `[i * block_size, (i + 1) * block_size)`; the sequence has
    one reference on each.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        root: bytes,
        settings: EngineSettings,
    ) -> None:
        self.request_id = request_id
        self.tokens = prompt
        self.prompt_count = len(prompt)
        self.params = params
        self.sampler = Sampler(params)
        self.state = SequenceState.WAITING
        self.finish_reason = ""
        self.pool_hit_tokens = 0
        self.external_hit_tokens = 0
        self.arrived_s = time.perf_counter()
        self.first_token_s: float | None = None
        self._root = root
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        """Forget all progress but the tokens: at the start, and after a preemption.

        The blocks must have been given back before.
        """
        self.block_table: list[int] = []
        self.contiguous = True
        self.computed = 0
        self.registered_blocks = 0
        self.stored_blocks = 0
        self.skip_external = False
        self.store_retried = False
        self.prefill_end = len(self.tokens)
        self.hashed_tokens = self.prefill_end
        self.chain = self._make_chain()

    def _make_chain(self) -> KeyChain:
        chain = KeyChain(self._root, self._settings.block_size)
        if not self._settings.exact:
            chain.extend(self.tokens)
            return chain
        last = self.last_edge
        whole = last - last % self._settings.chunk_size
        chain.extend(self.tokens[:whole])
        chain.extend(self.tokens[whole:last], extra=b"cut after %d" % (last - whole))
        return chain

    @property
    def last_edge(self) -> int:
        """The last block boundary before the end of the prefill: no hit reaches beyond it."""
        return (self.prefill_end - 1) // self._settings.block_size * self._settings.block_size

    @property
    def max_hit_blocks(self) -> int:
        return self.last_edge // self._settings.block_size

    def usable_hit_blocks(self, blocks: int) -> int:
        """How many of `blocks` leading blocks found somewhere may be reused."""
        blocks = min(blocks, self.max_hit_blocks)
        if self._settings.exact and blocks < self.max_hit_blocks:
            per_chunk = self._settings.chunk_size // self._settings.block_size
            return blocks - blocks % per_chunk
        return blocks

    def next_edge(self) -> int:
        """Where the chunk that starts at `computed` ends; one token further once decoding."""
        start, chunk = self.computed, self._settings.chunk_size
        if start >= self.prefill_end:
            return start + 1
        edge = min((start // chunk + 1) * chunk, self.prefill_end)
        if self._settings.exact and start < self.last_edge:
            edge = min(edge, self.last_edge)
        return edge

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]

    @property
    def full_blocks(self) -> int:
        """Blocks of `block_table` whose every slot has been computed or loaded."""
        return self.computed // self._settings.block_size

    def keyed_full_blocks(self) -> int:
        """Full blocks that have a key; hashes what was generated since the last call."""
        if not self._settings.exact and self.full_blocks > len(self.chain):
            # The chain has already taken in the prompt, its last partial block included.
            self.chain.extend(self.tokens[self.hashed_tokens : self.computed])
            self.hashed_tokens = self.computed
        return min(self.full_blocks, len(self.chain))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self._settings.block_size)

    def add_blocks(self, block_ids: Iterable[int]) -> None:
        """Append blocks to the table; `contiguous` stays true while they follow one another."""
        for block_id in block_ids:
            if self.block_table and block_id != self.block_table[-1] + 1:
                self.contiguous = False
            self.block_table.append(block_id)

    def take_blocks(self, keep: int = 0) -> list[int]:
        """Remove and return the blocks from `keep` on, for the caller to give back."""
        taken = self.block_table[keep:]
        kept, self.block_table, self.contiguous = self.block_table[:keep], [], True
        self.add_blocks(kept)
        return taken
