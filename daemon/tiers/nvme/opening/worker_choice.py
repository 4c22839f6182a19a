"""How many worker processes directories get: asked also where nothing of the tier is loaded."""

from __future__ import annotations

from tiercache.ground.processors import usable_cores

WORKERS_FROM_DIRECTORIES, WORKERS_FROM_CORES = 2, 4
"""From these numbers on `auto` means processes: with one disk, or on the loop's cores, they gain too little."""


def worker_processes(setting: str, directories: int) -> int:
    """One for each directory, or none; `setting` is auto, on or off."""
    worth_it = directories >= WORKERS_FROM_DIRECTORIES and usable_cores() >= WORKERS_FROM_CORES
    return directories if setting == "on" or (setting == "auto" and worth_it) else 0
