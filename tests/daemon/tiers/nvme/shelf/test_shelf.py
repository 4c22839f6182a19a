"""A subscriber to the events knows what is in which tier, whatever happens to blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock, play
from tier_rig import TierRig

from tiercache.daemon.events.events import Events, Named, NamedBlocks
from tiercache.daemon.events.publisher import Publisher
from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.nvme.shelf import shelf as shelf_module
from tiercache.protocol.messages import KEY_BYTES, ReceivedRun, pack_indices


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def names_of(chain: bytes, first: int = 0) -> Named:
    """The event fields that a client would send with blocks `first..` of a chain: one token in each, its place."""
    hashes = [hash_of(chain[at : at + KEY_BYTES]) for at in range(0, len(chain), KEY_BYTES)]
    tokens = pack_indices(list(range(first, len(hashes))))
    return NamedBlocks(ReceivedRun(list(hashes[first:]), hashes[first - 1] if first else None, tokens, group=0), 1)


class Follower:
    """Applies batches in order, and asserts that each event is possible."""

    def __init__(self) -> None:
        self.events = Events(Publisher("", "", "", 1 << 20))
        self.here: dict[str, dict[int, tuple[int | None, int]]] = {"CPU": {}, "STORAGE": {}}  # parent and token
        self.seen: Counter[str] = Counter()
        self._read = 0

    def catch_up(self) -> None:
        self.events.flush()
        batches = list(self.events.publisher._buffer)  # rule: what a subscriber would receive
        for batch in batches[self._read :]:
            for event in msgpack.unpackb(batch)[1]:
                self.seen[f"{event['type']} {event.get('medium', '')}".strip()] += 1
                getattr(self, event["type"])(event)
        self._read = len(batches)

    def AllBlocksCleared(self, event: dict[str, object]) -> None:
        for blocks in self.here.values():
            blocks.clear()

    def BlockStored(self, event: dict[str, object]) -> None:
        hashes, parent, tokens = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        assert isinstance(hashes, list)
        assert isinstance(tokens, list)
        blocks = self.here[str(event["medium"])]
        assert event["block_size"] == 1
        for name, token in zip(hashes, tokens, strict=True):
            assert name not in blocks, "stored twice"
            assert parent is None or parent in blocks, "stored before its parent"
            blocks[name] = parent, token
            parent = name

    def BlockRemoved(self, event: dict[str, object]) -> None:
        assert isinstance(event["block_hashes"], list)
        for name in event["block_hashes"]:
            del self.here[str(event["medium"])][name]


@contextmanager
def follower() -> Iterator[Follower]:
    one = Follower()
    try:
        yield one
    finally:
        one.events.close()


def hashes_in(index: Index) -> set[int]:
    return {hash_of(key) for table in index.tables.values() for shard in table.shards for key in shard}


async def compare(rig: TierRig, follows: Follower) -> None:
    """At rest the follower's sets are the daemon's."""
    await rig.settled()
    await rig.until(lambda: not rig.cache.work())
    follows.catch_up()
    assert set(follows.here["CPU"]) == hashes_in(rig.cache.space.index)
    assert set(follows.here["STORAGE"]) == set().union(*(hashes_in(shelf.index) for shelf in rig.shelves))
    rig.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_has_the_daemons_sets(tmp_path: Path, seed: int) -> None:
    """More blocks than DRAM holds, and more than the disks hold, of chains that share prefixes."""
    rng = random.Random(seed)

    def some_chain() -> bytes:
        root, branch, tail = f"{rng.randrange(4)}", f"{rng.randrange(3)}", f"{rng.randrange(3)}"
        chain = chain_of(root, 4) + chain_of(root + branch, 3) + chain_of(root + branch + tail, 8)
        return chain[: KEY_BYTES * rng.randrange(1, 16)] if rng.random() < 0.2 else chain

    async def scenario() -> None:
        with follower() as follows:
            rig = TierRig(tmp_path, disks=2, arena_regions=2, nvme_bytes=16 << 20, events=follows.events)
            await rig.open()
            namespace = rig.namespace()
            for _ in range(120):
                what, chain = rng.random(), some_chain()
                if what < 0.6:
                    rig.store(namespace, chain, named=names_of(chain))
                elif what < 0.85:
                    await rig.load(namespace, chain)
                elif what < 0.9:
                    rig.forget_dram()
                elif what < 0.97:
                    await rig.flush(key_of(chain, rng.randrange(len(chain) // KEY_BYTES)))
                else:
                    follows.events.cleared()
                    await rig.flush()
                if rng.random() < 0.3:
                    await compare(rig, follows)
            await compare(rig, follows)
            kinds = {f"{what} {where}" for what in ("BlockStored", "BlockRemoved") for where in ("CPU", "STORAGE")}
            assert set(follows.seen) == {"AllBlocksCleared", *kinds}
            await rig.close()

    play(scenario)


# --- rows and slots ---------------------------------------------------------------------------------


@on_clock
async def test_nothing_more_is_unlinked_while_the_index_is_behind(clock: Clock) -> None:
    """Each evicted block is a row to delete. These wait where they cost nothing, not in an unbounded queue."""
    disk = MemoryDisk(0, clock)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    [shelf], space = rig.shelves, rig.namespace(4096)
    rig.store(space, chain_of("a", 20))
    await rig.settled()
    assert disk.catalog is not None
    disk.catalog.full = True
    shelf.drop(space, key_of(chain_of("a", 20), 0))
    for _ in range(3):
        assert not shelf.work()
    assert (len(shelf.slots.left), shelf.catalog.pending) == (0, 0)
    disk.catalog.full = False
    shelf.work()
    assert len(shelf.slots.left) == 20
    await rig.committed()
    assert shelf.allocator.used_bytes == 0
    rig.check()
    await rig.close()


@on_clock
async def test_a_row_that_was_refused_does_not_replace_that_of_the_next_block_in_its_slot(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk(0, clock)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    [shelf], space, block = rig.shelves, rig.namespace(4096), chain_of("b", 1)
    await rig.store_below([rig.namespace(4096, rank=1)], block)
    disk.failing = {"commit"}
    rig.store(space, block)
    await rig.until(lambda: shelf.has(space, block))
    before = shelf.find_many(space, [block])[0].slot
    await rig.until(lambda: bool(shelf.catalog.error))
    monkeypatch.setattr(shelf_module, "ROWS_AT_ONCE", 0)  # as if many others were to be inserted first
    rig.tier.flush([space], b"", lambda blocks, durable: None)
    rig.forget_dram()
    disk.failing = set()
    clock.now_s += 60
    await rig.until(lambda: not shelf.slots.left and not shelf.catalog.pending)
    await rig.store_below([space], block)
    assert shelf.find_many(space, [block])[0].slot == before
    monkeypatch.undo()
    await rig.work(5)
    await rig.committed()
    number, epoch = shelf.registry.number(space), shelf.registry.epochs[space.number]
    assert [row[3] for row in disk.database.rows.values() if row[2] == number] == [epoch]
    await rig.close()
