"""Grants among everything else that happens to a directory: random orders, and the books after every step."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from chains import chain_of, key_of
from played import play
from tier_rig import TierRig, content

from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.lower_tier import Granted
from tiercache.daemon.tiers.nvme.direct.grants import Grants
from tiercache.protocol.checksums import CHECKSUM_LANES, block_checksum, block_seed
from tiercache.protocol.messages import KEY_BYTES, CommitState

BLOCK_BYTES = 512 << 10
CHAINS = 6
LENGTH = 12
STEPS = 250


class Game:
    """Two clients that store past DRAM, one into DRAM, flushes, evictions, clients that die."""

    def __init__(self, rig: TierRig, seed: int) -> None:
        self.rig = rig
        self.dice = random.Random(seed)
        self.namespace = rig.namespace(BLOCK_BYTES)
        self.chains = [chain_of(str(number), LENGTH) for number in range(CHAINS)]
        self.owners = [Owner(b"b" * 16), Owner(b"c" * 16)]
        self.open: list[tuple[Owner, Granted, bytes, list[int]]] = []  # grants that were not ended
        self.visible = 0
        assert rig.tier.grants is not None
        self.grants: Grants = rig.tier.grants

    def step(self) -> None:
        moves = [self.reserve, self.reserve, self.commit, self.commit, self.abort, self.store, self.lose, self.flush]
        self.dice.choice(moves)()

    def reserve(self) -> None:
        chain, owner = self.dice.choice(self.chains), self.dice.choice(self.owners)
        first = self.dice.randrange(LENGTH) if self.dice.random() < 0.5 else 0
        keys = chain[KEY_BYTES * first : KEY_BYTES * self.dice.randint(first + 1, LENGTH)]
        parent = key_of(chain, first - 1) if first else b""
        got = self.grants.reserve(owner, self.namespace, parent, keys, self.dice.choice([0.0, 60.0]))
        assert bool(got.extents) == bool(got.lease_id)
        if got.lease_id:
            self.open.append((owner, got, keys, self.write(got, keys)))

    def write(self, got: Granted, keys: bytes) -> list[int]:
        """The right bytes into every slot, at once or (as a late writer) again before the end."""
        sums = []
        for number, place in enumerate(got.extents):
            key = key_of(keys, got.present + number)
            data = content(key, BLOCK_BYTES)
            fd = os.open(f"{got.directory}/segments/{place.segment:08d}.seg", os.O_WRONLY)
            os.pwrite(fd, data, place.offset)
            os.close(fd)
            seed = block_seed(key, self.namespace.fingerprint, BLOCK_BYTES, 0, CHECKSUM_LANES)
            sums.append(block_checksum(data, seed, CHECKSUM_LANES))
        return sums

    def take(self) -> tuple[Owner, Granted, list[int]] | None:
        """Take one grant, to end it; its slots are written once more, which must harm no other block."""
        if not self.open:
            return None
        owner, got, keys, sums = self.open.pop(self.dice.randrange(len(self.open)))
        self.write(got, keys)
        return owner, got, sums

    def commit(self) -> None:
        if taken := self.take():
            owner, got, sums = taken
            written = len(sums) if self.dice.random() < 0.7 else self.dice.randint(0, len(sums))
            states = self.grants.commit(owner, got.lease_id, sums[:written])
            self.visible += states.count(CommitState.VISIBLE)

    def abort(self) -> None:
        if taken := self.take():
            owner, got, _ = taken
            if self.dice.random() < 0.5:
                self.grants.abort(owner, got.lease_id, False)
            self.grants.abort(owner, got.lease_id, True)

    def store(self) -> None:
        self.rig.store(self.namespace, self.dice.choice(self.chains))

    def lose(self) -> None:
        """A client loses its session; often its process ends too, and then it writes no more."""
        place = self.dice.randrange(len(self.owners))
        owner = self.owners[place]
        self.rig.cache.session_lost(owner)
        if self.dice.random() < 0.5:
            self.rig.cache.process_gone(owner)
            self.open = [grant for grant in self.open if grant[0] is not owner]
            assert not self.rig.cache.has_quarantine(owner)
            self.owners[place] = Owner(owner.instance)

    def flush(self) -> None:
        if self.dice.random() < 0.2:
            key = key_of(self.dice.choice(self.chains), self.dice.randrange(LENGTH))
            self.rig.tier.flush([self.namespace], key, lambda blocks, durable: None)

    def check(self) -> None:
        assert self.rig.cache.check_integrity() == []
        assert self.rig.tier.check_integrity() == []


@pytest.mark.parametrize("seed", range(2))
def test_books_and_bytes_are_right_whatever_happens(tmp_path: Path, seed: int) -> None:
    async def scenario() -> None:
        # About 30 slots for 72 blocks: everything evicts.
        rig = await TierRig(tmp_path, nvme_bytes=16 << 20, segment_bytes=2 << 20).open()
        game = Game(rig, seed)
        steps, end_s = 0, time.monotonic() + 60
        while steps < STEPS or (not game.visible and time.monotonic() < end_s):  # a segment may be long in coming
            steps += 1
            game.step()
            game.check()
            rounds = iter(range(3))
            await rig.until(lambda rounds=rounds: next(rounds, None) is None)
        assert game.visible > 0, "some blocks were stored"
        while game.open:
            game.abort()
        await rig.settled()
        assert not game.grants.leases
        assert not game.grants.quarantined
        rig.check()
        rig.forget_dram()
        loaded = [await rig.load(game.namespace, chain) for chain in game.chains]
        assert sum(loaded) > 0
        assert rig.tier.stats()["bad_blocks"] == 0, "a slot belonged to two clients at a time"
        await rig.close()

    play(scenario)
