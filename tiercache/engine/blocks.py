"""Ownership of the KV pool's blocks, the content that idle blocks still hold, and the block tables of sequences.

A block is in exactly one place:

    used      one or more references: sequences that read or fill it, transfers that copy it
    clean     no reference; can be handed out at once. Blank blocks first, then the least
              recently used; its content is dropped when it is handed out
    dirty     no reference; its content must go to the cache first (only with write-back)

A block with a key is in the prefix cache, in any of these places. Blocks of a sequence are given back deepest first, so
that a tail is evicted before the blocks that it needs.

A block holds the layers of one group (see `tiercache.engine.kv_pool`), and any block may serve any group. Keys
name tokens. So the prefix cache finds a block by its group and its key.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tiercache.engine.settings import EngineSettings
from tiercache.protocol.keys import KeyChain


class Origin(NamedTuple):
    """What a pool block holds: the layers of `group` of the block at `position` of a chain, both counted from 0."""

    chain: KeyChain
    position: int
    group: int = 0


class BlockManager:
    """References, the prefix cache and the free queues of `num_blocks` pool blocks.

    Every operation on one block is O(1). With `write_back`, blocks that were not stored are not handed out (see
    `dirty_blocks`). `on_blank` is called for blocks that are given back without a key.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        groups: int = 1,
        write_back: bool = False,
        on_blank: Callable[[int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._write_back = write_back
        self._on_blank = on_blank
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._origins: list[Origin | None] = [None] * num_blocks
        self._stored = [False] * num_blocks
        self._cached: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._clean: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._dirty: OrderedDict[int, None] = OrderedDict()

    @property
    def clean_count(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._clean)

    @property
    def idle_count(self) -> int:
        """Blocks without a reference."""
        return len(self._clean) + len(self._dirty)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def is_clean(self, block_id: int) -> bool:
        return block_id in self._clean

    def stored_run(self, block_ids: Iterable[int]) -> int:
        """Number of leading blocks known to be stored."""
        count = 0
        for block_id in block_ids:
            if not self._stored[block_id]:
                break
            count += 1
        return count

    def block_of(self, key: bytes, group: int = 0) -> int | None:
        """The pool block that holds `key`, or None."""
        return self._cached[group].get(key)

    def find(self, chain: KeyChain, positions: Iterable[int], group: int = 0) -> list[int]:
        """The pool blocks of the blocks at `positions` of `chain`, up to the first missing one."""
        found: list[int] = []
        cached = self._cached[group]
        for position in positions:
            block_id = cached.get(chain.key(position))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` blocks with one reference each, or None (and no change) if fewer are clean.

        Blank blocks that continue the run from `after` are preferred, so that a sequence's blocks
        tend to be one run of memory.
        """
        if count > len(self._clean):
            return None
        taken: list[int] = []
        for _ in range(count):
            block_id = next(iter(self._clean))
            if after is not None and after + 1 in self._clean and self._keys[after + 1] is None:
                block_id = after + 1
            del self._clean[block_id]
            if self._keys[block_id] is not None:
                self.evictions += 1
                self._forget(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
            after = block_id
        return taken

    def allocate_each(self, counts: Sequence[int], after: Sequence[int | None]) -> list[list[int]] | None:
        """Several runs as from `allocate`, or None (and no change) if there are too few clean blocks for all."""
        if sum(counts) > len(self._clean):
            return None
        runs: list[list[int]] = []
        for count, before in zip(counts, after, strict=True):
            run = self.allocate(count, before)
            assert run is not None
            runs.append(run)
        return runs

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one reference on each block, idle or used."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                queue = self._clean if block_id in self._clean else self._dirty
                del queue[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block; `block_ids` in the order of the sequence."""
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} is released but not held"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._make_idle(block_id)

    def _make_idle(self, block_id: int) -> None:
        if self._write_back and self._keys[block_id] is not None and not self._stored[block_id]:
            self._dirty[block_id] = None
            return
        self._clean[block_id] = None
        if self._keys[block_id] is None:
            self._clean.move_to_end(block_id, last=False)
            if self._on_blank is not None:
                self._on_blank(block_id)

    def register(self, block_id: int, chain: KeyChain, index: int, group: int = 0, *, stored: bool = False) -> bool:
        """Put a used, full block into the prefix cache; False if its key is there already.

        The block must not change from here on. A block shared by forks keeps the key of the first.
        """
        key = chain.key(index)
        if key in self._cached[group] or self._keys[block_id] is not None:
            return False
        assert self._references[block_id] > 0, f"block {block_id} is registered but not held"
        self._cached[group][key] = block_id
        self._keys[block_id] = key
        self._origins[block_id] = Origin(chain, index, group)
        self._stored[block_id] = stored
        return True

    def mark_stored(self, block_ids: Iterable[int]) -> None:
        """Mark these blocks as stored: they need not be stored again."""
        for block_id in block_ids:
            # A block without a key holds a copy of one with a key.
            self._stored[block_id] = self._keys[block_id] is not None

    def mark_lost(self, chain: KeyChain, count: int, group: int = 0) -> None:
        """The cache has lost the first `count` blocks of a chain and group: allow them to be stored again.

        Idle blocks are not made dirty: a block that the cache has evicted is not worth a wait.
        """
        for index in range(min(count, len(chain))):
            block_id = self._cached[group].get(chain.key(index))
            if block_id is not None and self._references[block_id] > 0:
                self._stored[block_id] = False

    def dirty_blocks(self, count: int) -> list[tuple[Origin, list[int]]]:
        """What to store so that at least `count` dirty blocks (or all) become clean.

        Runs of one chain and group, parents first: a cache keeps no block without its parents, so a run
        begins at the first block of its chain that was not stored. The blocks stay dirty until
        they are held, marked as stored and released.
        """
        runs: list[tuple[Origin, list[int]]] = []
        chosen: set[int] = set()
        for block_id in self._dirty:
            if len(chosen) >= count:
                break
            origin = self._origins[block_id]
            if block_id in chosen or origin is None:
                continue
            run: list[int] = []
            for index in range(origin.position, -1, -1):
                parent = self._cached[origin.group].get(origin.chain.key(index))
                if parent is None or self._stored[parent] or parent in chosen:
                    break
                run.append(parent)
            chosen.update(run)
            runs.append((origin._replace(position=origin.position - len(run) + 1), run[::-1]))
        return runs

    def forget(self, chain: KeyChain, first: int) -> None:
        """Remove blocks `first..` of a chain from the prefix cache: they will not be asked for again."""
        for index, cached in itertools.product(range(first, len(chain)), self._cached):
            block_id = cached.get(chain.key(index))
            if block_id is None:
                continue
            self._forget(block_id)
            if self._references[block_id] == 0:
                self._dirty.pop(block_id, None)
                self._clean[block_id] = None
                self._clean.move_to_end(block_id, last=False)

    def forget_all(self) -> None:
        """Empty the prefix cache. Used blocks stay with their owners."""
        for block_id in [block_id for cached in self._cached for block_id in cached.values()]:
            self._forget(block_id)
        self._clean.update(self._dirty)
        self._dirty.clear()

    def _forget(self, block_id: int) -> None:
        key, origin = self._keys[block_id], self._origins[block_id]
        assert key is not None
        assert origin is not None
        del self._cached[origin.group][key]
        self._keys[block_id] = None
        self._origins[block_id] = None
        self._stored[block_id] = False

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Recount everything; `owners` gives the expected number of references per block.

        Raises AssertionError, which names the first wrong block. O(num_blocks).
        """
        for block_id in range(self.num_blocks):
            count, key = self._references[block_id], self._keys[block_id]
            expected = owners.get(block_id, 0)
            assert count == expected, f"block {block_id} has {count} references, its owners hold {expected}"
            places = (count > 0) + (block_id in self._clean) + (block_id in self._dirty)
            assert places == 1, f"block {block_id} is in {places} places"
            if key is not None:
                origin = self._origins[block_id]
                assert origin is not None, f"block {block_id} has a key and no chain"
                found = self._cached[origin.group].get(key)
                assert found == block_id, f"block {block_id} has a key that leads elsewhere"
                assert origin.chain.key(origin.position) == key, f"block {block_id} has lost its chain"
            if block_id in self._dirty:
                needs_store = self._write_back and key is not None and not self._stored[block_id]
                assert needs_store, f"block {block_id} is dirty without reason"
        keyed = sum(key is not None for key in self._keys)
        keys = sum(map(len, self._cached))
        assert keyed == keys, f"{keys} keys for {keyed} blocks"


# --- windows -----------------------------------------------------------------------------------------
#
#     block        0     1     2     3     4     5     6     7        block_size 4, size 10, sinks 4, 30 tokens computed
#               |sinks| left the window |  held: tokens 21..29, seen by token 30   |
#
# Token p sees the `size` tokens up to itself, and the first `sinks` tokens (Xiao, Tian, Chen, Han and Lewis, Efficient
# Streaming Language Models with Attention Sinks, 2023). A block that no later token sees is given back. So a prefix can
# be continued at a *cut* as soon as the blocks that token `cut` sees are there.


class Window(NamedTuple):
    """A window in tokens; `size` 0 means no window: every token sees all before it."""

    block_size: int
    size: int = 0
    sinks: int = 0

    @property
    def sink_blocks(self) -> int:
        """Leading blocks that are kept for their sinks."""
        return -(-self.sinks // self.block_size)

    @property
    def blocks(self) -> int:
        """The most blocks that a cut needs; 0 if it needs all before it."""
        return self.sink_blocks + max(1, -(-(self.size - 1) // self.block_size)) if self.size else 0

    def most_blocks(self, settings: EngineSettings) -> int | None:
        """The most blocks that a sequence of any length holds: a window, and what a step computes.

        None if there is no limit: without a window, or if a prompt is computed in one step.
        """
        if not self.size or not settings.enable_chunked_prefill:
            return None
        return self.blocks + -(-settings.step_tokens // self.block_size) + 1

    def most_blocks_of(self, tokens: int, settings: EngineSettings) -> int:
        """The most blocks that a sequence of that many tokens holds."""
        whole, most = -(-tokens // self.block_size), self.most_blocks(settings)
        return whole if most is None else min(whole, most)

    def first_block(self, computed: int) -> int:
        """The first block, apart from sinks, that tokens from `computed` on see."""
        return max(0, computed + 1 - self.size) // self.block_size if self.size else 0

    def needed(self, cut: int) -> list[int]:
        """The positions in the chain of the blocks before block `cut` that a sequence needs to continue from there."""
        first = self.first_block(cut * self.block_size)
        return [*range(min(self.sink_blocks, first)), *range(first, cut)]


# --- block tables ------------------------------------------------------------------------------------

NO_BLOCK = -1
"""Entry of a block that has left the window. A read through it by mistake hits no other sequence's block."""


class BlockTable:
    """Block i of `ids` holds tokens `[i * block_size, (i + 1) * block_size)`. The sequence has one reference on each.

    A block that has left the `window` is `NO_BLOCK`.
    """

    __slots__ = ("_left_blocks", "ids", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.ids: list[int] = []
        self._left_blocks = 0

    def fork(self) -> BlockTable:
        """A copy of the table, for another sequence."""
        other = BlockTable(self.window)
        other.ids, other._left_blocks = list(self.ids), self._left_blocks
        return other

    def clear(self) -> None:
        """Start over; the blocks must have been given back before."""
        self.ids = []
        self._left_blocks = 0

    @property
    def held(self) -> list[int]:
        """The blocks that have not left the window."""
        return [block_id for block_id in self.ids if block_id != NO_BLOCK]

    def held_runs(self, first: int, end: int) -> list[tuple[int, list[int]]]:
        """Runs of the blocks `[first, end)` that are held, each with the position of its first block in the chain."""
        runs: list[tuple[int, list[int]]] = []
        for position in range(first, end):
            if self.ids[position] == NO_BLOCK:
                continue
            if not runs or self.ids[position - 1] == NO_BLOCK:
                runs.append((position, []))
            runs[-1][1].append(self.ids[position])
        return runs

    def begin(self, cut: int, block_ids: list[int]) -> None:
        """Take these blocks: first those needed to continue from block `cut`, then those that follow it."""
        self._left_blocks = self.window.first_block(cut * self.window.block_size)
        kept = min(self.window.sink_blocks, self._left_blocks)
        self.ids = [*block_ids[:kept], *[NO_BLOCK] * (self._left_blocks - kept), *block_ids[kept:]]

    def can_go_on_from(self, cut: int) -> bool:
        """True if the table has all blocks needed to continue from block `cut`."""
        return self.window.first_block(cut * self.window.block_size) >= self._left_blocks

    def take(self, keep: int) -> list[int]:
        """Remove and return the table from `keep` on, for the caller to give its blocks back."""
        taken = self.ids[keep:]
        del self.ids[keep:]
        return taken

    def take_unseen(self, computed: int) -> list[int]:
        """Remove and return the blocks that no token from the last full block on sees, for the caller to give back.

        From the last full block and not from `computed` on: a preempted sequence continues there.
        """
        first = max(self._left_blocks, self.window.sink_blocks)
        self._left_blocks = self.window.first_block(computed - computed % self.window.block_size)
        taken = self.ids[first : self._left_blocks]
        self.ids[first : first + len(taken)] = [NO_BLOCK] * len(taken)
        return taken
