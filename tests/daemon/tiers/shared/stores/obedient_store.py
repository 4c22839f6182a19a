"""A store that does what the names of values say, for tests of the helper process: it runs there."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tiercache.daemon.tiers.shared.stores.store import Arrived, Exists, Fate, Get, Noted, Put, StoreError, StoreProblem


class ObedientStore:
    """Values in memory, for all connections. `hang` waits for the file GATE in the folder that the URL names."""

    pack_blocks = 1
    connections = 2

    def __init__(self, url: str) -> None:
        self.address = url
        self.gate = Path(url.removeprefix("obedient://")) / "gate"
        self.values: dict[bytes, bytes] = {}
        if url.endswith("?broken"):
            raise RuntimeError("this store cannot be made")

    def connect(self) -> ObedientConnection:
        return ObedientConnection(self)


class ObedientConnection:
    def __init__(self, store: ObedientStore) -> None:
        self._store = store

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        for name in names:
            self._obey(name)
        return Exists([name in self._store.values for name in names], self._notes(notes))

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        assert arrived is not None
        if noted is not None:
            noted(self._notes(notes))
        for get in wanted:
            self._obey(get.name)
            value = self._store.values.get(get.name)
            if value is None:
                get.fate = Fate.MISSING
            elif len(value) > len(get.body):
                get.fate = Fate.MISFIT
            else:
                get.fate, get.body_bytes = Fate.DONE, len(value)
                get.body[: len(value)] = value
            arrived(get)
        return self._notes(notes)

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        for put in values:
            self._obey(put.name)
            self._store.values[put.name] = b"".join(put.parts)
            put.fate = Fate.DONE
        return self._notes(notes)

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        for name in names:
            self._store.values.pop(name, None)

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        if only_if_missing:
            return self._store.values.setdefault(name, value)
        self._store.values[name] = value
        return value

    def close(self) -> None:
        """Nothing is open."""

    def _notes(self, names: Sequence[bytes]) -> list[bytes | None]:
        return [self._store.values.get(name) for name in names]

    def _obey(self, name: bytes) -> None:
        if name.startswith(b"hang"):
            while not self._store.gate.exists():
                time.sleep(0.01)
        elif name == b"lock":
            ctypes.PyDLL(None).sleep(1000)  # native code that hangs with the interpreter's lock
        elif name == b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == b"full":
            raise StoreError(StoreProblem.FULL, "there is no room: make some")
        elif name == b"defect":
            raise ValueError("a defect of this store")
