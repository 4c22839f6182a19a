"""S3-FIFO: a small queue lets blocks that are used only once go soon (Yang et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.ghosts import Ghosts
from policies.queues import Queues
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch

SMALL, MAIN = 0, 1
SMALL_SHARE = 0.1
"""Of the capacity, for blocks that have just come."""
MOST_USES = 3
USES_FOR_MAIN = 2
"""A block in the small queue is moved to the main one, not evicted, if it was used so often."""
MOST_MOVES = 1024
"""At most so many blocks are spared for one eviction; then the next one goes, however often it was used."""


class S3FIFO:
    """Two FIFO queues, and ghosts of the blocks that the small one has evicted.

    A use is only counted. The count decides when the block reaches the front: from the small queue it moves to the main
    one, and there it returns to the end once for each use. A block that comes back from among the ghosts enters the
    main queue. A block takes over the count of its last child when that is evicted.
    """

    def __init__(self, index: Index) -> None:
        self._key = index.key
        self._columns = index.columns
        self._queues = Queues(index, 2)
        self._lost = Ghosts()
        self._uses = index.columns.integers("uses", "B")

    @property
    def ghosts(self) -> int:
        """How many evicted blocks are remembered as ghosts."""
        return len(self._lost)

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted(self, entry: int, stored: bool = False) -> None:
        self._queues.inserted(entry)
        self._uses[entry] = 0
        if self._lost.take(self._key[entry]):
            self._queues.lift(entry, MAIN)

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        for entry in entries:
            self.inserted(entry)

    def inserted_many(self, first: int, count: int) -> None:
        self._queues.inserted_many(first, count)

    def touched(self, entry: int, how: Touch) -> None:
        if how.counts:
            self._uses[entry] = min(MOST_USES, self._uses[entry] + 1)

    def _gone(self, entry: int) -> None:
        queues = self._queues
        queues.left(entry)
        if queues.of(entry) == SMALL:
            self._lost.add(self._key[entry], int((1.0 - SMALL_SHARE) * queues.capacity))

    def _take_over(self, entry: int, child: int) -> None:
        self._uses[entry] = min(MOST_USES, self._uses[entry] + self._uses[child])

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self._queues.add(entry)

    def remove(self, entry: int) -> None:
        self._queues.remove(entry)

    def follows(self, entry: int, child: int) -> bool:
        queues, uses = self._queues, self._uses
        if not queues.follows(entry, child):
            return False
        if queues.of(entry) == SMALL:
            small = self._small_is_full(queues.sizes[SMALL] - 1) or queues.first(MAIN) == NO_ENTRY
            if not small or uses[entry] + uses[child] >= USES_FOR_MAIN:
                return False
        elif uses[entry]:
            return False
        uses[child] += uses[entry]
        self._gone(entry)
        return True

    def replaced(self, entry: int, child: int) -> None:
        self._take_over(entry, child)
        self._gone(child)
        self._queues.replaced(entry, child)

    def evicted(self, entry: int, parent: int) -> None:
        self._take_over(parent, entry)
        self._gone(entry)

    # --- the next victim -------------------------------------------------------------------------

    def _small_is_full(self, size: int) -> bool:
        return size >= SMALL_SHARE * max(self._queues.capacity, self._queues.live)

    def victim(self) -> int:
        queues, uses = self._queues, self._uses
        queues.recount()
        for _ in range(MOST_MOVES):
            small, main = queues.first(SMALL), queues.first(MAIN)
            if small != NO_ENTRY and (main == NO_ENTRY or self._small_is_full(queues.sizes[SMALL])):
                if uses[small] < USES_FOR_MAIN:
                    return small
                uses[small] = 0
                queues.lift(small, MAIN)
            elif main != NO_ENTRY and uses[main]:
                uses[main] -= 1
                queues.restamp(main)
            else:
                return main
        return queues.first(MAIN)

    def worth(self, entry: int) -> float:
        return 0.0

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
