"""What tests of directories that come and go share."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of
from tier_rig import TierRig

CHAINS = [chain_of(str(number), 8) for number in range(12)]


async def filled(root: Path, disks: int = 2) -> TierRig:
    """A tier with all chains on its disks, and none in DRAM."""
    rig = await TierRig(root, disks=disks).open()
    for chain in CHAINS:
        rig.store(rig.namespace(), chain)
    await rig.settled()
    rig.forget_dram()
    return rig


async def found(rig: TierRig) -> list[int]:
    """How many blocks of each chain are found; every byte is compared."""
    return [await rig.load(rig.namespace(), chain) for chain in CHAINS]


def states(rig: TierRig) -> list[str]:
    return [one["state"] for one in rig.tier.stats()["directories"]]


async def take_away(rig: TierRig, elsewhere: Path) -> None:
    """Move the first directory to another path; the tier goes on without it."""
    rig.dirs[0].rename(elsewhere)
    await rig.until(lambda: states(rig)[0] == "away")
