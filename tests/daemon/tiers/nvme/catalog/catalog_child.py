"""A process that changes a catalog by a schedule until it is killed, and the model of that schedule.

Run as `catalog_child.py DIRECTORY SEED`; writes four bytes to stdout for each change acknowledged.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import Row, place_of

SEGMENTS, SLOTS = 4, 64


class Change(NamedTuple):
    """One step: a row inserted, deleted (`row` is None), or a whole segment dropped (no place)."""

    place: int | None
    row: Row | None
    segment: int


class Model:
    """The rows that should be there after so many changes. Equal seeds make equal schedules."""

    def __init__(self, seed: int, rows: dict[int, Row]) -> None:
        self.rows = dict(rows)
        self._rng = random.Random(seed)
        self._sequence = max((row.sequence for row in rows.values()), default=0)

    def step(self) -> Change:
        """Make the next change here; the caller makes it in the catalog."""
        rng, segment = self._rng, self._rng.randrange(SEGMENTS)
        place = place_of(segment, rng.randrange(SLOTS))
        kind = rng.random()
        if kind < 0.002:
            self.rows = {place: row for place, row in self.rows.items() if place >> 24 != segment}
            return Change(None, None, segment)
        if kind < 0.4:
            self.rows.pop(place, None)
            return Change(place, None, segment)
        self._sequence += 1
        key = rng.randbytes(16)
        row = self.rows[place] = Row(key, bytes(16), 1, 1, 4096, 4096, 0, 0, rng.getrandbits(64), self._sequence)
        return Change(place, row, segment)


def main(directory: Path, seed: int) -> None:
    catalog = Catalog(directory, b"directory number", lambda callback, *args: callback(*args))
    state = catalog.open()
    rows: dict[int, Row] = {}
    loaded = threading.Event()

    def take() -> None:
        while batch := loading.next_batch():
            rows.update(batch)
        if loading.finished:
            loaded.set()

    started = threading.Event()
    loading = catalog.load(lambda: started.wait(60) and take())
    started.set()
    if not loaded.wait(60):
        sys.exit("the rows do not load")
    model = Model(seed, rows)
    if rows and state.next_sequence <= max(row.sequence for row in rows.values()):
        sys.exit("a sequence number would be used again")
    room = threading.Semaphore(3000)

    def done(ok: bool) -> None:
        if not ok:
            os._exit(3)
        os.write(1, b"done")
        room.release()

    while True:
        room.acquire(timeout=40)
        change = model.step()
        if change.place is None:
            catalog.drop_segment(change.segment, done)
        elif change.row is None:
            catalog.delete(change.place, done)
        else:
            catalog.insert(change.place, change.row, done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
