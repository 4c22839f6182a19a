"""Whether directories get worker processes: asked also where nothing of the tier is loaded."""

from __future__ import annotations

import os

WORKERS_FROM_DIRECTORIES, WORKERS_FROM_CORES = 2, 4
"""`auto` means processes from so many on: with one disk, or where they share the loop's cores, they gain too little."""


def wants_workers(setting: str, directories: int) -> bool:
    """Whether each directory gets a process of its own: `setting` is auto, on or off."""
    if setting != "auto":
        return setting == "on"
    return directories >= WORKERS_FROM_DIRECTORIES and len(os.sched_getaffinity(0)) >= WORKERS_FROM_CORES
