"""Catalogs in a directory of a test's own, and a loop that runs what is posted when the test says."""

from __future__ import annotations

import queue
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog, CatalogState
from tiercache.daemon.tiers.nvme.catalog.database import NAME
from tiercache.daemon.tiers.nvme.catalog.rows import Row

ID = b"directory number"
WAIT_S = 60.0


def row(number: int, **changes: Any) -> Row:
    """A row that differs from all others."""
    fields = {
        "key": number.to_bytes(16, "big"),
        "parent": bytes(16),
        "namespace": 1,
        "epoch": 1,
        "length": 4096,
        "stored_length": 4096,
        "codec": 0,
        "kind": 0,
        "checksum": number * 0x9E3779B97F4A7C15 % 2**64,
        "sequence": number,
    }
    return Row(**{**fields, **changes})


def fill(directory: Path) -> Path:
    """Take all room that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:

        def write() -> None:
            while True:
                file.write(bytes(4096))

        with pytest.raises(OSError, match="No space"):
            write()
    return filler


class Loop:
    """Takes the loop's place: what is posted runs when the test says."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...]]] = queue.SimpleQueue()

    def post(self, callback: Callable[..., None], *args: object) -> None:
        self._posted.put((callback, args))

    def until(self, condition: Callable[[], object]) -> None:
        """Run what is posted until the condition holds."""

        def ran() -> object:
            while not (over := condition()) and not self._posted.empty():
                callback, args = self._posted.get()
                callback(*args)
            return over

        wait_until(ran, "what is posted makes it true")


class Bench:
    """Makes catalogs in one directory and closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / NAME
        self.loop = Loop()
        self._open: list[Catalog] = []

    def open(self) -> tuple[Catalog, CatalogState]:
        catalog = Catalog(self.directory, ID, self.loop.post)
        self._open.append(catalog)
        return catalog, catalog.open()

    def filled(self, rows: dict[int, Row]) -> None:
        """A closed database with these rows in it."""
        catalog, _ = self.open()
        for place, its in rows.items():
            catalog.insert([place], [its])
        assert catalog.close(WAIT_S)

    def rows(self, catalog: Catalog) -> dict[int, Row]:
        """All rows that a catalog loads."""
        loading = catalog.load(lambda: None, batch_rows=50)
        found: dict[int, Row] = {}

        def take() -> bool:
            batch = loading.next_batch()
            found.update(batch or [])
            return loading.finished

        self.loop.until(take)
        assert loading.rows == len(found)
        return found

    def reopened(self) -> dict[int, Row]:
        """The rows of a closed database."""
        catalog, _ = self.open()
        found = self.rows(catalog)
        catalog.close(WAIT_S)
        return found

    def change(self, statement: str, *values: object) -> None:
        """Change the closed database behind the catalog's back."""
        db = sqlite3.connect(self.path)
        with db:
            db.execute(statement, values)
        db.close()

    def clear(self) -> None:
        """Remove all files."""
        for path in self.directory.iterdir():
            path.unlink()

    def set_aside(self) -> list[Path]:
        """Databases that were renamed, without their logs."""
        return [path for path in self.directory.glob(f"{NAME}.damaged-*") if not path.name.endswith(("-wal", "-shm"))]

    def close(self) -> None:
        for catalog in self._open:
            catalog.close(WAIT_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


class Answers:
    """Remembers what came back, in order."""

    def __init__(self) -> None:
        self.got: list[tuple[object, bool]] = []

    def __call__(self, name: object) -> Callable[[bool], None]:
        return lambda ok: self.got.append((name, ok))
