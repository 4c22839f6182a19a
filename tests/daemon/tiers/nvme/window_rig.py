"""What tests of windowed namespaces in the NVMe tier share."""

from __future__ import annotations

from chains import key_of
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace

WINDOW = 3


def spaces_of(rig: TierRig) -> list[Namespace]:
    """A model with both: a chain and a window."""
    return [rig.namespace(), rig.namespace(window_blocks=WINDOW)]


def homes(rig: TierRig, namespace: Namespace, chain: bytes) -> list[int | None]:
    """The number of the directory that has each block."""
    found = []
    for number in range(len(chain) // 16):
        holders = [place for place, one in enumerate(rig.shelves) if one.has(namespace, key_of(chain, number))]
        assert len(holders) < 2
        found.append(holders[0] if holders else None)
    return found


async def spread(rig: TierRig, window: Namespace, chain: bytes) -> None:
    """Store a chain so that its blocks are in the directories in turn."""
    home = rig.tier._placement.window
    turns = {key_of(chain, number): rig.shelves[number % len(rig.shelves)] for number in range(len(chain) // 16)}
    rig.tier._placement.window = lambda namespace, key, *rest: turns[key]  # type: ignore[method-assign]
    rig.store(window, chain)
    await rig.settled()
    rig.tier._placement.window = home  # type: ignore[method-assign]
    assert homes(rig, window, chain) == [number % len(rig.shelves) for number in range(len(chain) // 16)]
