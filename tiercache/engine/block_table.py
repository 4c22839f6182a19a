"""Block table of a sequence for one group of layers (see `tiercache.engine.layer_groups`)."""

from __future__ import annotations

from tiercache.engine.window import Window

NO_BLOCK = -1
"""In a block table: the block has left the window. Whoever read it would read no other's block."""


class BlockTable:
    """Block i of `ids` holds tokens `[i * block_size, (i + 1) * block_size)`; the sequence has one reference on each.

    Where the block has left the `window` there is `NO_BLOCK`.
    """

    __slots__ = ("_left_blocks", "ids", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.ids: list[int] = []
        self._left_blocks = 0

    def fork(self) -> BlockTable:
        """The same blocks for another sequence."""
        other = BlockTable(self.window)
        other.ids, other._left_blocks = list(self.ids), self._left_blocks
        return other

    def clear(self) -> None:
        """Begin anew; the blocks must have been given back before."""
        self.ids = []
        self._left_blocks = 0

    @property
    def held(self) -> list[int]:
        """The blocks that have not left the window."""
        return [block_id for block_id in self.ids if block_id != NO_BLOCK]

    def held_runs(self, first: int, end: int) -> list[tuple[int, list[int]]]:
        """What is held of the blocks `[first, end)`: runs of them, each with the number of its first block."""
        runs: list[tuple[int, list[int]]] = []
        for number in range(first, end):
            if self.ids[number] == NO_BLOCK:
                continue
            if not runs or self.ids[number - 1] == NO_BLOCK:
                runs.append((number, []))
            runs[-1][1].append(self.ids[number])
        return runs

    def begin(self, cut: int, block_ids: list[int]) -> None:
        """Take these blocks: those that are needed to go on from block `cut`, then those that follow it."""
        self._left_blocks = self.window.first_block(cut * self.window.block_size)
        kept = min(self.window.sink_blocks, self._left_blocks)
        self.ids = [*block_ids[:kept], *[NO_BLOCK] * (self._left_blocks - kept), *block_ids[kept:]]

    def can_go_on_from(self, cut: int) -> bool:
        """Whether all blocks are there that are needed to go on from block `cut`."""
        return self.window.first_block(cut * self.window.block_size) >= self._left_blocks

    def take(self, keep: int) -> list[int]:
        """Remove and return the table from `keep` on, for the caller to give its blocks back."""
        taken = self.ids[keep:]
        del self.ids[keep:]
        return taken

    def take_unseen(self, computed: int) -> list[int]:
        """Remove and return what no token from the last full block on sees, for the caller to give back.

        Not from `computed` on: a preempted sequence continues from the last full block.
        """
        first = max(self._left_blocks, self.window.sink_blocks)
        self._left_blocks = self.window.first_block(computed - computed % self.window.block_size)
        taken = self.ids[first : self._left_blocks]
        self.ids[first : first + len(taken)] = [NO_BLOCK] * len(taken)
        return taken
