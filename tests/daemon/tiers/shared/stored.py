"""Real stores whose values a test may read and spoil behind the hosts' backs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

from s3_rig import RcloneServer
from valkey_rig import ValkeyServer

from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import SharedStore


class Stored(Protocol):
    """A store, and its values as they lie in it."""

    def open(self) -> SharedStore:
        """For one host."""

    def value(self, name: bytes) -> bytes:
        """What lies there."""

    def spoil(self, name: bytes, value: bytes) -> None:
        """Have something else lie there."""

    def lose(self, name: bytes) -> None:
        """Lose one value."""

    def empty(self) -> None:
        """Lose all, the notes too."""


class StoredInValkey:
    def __init__(self, server: ValkeyServer) -> None:
        self._server = server

    def open(self) -> SharedStore:
        return open_store(self._server.url)

    def value(self, name: bytes) -> bytes:
        return self._server.ask("GET", name)

    def spoil(self, name: bytes, value: bytes) -> None:
        assert self._server.ask("SET", name, value) == b"+OK"

    def lose(self, name: bytes) -> None:
        assert self._server.ask("DEL", name) == b":1"

    def empty(self) -> None:
        assert self._server.ask("FLUSHALL") == b"+OK"


class _StoredInFiles:
    """`root`: what holds all of the store's files."""

    root: Path

    def _place(self, name: bytes) -> Path:
        raise NotImplementedError

    def value(self, name: bytes) -> bytes:
        return self._place(name).read_bytes()

    def spoil(self, name: bytes, value: bytes) -> None:
        self._place(name).write_bytes(value)

    def lose(self, name: bytes) -> None:
        self._place(name).unlink()

    def empty(self) -> None:
        shutil.rmtree(self.root)


class StoredInFolder(_StoredInFiles):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = folder / OURS

    def open(self) -> SharedStore:
        return open_store(f"file://{self._folder}")

    def _place(self, name: bytes) -> Path:
        return self.root / "values" / fan_out(name) / file_name(name)


class StoredInBucket(_StoredInFiles):
    """`pack`: blocks of an object."""

    def __init__(self, server: RcloneServer, prefix: str, pack: int = 1) -> None:
        self._url = f"{server.url(prefix)}&pack={pack}"
        self.root = server.bucket / prefix

    def open(self) -> SharedStore:
        return open_store(self._url)

    def _place(self, name: bytes) -> Path:
        return self.root / "values" / file_name(name)

    def empty(self) -> None:
        """By a request for each: the server remembers what its folders held."""
        import obstore

        objects: Any = self.open()
        for folder in ("values", "notes"):
            obstore.delete(objects._shared.bucket, [f"{folder}/{one.name}" for one in (self.root / folder).iterdir()])
        objects.close()
