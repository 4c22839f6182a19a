"""A store that does what the names of values say, for tests of the helper process: it runs there."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memory_store import MemoryConnection, MemoryStore

from tiercache.daemon.tiers.shared.stores.store import Connection, Exists, Get, Put, StoreError, StoreProblem


class ObedientStore(MemoryStore):
    """`hang` waits for the file `gate` in the folder that the URL names."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.gate = Path(url.removeprefix("obedient://")) / "gate"

    def connect(self) -> Connection:
        return ObedientConnection(self)


class ObedientConnection(MemoryConnection):
    def __init__(self, store: ObedientStore) -> None:
        super().__init__(store)
        self._gate = store.gate

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        for name in names:
            self._obey(name)
        return super().exists(names, notes, deadline_s)

    def get(self, wanted: Sequence[Get], notes: Sequence[bytes], deadline_s: float, *told: Any) -> list[bytes | None]:
        for get in wanted:
            self._obey(get.name)
        return super().get(wanted, notes, deadline_s, *told)

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        for put in values:
            self._obey(put.name)
            super().put([put], [], deadline_s)
        return super().put([], notes, deadline_s)

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        self._obey(name)
        return super().replicated_note(name, deadline_s)

    def _obey(self, name: bytes) -> None:
        if name.startswith(b"hang"):
            while not self._gate.exists():
                time.sleep(0.01)  # rule: in a process of its own, which waits for a file
        elif name == b"lock":
            ctypes.PyDLL(None).sleep(1000)  # native code that hangs with the interpreter's lock
        elif name == b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == b"full":
            raise StoreError(StoreProblem.FULL, "there is no room: make some")
