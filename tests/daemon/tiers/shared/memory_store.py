"""A store in this process, which several hosts of a test share, and which fails as the test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tiercache.daemon.tiers.shared.stores.store import (
    Arrived,
    Connection,
    Exists,
    Fate,
    Get,
    Noted,
    Put,
    StoreError,
    StoreProblem,
)


class MemoryStore:
    """Values and notes by name. `before(call)`, on the thread of a line, may raise StoreError or wait."""

    address = "memory://test"

    def __init__(self, pack_blocks: int = 1) -> None:
        self.pack_blocks = pack_blocks
        self.connections = 2
        self.values: dict[bytes, bytes] = {}
        self.ttls: dict[bytes, float] = {}
        self.notes: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.probes = 0
        self.before: Callable[[str], None] = lambda call: None
        self.lock = threading.Lock()

    def connect(self) -> Connection:
        return MemoryConnection(self)

    def close(self) -> None:
        """Nothing to do."""

    def fail(self, problem: StoreProblem, *calls: str) -> None:
        """From now on these calls fail; without any, all."""

        def before(call: str) -> None:
            if not calls or call in calls:
                raise StoreError(problem, f"{call} fails")

        self.before = before

    def work(self) -> None:
        """It works again."""
        self.before = lambda call: None

    def blocks(self) -> list[bytes]:
        """The names of what is stored."""
        return sorted(self.values)


class MemoryConnection:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._closed = False

    def _begin(self, call: str, deadline_s: float) -> None:
        if self._closed:
            raise StoreError(StoreProblem.UNREACHABLE, "closed")
        self._store.before(call)
        if time.monotonic() > deadline_s:
            raise StoreError(StoreProblem.TIMEOUT, "late")
        self._store.calls.append(call)

    def _notes(self, names: Sequence[bytes]) -> list[bytes | None]:
        return [self._store.notes.get(name) for name in names]

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        self._begin("exists", deadline_s)
        with self._store.lock:
            self._store.probes += len(names)
            return Exists([name in self._store.values for name in names], self._notes(notes))

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        self._begin("get", deadline_s)
        found = self._notes(notes)
        if noted is not None:
            noted(found)
        for get in wanted:
            with self._store.lock:
                value = self._store.values.get(get.name)
                if value is not None and get.ttl_s:
                    self._store.ttls[get.name] = get.ttl_s
            self._fill(get, value)
            if arrived is not None:
                arrived(get)
        return found

    def _fill(self, get: Get, value: bytes | None) -> None:
        if value is None:
            get.fate = Fate.MISSING
            return
        head, room = len(get.head), len(get.body)
        part = value[get.offset :]
        if get.ranged:
            part = part[: head + room]
        if not head <= len(part) <= head + room:
            get.fate = Fate.MISFIT
            return
        get.head[:] = part[:head]
        get.body_bytes = len(part) - head
        get.body[: get.body_bytes] = part[head:]
        get.fate = Fate.DONE

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        for put in values:
            self._begin("put", deadline_s)
            with self._store.lock:
                self._store.values[put.name] = b"".join(bytes(part) for part in put.parts)
                self._store.ttls[put.name] = put.ttl_s
            put.fate = Fate.DONE
        return self._notes(notes)

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        self._begin("delete", deadline_s)
        for name in names:
            self._store.values.pop(name, None)
            self._store.notes.pop(name, None)

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        self._begin("set_note", deadline_s)
        with self._store.lock:
            if only_if_missing and name in self._store.notes:
                return self._store.notes[name]
            self._store.notes[name] = value
            return value

    def close(self) -> None:
        self._closed = True
