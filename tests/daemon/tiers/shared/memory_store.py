"""A store in this process, which several hosts of a test share, and which fails as the test wants."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
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


def nothing(call: str) -> None:
    """The store works."""


class MemoryStore:
    """Values and notes by name.

    `before(call)` and `after(call)` surround each call, and each value within a put or a get (`"value"`), where the
    caller runs. They may wait, do something else, or raise StoreError: from `after` that is a lost answer.
    """

    address = "memory://test"
    connections = 2

    def __init__(self, pack_blocks: int = 1) -> None:
        self.trouble = ""
        self.pack_blocks = pack_blocks
        self.values: dict[bytes, bytes] = {}
        self.ttls: dict[bytes, float] = {}
        self.notes: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.probes = 0
        self.before = self.after = nothing

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
        self.before = self.after = nothing

    def forget(self) -> None:
        """Others empty it."""
        self.values.clear()
        self.notes.clear()


class MemoryConnection:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._closed = False

    def _begin(self, call: str) -> None:
        if self._closed:
            raise StoreError(StoreProblem.UNREACHABLE, "closed")
        self._store.before(call)
        self._store.calls.append(call)

    def _notes(self, names: Sequence[bytes]) -> list[bytes | None]:
        found = [self._store.notes.get(name) for name in names]
        return [None if note is None or len(note) > MAX_NOTE_BYTES else note for note in found]

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        self._begin("exists")
        self._store.probes += len(names)
        found = self._notes(notes)
        there = Exists([name in self._store.values for name in names], found)
        self._store.after("exists")
        return there

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        self._begin("get")
        found = self._notes(notes)
        self._store.after("get")
        if noted is not None:
            noted(found)
        for get in wanted:
            self._store.before("value")
            value = self._store.values.get(get.name)
            if value is not None and get.ttl_s:
                self._store.ttls[get.name] = get.ttl_s
            self._store.after("value")
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
        if get.offset > len(value) or not head <= len(part) <= head + room:
            get.fate = Fate.MISFIT
            return
        get.head[:] = part[:head]
        get.body_bytes = len(part) - head
        get.body[: get.body_bytes] = part[head:]
        get.fate = Fate.DONE

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        self._begin("put")
        found = self._notes(notes)
        for put in values:
            self._store.before("value")
            self._store.values[put.name] = b"".join(bytes(part) for part in put.parts)
            self._store.ttls[put.name] = put.ttl_s
            self._store.after("value")
            put.fate = Fate.DONE
        self._store.after("put")
        return found

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        self._begin("delete")
        for name in names:
            self._store.values.pop(name, None)
            self._store.notes.pop(name, None)
        self._store.after("delete")

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        self._begin("set_note")
        if not (only_if_missing and name in self._store.notes):
            self._store.notes[name] = value
        note = self._store.notes[name]
        self._store.after("set_note")
        return note

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        return self.exists((), (name,), deadline_s).notes[0]

    def close(self) -> None:
        self._closed = True
