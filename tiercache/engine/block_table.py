"""Block table of a sequence for one group of layers (see `tiercache.engine.layer_groups`)."""

from __future__ import annotations

from tiercache.engine.window import Window

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
