"""A client that stores past DRAM continues its chain, although the chain's end would be the next victim."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of, key_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.index.chain_ends import TAIL_S
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tier import Granted
from tiercache.daemon.tiers.nvme.slots import Slots
from tiercache.protocol.messages import KEY_BYTES, CommitState

BLOCK_BYTES = 512 << 10


class Writers:
    """Hand-made clients on a directory of some 30 slots; the blocks that they claim to have written are never read."""

    def __init__(self, rig: TierRig) -> None:
        self.rig = rig
        self.namespace: Namespace = rig.namespace(BLOCK_BYTES)
        self.one, self.other = Owner(b"b" * 16), Owner(b"c" * 16)
        self.now_s = 1000.0
        self.slots.tails._clock_s = lambda: self.now_s

    @property
    def slots(self) -> Slots:
        return self.rig.shelves[0].slots

    async def store(self, owner: Owner, keys: bytes, parent: bytes = b"") -> int:
        """Store a run in as many grants as it takes; returns how many of its blocks became visible."""
        grants, got, stored = self.rig.tier.grants, Granted(), 0
        assert grants is not None

        def granted() -> bool:
            nonlocal got
            got = grants.reserve(owner, self.namespace, parent, keys[stored * KEY_BYTES :], 60.0)
            return not got.soon

        while stored * KEY_BYTES < len(keys):
            await self.rig.until(granted)
            if not got.lease_id:
                break
            states = grants.commit(owner, got.lease_id, [1] * len(got.extents))
            assert states == [CommitState.VISIBLE] * len(states)
            stored += len(states)
            parent = key_of(keys, stored - 1)
        return stored

    def evict_all(self) -> None:
        """Evict as much as there is."""
        while self.slots.evict_of("", 1 << 40):
            pass

    def length(self, keys: bytes) -> int:
        return self.rig.tier.length(self.namespace, keys, len(keys) // KEY_BYTES)


def test_the_end_of_a_direct_store_waits_for_what_follows(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=16 << 20, segment_bytes=2 << 20).open()
        writers, (a, b) = Writers(rig), (chain_of("a", 6), chain_of("b", 4))
        assert await writers.store(writers.one, a[: 3 * KEY_BYTES]) == 3
        assert await writers.store(writers.other, b) == 4
        assert len(list(writers.slots.tails)) == 2
        writers.rig.cache.session_lost(writers.other)
        slots, policies = writers.slots, writers.slots._of_size(writers.namespace.size_class.frame_bytes)
        for _ in range(4):
            slots._evict_one(policies)
        assert (writers.length(a), writers.length(b)) == (3, 0), "the end of the one chain is kept for its writer"
        assert await writers.store(writers.one, a[3 * KEY_BYTES :], key_of(a, 2)) == 3
        assert [rig.shelves[0].index.key[entry] for entry in slots.tails] == [key_of(a, 5)]
        rig.check()
        writers.now_s += TAIL_S
        writers.evict_all()
        assert writers.length(a) == 0
        assert list(slots.tails) == []
        rig.check()
        await rig.close()

    play(scenario)


def test_an_end_gives_way_where_nothing_else_is_left_and_at_a_flush(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=16 << 20, segment_bytes=2 << 20).open()
        writers, a = Writers(rig), chain_of("a", 6)
        assert await writers.store(writers.one, a) == 6
        policies = writers.slots._of_size(writers.namespace.size_class.frame_bytes)
        assert writers.slots._evict_one(policies) >= 0
        assert writers.length(a) == 5
        assert await writers.store(writers.one, key_of(a, 5), key_of(a, 4)) == 1
        assert list(writers.slots.tails) != []
        rig.tier.flush([writers.namespace], b"", lambda blocks, durable: None)
        rig.tier.work()
        assert list(writers.slots.tails) == []
        rig.check()
        await rig.close()

    play(scenario)


def test_ends_below_many_keys_that_are_flushed_are_looked_for_once(tmp_path: Path) -> None:
    """Else each key would walk all of them again: a flush of a key of many namespaces took quadratic time."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=16 << 20, segment_bytes=2 << 20).open()
        writers, chains, walks = Writers(rig), [chain_of(name, 2) for name in "abc"], list[int]()
        for keys in chains:
            assert await writers.store(writers.one, keys) == 2
        tails, let_go = writers.slots.tails, writers.slots.tails.let_go_detached
        tails.let_go_detached = lambda: (walks.append(len(list(tails))), let_go())[1]
        for keys in chains:
            rig.tier.flush([writers.namespace], key_of(keys, 0), lambda blocks, durable: None)
        rig.tier.work()
        assert walks == [3]
        assert list(tails) == []
        rig.tier.work()
        assert walks == [3]
        rig.check()
        await rig.close()

    play(scenario)
