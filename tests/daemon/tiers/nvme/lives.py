"""Lives of the NVMe tier at random, and the model of what may be found in them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from chains import chain_of, key_of
from disk_troubles import fail
from tier_rig import TierRig
from window_rig import check_closed

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import BlockState

SpacesOf = Callable[[TierRig], list[Namespace]]


class Model:
    """The blocks that may be there: those stored since they were last flushed."""

    def __init__(self, chains: list[bytes]) -> None:
        self.chains = chains
        self.most: dict[tuple[str, bytes], set[int]] = {}

    def stored(self, space: Namespace, chain: bytes, numbers: range) -> None:
        self.most.setdefault((space.fingerprint, chain), set()).update(numbers)

    def flushed(self, spaces: list[Namespace], chain: bytes, number: int) -> None:
        for space in spaces:
            here = self.most.get((space.fingerprint, chain), set())
            gone = {number} if space.table.windowed else {one for one in here if one >= number}
            self.most[space.fingerprint, chain] = here - gone

    def forget(self) -> None:
        self.most.clear()

    def check(self, spaces: list[Namespace], chain: bytes, cut: int) -> None:
        for space in spaces:
            first = max(0, cut - space.spec.window_blocks) if space.table.windowed else 0
            assert set(range(first, cut)) <= self.most.get((space.fingerprint, chain), set()), "it was flushed"


async def act(rig: TierRig, spaces: list[Namespace], model: Model, rng: random.Random) -> None:
    """One thing that may happen: a store, a load, a flush, a fault of a disk, time that passes."""
    chain, asked = rng.choice(model.chains), rng.sample(spaces, rng.randrange(1, len(spaces) + 1))
    length = rng.randrange(1, len(chain) // 16 + 1)
    action = rng.random()
    if action < 0.4:
        for space in asked:
            first = rng.randrange(length) if space.table.windowed else 0
            states = rig.store(space, chain[: 16 * length], first=first)
            kept = sum(state is not BlockState.NONE for state in states)
            model.stored(space, chain, range(first, first + kept))
    elif action < 0.65:
        model.check(asked, chain, await rig.load_all(asked, chain[: 16 * length]))
    elif action < 0.7:
        number = rng.randrange(len(chain) // 16)
        if await rig.flush(key_of(chain, number)):
            model.flushed(spaces, chain, number)
    elif action < 0.71:
        if await rig.flush():
            model.forget()
    elif action < 0.78:
        rig.forget_dram()
    elif action < 0.81:
        rig.forget_blocks(rng.choice(spaces), key_of(chain, length - 1))
    elif action < 0.86:
        disk = rng.choice(list(rig.disks.values()))
        disk.hook = fail(rng.choice(("preadv", "pwritev", "fallocate")), rng.randrange(4))
    elif action < 0.89:
        lease = rig.match(asked, chain)  # a load that is given up
        if lease is not None:
            rig.cache.reads.release(rig.owner, lease.lease_id)
    elif action < 0.92:
        for one in rig.shelves:
            one.health.off_until_s = 0.0
    else:
        for _ in range(rng.randrange(20)):
            rig.cache.work()
            await asyncio.sleep(0)
    for one in rig.shelves:
        one.health.off_until_s = min(one.health.off_until_s, time.monotonic() + 0.01)
    rig.check()


async def live(root: Path, seed: int, lives: int, steps: int, spaces_of: SpacesOf, **sizes: int) -> int:
    """Lives of a tier in the same directories, with chains of random lengths; the blocks that came back.

    `spaces_of` opens the namespaces of a life: what comes back of the last one counts. `sizes` is for the rig.
    """
    rng = random.Random(seed)
    model = Model([chain_of(str(number), rng.randrange(3, 40)) for number in range(10)])
    back = 0
    for life in range(lives):
        rig = TierRig(root, disks=2, **sizes)
        await rig.tier.open()
        if rng.random() < 0.7:
            await rig.loaded()
        spaces = spaces_of(rig)
        for chain in rng.sample(model.chains, 5) if life else ():
            asked = rng.sample(spaces, rng.randrange(1, len(spaces) + 1))
            found = await rig.load_all(asked, chain)
            model.check(asked, chain, found)
            back += found if spaces[-1] in asked else 0
            rig.check()
        for _ in range(steps):
            await act(rig, spaces, model, rng)
        if rng.random() < 0.7:
            await rig.crash()
        else:
            await rig.close(grace_s=rng.choice((0.0, 5.0)))
        check_closed(rig)
    return back
