"""Directories as sources of promotions: which of them has a block; its slot is held, and read into a frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tiercache.daemon.ground.slices import PINS, Steps
from tiercache.daemon.tiers.dram.source import Fetch, FetchOutcome, FetchTally, SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, ReadOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority, most_together
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf, StoredBlocks
from tiercache.protocol.messages import KEY_BYTES

from .placement import ShelfPlacement

MAX_UNREADABLE = 4096
"""Unreadable blocks that are remembered, until they fail again."""
_OUTCOMES = {
    DiskOutcome.OK: FetchOutcome.OK,
    DiskOutcome.CORRUPT: FetchOutcome.CORRUPT,
    DiskOutcome.OTHER_KEY: FetchOutcome.OTHER_KEY,
    DiskOutcome.IO_ERROR: FetchOutcome.FAILED,
    DiskOutcome.CANCELLED: FetchOutcome.CANCELLED,
    DiskOutcome.ABANDONED: FetchOutcome.ABANDONED,
}


class Unreadable:
    """Blocks that a disk failed to read, once. At the second failure a block is dropped: else it would be found, and
    missed, forever."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], None] = {}

    def was_read(self, namespace: Namespace, key: bytes) -> None:
        """The disk has read it after all."""
        self.blocks.pop((namespace.number, key), None)

    def again(self, namespace: Namespace, key: bytes) -> bool:
        """Note a failure; returns whether it is the second one."""
        name = namespace.number, key
        if name in self.blocks:
            del self.blocks[name]
            return True
        if len(self.blocks) >= MAX_UNREADABLE:
            del self.blocks[next(iter(self.blocks))]
        self.blocks[name] = None
        return False


class ShelfSources:
    """All open directories: implements `SourceTier`. `promoted`, `unreadable`: over all of them. Event loop only."""

    def __init__(self, placement: ShelfPlacement) -> None:
        self.promoted = FetchTally()
        self.unreadable = Unreadable()
        self._placement = placement
        self._sources: dict[Shelf, ShelfSource] = {}

    def of(self, shelf: Shelf) -> ShelfSource:
        """The one of an open directory."""
        source = self._sources.get(shelf)
        if source is None:
            source = self._sources[shelf] = ShelfSource(shelf, self.promoted, self.unreadable)
        return source

    def gone(self, shelf: Shelf) -> None:
        """A directory has gone, and its promotions were given up."""
        self._sources.pop(shelf, None)

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        """See `SourceTier`: a chain lives in one directory, each block of a window in any."""
        if not namespace.table.windowed:
            if self._placement.takes_walks:
                yield
            first, end = wanted[0], wanted[-1] + 1
            shelf, length = self._placement.find(namespace, keys, end)
            if shelf is None or length <= first:
                return TierParts([], wanted)
            return TierParts([SourcePart(self.of(shelf), range(first, length))], range(length, end))
        found, rest = dict[Shelf, list[int]](), list[int]()
        for looked, number in enumerate(wanted, 1):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            shelf = self._placement.with_block(namespace, key, to_read=True)
            (rest if shelf is None else found.setdefault(shelf, [])).append(number)
            if not looked % PINS:
                yield
        return TierParts([SourcePart(self.of(shelf), numbers) for shelf, numbers in found.items()], rest)


class ShelfSource:
    """Implements `Source`. While a block is held, its slot belongs to the kernel; while it is fetched, it stays."""

    def __init__(self, shelf: Shelf, tally: FetchTally, unreadable: Unreadable) -> None:
        self.tally = tally
        self._shelf = shelf
        self._unreadable = unreadable

    @property
    def offline(self) -> bool:
        """See `Source`."""
        return self._shelf.offline

    @property
    def retired(self) -> bool:
        """See `Source`."""
        return self._shelf.retired

    @property
    def trusted(self) -> bool:
        """See `Source`. Its index is ours."""
        return True

    def kept_word(self, kept: bool) -> None:
        """See `Source`: nothing to note."""

    def missing(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bytes]:
        """Which of them are not here; see `Shelf.has`."""
        return self._shelf.missing(namespace, keys)

    def most_together(self, namespace: Namespace) -> int:
        """See `Source`. Neighbouring slots share a system call."""
        return most_together(namespace.size_class.frame_bytes)

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> StoredBlocks:
        """See `Source`."""
        shelf = self._shelf
        held = shelf.find_many(namespace, [keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] for number in numbers])
        shelf.allocator.hold_many(held.slots)
        return held

    def fetch(self, fetches: Sequence[Fetch]) -> bool:
        """See `Source`."""
        ops = [
            fetch.held.read_op(fetch.namespace, fetch.keys, fetch.addresses, partial(_ended, fetch))
            for fetch in fetches
        ]
        for fetch in fetches:
            for entry in _pinned(fetch):
                self._shelf.index.touch(entry)
                self._shelf.index.pin(entry)
        priority = DiskPriority.LOAD if fetches[0].urgent else DiskPriority.PREFETCH
        accepted = self._shelf.queue.submit_many(ops, priority)
        for op in ops[accepted:]:
            op.end(0, op.count, DiskOutcome.CANCELLED)
            op.done(op)
        return accepted == len(ops)

    def let_go(self, fetches: Sequence[Fetch]) -> None:
        """See `Source`."""
        unpin = self._shelf.index.unpin
        for fetch in fetches:
            self._shelf.allocator.unhold_many(fetch.held.slots)
            for entry in _pinned(fetch):
                unpin(entry)
            if self._unreadable.blocks:
                for key, outcome in zip(fetch.keys, fetch.outcomes, strict=True):
                    if outcome is FetchOutcome.OK:
                        self._unreadable.was_read(fetch.namespace, key)

    def failed(self, fetch: Fetch, place: int) -> bool:
        """See `Source`. A bad block is dropped, with all that follows it; an unreadable one gets a second chance."""
        shelf, namespace, key, outcome = self._shelf, fetch.namespace, fetch.keys[place], fetch.outcomes[place]
        if outcome is FetchOutcome.CORRUPT:
            shelf.drop_damaged(namespace, key)
        elif outcome is FetchOutcome.OTHER_KEY or (
            outcome is FetchOutcome.FAILED and self._unreadable.again(namespace, key)
        ):
            shelf.drop(namespace, key)
        return False

    def cancel(self) -> None:
        """See `Source`."""
        self._shelf.queue.cancel_queued()


def _pinned(fetch: Fetch) -> list[int]:
    """Entries that keep those of a fetch: of a chain the last one, which keeps all before it."""
    entries: list[int] = fetch.held.entries
    return entries if fetch.namespace.table.windowed else entries[-1:]


def _ended(fetch: Fetch, op: ReadOp) -> None:
    """A read has ended."""
    outcomes = [FetchOutcome.OK] * op.count if op.is_well else [_OUTCOMES[outcome] for outcome in op.outcomes]
    fetch.end(outcomes, op.stored_lengths)
