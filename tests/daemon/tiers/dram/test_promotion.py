"""Promotions of windows, of which any block may be missing."""

from __future__ import annotations

import pytest
from cache_at_once import CacheAtOnce
from cache_world import UNIT_BYTES, Memory, Shelf, tiny_slices
from chains import chain_of, key_of

from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.protocol.namespaces import NamespaceSpec

KEYS = chain_of("window", 6)
PARENT = {key_of(KEYS, number): key_of(KEYS, number - 1) if number else b"" for number in range(6)}
WINDOW = NamespaceSpec(
    engine="t", layout="l", dtype="u8", block_size=1, block_bytes=UNIT_BYTES, tp_rank=0, tp_size=1, window_blocks=4
)


class WindowBelow:
    """A window, blocks 2 to 5 of a chain, in the tier below."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        tiny_slices(patch)
        self.memory = Memory()
        self.shelf = Shelf(self.memory, lambda: 1000.0, PARENT.__getitem__)
        self.cache = CacheAtOnce(lambda: 1000.0, below=self.shelf)
        self.shelf.attach(self.cache, patch)
        self.cache.space.allocator.add_region(0, 8 * UNIT_BYTES)
        self.namespace = self.cache.space.open_namespace(WINDOW)
        for number in range(2, 6):
            block = self.namespace.number, key_of(KEYS, number)
            self.shelf.blocks[block] = (*block, number)

    def store(self, number: int) -> None:
        """Have a block in DRAM too."""
        owner, block = Owner(b"w" * 16), (self.namespace.number, key_of(KEYS, number))
        got = self.cache.reserve(owner, self.namespace, PARENT[block[1]], block[1], 60)
        self.memory.write(got.frames[0], UNIT_BYTES, self.shelf.blocks[block])
        self.cache.writes.commit(owner, got.lease_id, [0])

    def ask(self) -> ReadLease:
        """A lease that waits for the window; its fetches have begun."""
        lease = self.cache.match(Owner(b"r" * 16), [self.namespace], KEYS, 60, promote=True).lease
        assert lease is not None
        self.work()
        return lease

    def deliver(self, outcome: FetchOutcome) -> None:
        """All fetches end, and those that begin then."""
        while self.shelf.fetching:
            self.shelf.deliver(self.shelf.fetching[:], outcome)
            self.work()

    def work(self) -> None:
        """Do deferred work, until the cache says that there is no more."""
        while self.cache.work():
            pass


def test_of_a_block_after_a_gap_the_one_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    below = WindowBelow(monkeypatch)
    below.store(3)
    lease = below.ask()
    below.deliver(FetchOutcome.OK)  # `Shelf.published` checks what the tier below is told
    assert lease.blocks == 6
