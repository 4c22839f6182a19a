"""Placement: how much of a sequence the pool has, and the sequence's first blocks, in every group of layers."""

from __future__ import annotations

from tiercache.engine.blocks import BlockManager
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings


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
