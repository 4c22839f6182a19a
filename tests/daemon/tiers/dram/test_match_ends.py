"""Where a match ends, against a search that tries every cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_rig import SmallCache, branch, key
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.dram.match_ends import Cuts
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tier import NoTierBelow

BLOCKS = 9
PATH = tuple(range(1, BLOCKS + 1))
KEYS = branch(*PATH)
NUMBERS = [key(*PATH[: number + 1]) for number in range(BLOCKS)]


class Shelved(NoTierBelow):
    """A tier below with these blocks, by namespace number; of a chain it has a leading run."""

    tiers = ("fake",)

    def __init__(self, blocks: dict[int, set[int]]) -> None:
        self.blocks = blocks

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        return min(limit, len(self.blocks[namespace.number]))

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        here = {NUMBERS[number] for number in self.blocks[namespace.number]}
        return here.__contains__ if here else None


def longest(namespaces: Sequence[Namespace], blocks: dict[int, set[int]]) -> int:
    """The longest cut for which every namespace has the blocks that it needs."""
    for cut in range(BLOCKS, 0, -1):
        needed = {one.number: range(max(0, cut - (one.spec.window_blocks or cut)), cut) for one in namespaces}
        if all(number in blocks[name] for name, numbers in needed.items() for number in numbers):
            return cut
    return 0


SOME = st.sets(st.integers(0, BLOCKS - 1))
RUN = st.integers(0, BLOCKS).map(lambda length: set(range(length)))


@settings(max_examples=150, deadline=None)
@given(windows=st.lists(st.integers(0, 4), min_size=1, max_size=3), data=st.data())
def test_the_cut_is_the_longest_one(windows: list[int], data: st.DataObject) -> None:
    h = SmallCache(frames=BLOCKS * len(windows))
    spaces = [h.space(window_blocks=window, rank=rank) for rank, window in enumerate(windows)]
    dram, below = dict[int, set[int]](), dict[int, set[int]]()
    for space, window in zip(spaces, windows, strict=True):
        dram[space.number], below[space.number] = (data.draw(SOME if window else RUN) for _ in range(2))
        for number in sorted(dram[space.number]):
            parent = NUMBERS[number - 1] if number else b""
            got = h.cache.reserve(h.owner, space, parent, NUMBERS[number], 10)
            h.cache.writes.commit(h.owner, got.lease_id, [0])
    both = {number: dram[number] | below[number] for number in dram}
    cuts = Cuts(h.cache.space, Shelved(below))
    in_dram = finish(cuts.in_dram(spaces, KEYS, BLOCKS))
    assert in_dram == longest(spaces, dram)
    assert finish(cuts.with_below(spaces, KEYS, in_dram))[0] == longest(spaces, both)
    assert finish(Cuts(h.cache.space, NoTierBelow()).with_below(spaces, KEYS, in_dram))[0] == in_dram


def test_what_was_flushed_is_in_no_window() -> None:
    """Blocks that are being unlinked are still found by key, though the same key may have been stored again."""
    h = SmallCache(frames=2000)
    window, keys = h.space(window_blocks=2), b"".join(number.to_bytes(16, "little") for number in range(1, 901))
    for first in range(0, 900, 450):
        h.store(window, keys[16 * first : 16 * (first + 450)])
    index, table = h.cache.space.index, window.table
    cuts = Cuts(h.cache.space, NoTierBelow())
    assert finish(cuts.in_dram([window], keys, 900)) == 900
    index.drop_table(table)
    index.unlink_slice(100)
    assert table.unlinking
    assert finish(cuts.in_dram([window], keys, 900)) == 0
    while index.unlink_slice(100):
        pass
    assert h.cache.check_integrity() == []
    assert index.lookup(table) is None
