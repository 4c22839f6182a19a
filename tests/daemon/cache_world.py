"""The world around a cache of tests: memory, a tier below that is a table, and slices of a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.daemon.cache import Cache
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram import promotion
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.dram.source import Fetch, FetchOutcome, FetchTally, SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT

UNIT_BYTES = 4096
Block = tuple[int, bytes]
"""The number of a namespace, and a key."""
Token = tuple[int, bytes, int]
"""Stands for the bytes of a block: the block, and which of its stores wrote them."""

_TINY = {
    "tiercache.daemon.cache": {"_FLUSH_AT_ONCE": 2, "FLUSHED_AT_ONCE": 1, "KEYS_FLUSHED_AT_ONCE": 1, "FLUSH_NS": 0},
    "tiercache.daemon.index.entries": {"_GROW_ENTRIES": 16},
    "tiercache.daemon.index.check": {"ENTRIES": 2, "PINS": 1},
    "tiercache.daemon.index.frame_check": {"LOOKUPS": 2, "_AT_ONCE": 4},
    "tiercache.daemon.tiers.dram.check": {"_PINS": 2},
    "tiercache.daemon.index.lookups": {"REMEMBERED": 2},
    "tiercache.daemon.index.walks": {"REMEMBERED": 2, "WALKED_AT_ONCE": 2, "LOOKUPS": 3},
    "tiercache.daemon.tiers.dram.store_leases": {"PLACES_AT_ONCE": 10, "NOTES_AT_ONCE": 2},
    "tiercache.daemon.tiers.dram.growing_leases": {"PINS": 1},
    "tiercache.daemon.tiers.dram.growing_run": {"PINS": 1},
    "tiercache.daemon.tiers.dram.match_ends": {"LOOKUPS": 3, "_CHAINS": 1},
    "tiercache.daemon.tiers.dram.pending_blocks": {"BLOCKS_AT_ONCE": 2, "RUN_BLOCKS": 2, "LOOKED_AT_ONCE": 3},
    "tiercache.daemon.tiers.dram.pins": {"LOOKUPS": 2},
    "tiercache.daemon.tiers.dram.read_leases": {"PINS": 2, "EXPIRED_AT_ONCE": 2, "ENDED_AT_ONCE": 2, "PINS_LISTED": 4},
    "tiercache.daemon.tiers.dram.runs": {"PINS": 2, "MAX_TOGETHER": 1},
    "tiercache.daemon.tiers.dram.space": {"SLICE": 4, "ROOM_STEPS": 16, "EVICT_AT_ONCE": 16, "LOOK_AT_ONCE": 4},
    "tiercache.daemon.tiers.dram.promotion": {"BATCH": 2, "BATCHES_AT_ONCE": 1, "TAKEN_AT_ONCE": 1},
}


def tiny_slices(patch: pytest.MonkeyPatch) -> None:
    """All deferred work is done a few blocks at a time, so that small caches are caught in the middle of it."""
    for module, limits in _TINY.items():
        for name, limit in limits.items():
            patch.setattr(f"{module}.{name}", limit)


class Memory:
    """The bytes of an arena, as one token for each 4 KiB."""

    def __init__(self) -> None:
        self._units: dict[int, object] = {}

    def write(self, frame: int, frame_bytes: int, token: object) -> None:
        for unit in units(frame, frame_bytes):
            self._units[unit] = token

    def read(self, frame: int, frame_bytes: int) -> object:
        """The token in all of the frame."""
        found = {self._units.get(unit) for unit in units(frame, frame_bytes)}
        assert len(found) == 1, f"frame {frame:#x} is torn: {found}"
        return found.pop()

    def holds(self, frame: int, frame_bytes: int, token: object) -> bool:
        """Whether a frame, torn or not, has this token in all of it."""
        return all(self._units.get(unit) == token for unit in units(frame, frame_bytes))


def units(frame: int, frame_bytes: int) -> range:
    return range(frame, frame + frame_bytes, UNIT_BYTES)


TOGETHER = 2
"""Blocks of one fetch, at most."""


class Shelf(TierBelow):
    """A tier below that takes every block when it is published, and a source that delivers it when a test says so."""

    tiers = ("shelf",)
    offline = retired = False
    trusted = True

    def __init__(self, memory: Memory, now_s: Callable[[], float], parent_of: Callable[[bytes], bytes]) -> None:
        self.blocks: dict[Block, Token] = {}
        self.fetching: list[Fetch] = []
        self.published_tokens: set[Token] = set()
        """Of all blocks that ever became visible in DRAM."""
        self.told_right = True
        """Every client names keys in the order of their chains."""
        self.tally = FetchTally()
        self._memory = memory
        self._now_s = now_s
        self._parent_of = parent_of

    def attach(self, cache: Cache, patch: pytest.MonkeyPatch) -> None:
        """Promote into this cache, by its clock."""
        clock = SimpleNamespace(monotonic=self._now_s, perf_counter_ns=lambda: 0)
        patch.setattr(promotion, "time", clock)
        regions: Any = {number: SimpleNamespace(address=number << REGION_SHIFT) for number in range(64)}
        self._index = cache.space.index
        self._promotion = promotion.Promotion(cache.reads.growing, cache.writes, None, regions, [self])

    # --- as a tier below DRAM ------------------------------------------------------------------------

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        return [
            lambda: self._promotion.look(),
            lambda: self._promotion.begin(),
            lambda: self._promotion.land(),
        ]

    @property
    def settled(self) -> bool:
        return self._promotion.idle

    def promote(self, lease: ReadLease) -> None:
        self._promotion.start(lease)

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        before = b""
        for number in range(limit):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if (namespace.number, key) not in self.blocks or self._parent_of(key) != before:
                return number
            before = key
        return limit

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        return lambda key: (namespace.number, key) in self.blocks

    def published(self, namespace: Namespace, keys: Sequence[bytes], before: bytes) -> None:
        self._promotion.note_published()
        if self.told_right:
            assert before == (self._parent_of(keys[0]) if namespace.table.windowed else b"")
        for key in keys:
            frame = self._index.frame[namespace.table.get(key)]
            token: Any = self._memory.read(frame, namespace.size_class.frame_bytes)
            self.published_tokens.add(token)
            parent = b"" if namespace.table.windowed else self._parent_of(key)
            if parent and (namespace.number, parent) not in self.blocks:
                continue
            self.blocks.setdefault((namespace.number, key), token)

    def forget(self, blocks: Iterable[Block]) -> None:
        """Lose these: the caller names what hangs below them too."""
        for block in blocks:
            self.blocks.pop(block, None)

    # --- as a source of promotions -----------------------------------------------------------------

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        numbers = []
        for number in wanted:
            if (namespace.number, keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]) in self.blocks:
                numbers.append(number)
            elif not namespace.table.windowed:
                break
        yield
        rest = [number for number in wanted if number not in numbers]
        return TierParts([SourcePart(self, numbers)] if numbers else [], rest)

    def most_together(self, namespace: Namespace) -> int:
        return TOGETHER

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> Sequence[Token]:
        held = []
        for number in numbers:
            token = self.blocks.get((namespace.number, keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]))
            if token is None:
                break
            held.append(token)
        return held

    def fetch(self, fetches: Sequence[Fetch]) -> bool:
        self.fetching += fetches
        return True

    def let_go(self, fetches: Sequence[Fetch]) -> None:
        return

    def failed(self, fetch: Fetch, place: int) -> bool:
        return False

    def cancel(self) -> None:
        return

    def kept_word(self, kept: bool) -> None:
        return

    def hang(self) -> None:
        """The daemon waits for none of the fetches any more; they end later all the same."""
        self._promotion.give_up(self)

    def deliver(self, fetches: Sequence[Fetch], outcome: FetchOutcome, well: int = 0) -> None:
        """These fetches end together; so many blocks of each are well whatever the outcome of the others."""
        ends = []
        for fetch in fetches:
            self.fetching.remove(fetch)
            outcomes = [FetchOutcome.OK if place < well else outcome for place in range(len(fetch.keys))]
            ends.append(outcomes)
            for address, token, its in zip(fetch.addresses, fetch.held, outcomes, strict=True):
                good = token if its is FetchOutcome.OK else "rubbish"
                self._memory.write(address, fetch.namespace.size_class.frame_bytes, good)
        for fetch, outcomes in zip(fetches, ends, strict=True):
            fetch.end(outcomes, [0] * len(outcomes))
