"""What tests of windowed namespaces in the NVMe tier share."""

from __future__ import annotations

import errno
import os

from chains import key_of
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory

WINDOW = 3


def broken(name: str, size: int) -> int | None:
    """A disk's hook: nothing can be read."""
    if name == "preadv":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return None


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


def check_closed(rig: TierRig) -> None:
    """The directories are as their indexes say, to the last byte."""
    for path in rig.dirs:
        report = check_directory(path, sample=ALL, rate=0)
        assert report.findings == [], report


async def spread(rig: TierRig, window: Namespace, chain: bytes) -> None:
    """Store a chain so that its blocks are in the directories in turn."""
    home = rig.tier._placement.window
    turns = {key_of(chain, number): rig.shelves[number % len(rig.shelves)] for number in range(len(chain) // 16)}
    rig.tier._placement.window = lambda namespace, key, *rest: turns[key]  # type: ignore[method-assign]
    rig.store(window, chain)
    await rig.settled()
    rig.tier._placement.window = home  # type: ignore[method-assign]
    assert homes(rig, window, chain) == [number % len(rig.shelves) for number in range(len(chain) // 16)]
