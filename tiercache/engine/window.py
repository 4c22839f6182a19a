"""Windows: how much of its past a sequence must keep, all of it or only what its next tokens see.

    block        0     1     2     3     4     5     6     7        block_size 4, size 10, sinks 4, 30 tokens computed
              |sinks| left the window |  held: tokens 21..29, seen by token 30   |

Token p sees the `size` tokens up to itself, and the first `sinks` tokens (Xiao, Tian, Chen, Han and Lewis, Efficient
Streaming Language Models with Attention Sinks, 2023). A block that no later token sees is given back. So a prefix can
be continued at a *cut* as soon as the blocks that token `cut` sees are there.
"""

from __future__ import annotations

from typing import NamedTuple

from tiercache.engine.settings import EngineSettings


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
