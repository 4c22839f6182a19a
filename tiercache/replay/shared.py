"""The shared tier of a replay: the daemon's own, on the trace's clock, over a store that keeps no bytes.

    SharedTier ─ job ─► PaperLines: run at the next `deliver` ─► PaperConnection ─► PaperStore      one for all hosts

The daemon's code decides what is looked up, fetched, sent and believed; only threads, bytes and the server are left
out. The store does as a Valkey that evicts by `volatile-ttl`: where it is full, the value that would expire first goes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Region
from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.shared.epochs import new_note
from tiercache.daemon.tiers.shared.flushes import FlushJob
from tiercache.daemon.tiers.shared.lines import Lines, LineUse, SharedJob
from tiercache.daemon.tiers.shared.naming import BlockIdentity, Naming
from tiercache.daemon.tiers.shared.settings import SharedSettings
from tiercache.daemon.tiers.shared.stores.store import Arrived, Connection, Exists, Fate, Get, Noted, Put
from tiercache.daemon.tiers.shared.tier import SharedTier
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, ValueForm

_TTL_S = DaemonConfig().shared_ttl_s
_SPARE_ENDS = 4096


class _Value(NamedTuple):
    size_bytes: int
    until_s: float
    host: int


class PaperStore:
    """Values as lengths and lifetimes. All hosts of a replay have the same one. Implements `SharedStore`.

    Headers are free, so that a capacity in blocks is one: it is that of the blocks.
    """

    address = "replay"
    pack_blocks = 1
    trouble = ""
    connections = 1

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.now_s = 0.0
        self.used_bytes = 0
        self.written_bytes = 0
        self.evicted = 0
        self.notes: dict[bytes, bytes] = {}
        self._values: dict[bytes, _Value] = {}
        self._ends: list[tuple[float, int, bytes]] = []  # a heap; those of values renewed or gone are skipped
        self._orders = itertools.count()

    def connect(self) -> Connection:
        """See `SharedStore`."""
        return PaperConnection(self, 0)

    def close(self) -> None:
        """See `SharedStore`."""

    def find(self, name: bytes) -> _Value | None:
        """A value that is there and has not expired."""
        value = self._values.get(name)
        return value if value is not None and value.until_s > self.now_s else None

    def put(self, name: bytes, size_bytes: int, ttl_s: float, host: int) -> bool:
        """Store a value, in the place of those that would expire first; False if it is larger than the store."""
        if size_bytes > self.capacity_bytes:
            return False
        self._drop(name)
        while self.used_bytes + size_bytes > self.capacity_bytes:
            self._evict()
        self._values[name] = value = _Value(size_bytes, self.now_s + (ttl_s or math.inf), host)
        self.used_bytes += size_bytes
        self.written_bytes += size_bytes
        self._note_end(name, value)
        return True

    def renew(self, name: bytes, ttl_s: float) -> None:
        """Have a value that is present live for that time from now on."""
        value = self._values[name] = self._values[name]._replace(until_s=self.now_s + ttl_s)
        self._note_end(name, value)

    def drop(self, name: bytes) -> None:
        """Delete a value or a note, if it is there."""
        self._drop(name)
        self.notes.pop(name, None)

    def _drop(self, name: bytes) -> None:
        value = self._values.pop(name, None)
        if value is not None:
            self.used_bytes -= value.size_bytes

    def _evict(self) -> None:
        until_s, _, name = heapq.heappop(self._ends)
        value = self._values.get(name)
        if value is not None and value.until_s == until_s:
            self.evicted += until_s > self.now_s
            self._drop(name)

    def _note_end(self, name: bytes, value: _Value) -> None:
        heapq.heappush(self._ends, (value.until_s, next(self._orders), name))
        if len(self._ends) > 2 * len(self._values) + _SPARE_ENDS:
            self._ends = [(one.until_s, next(self._orders), name) for name, one in self._values.items()]
            heapq.heapify(self._ends)


class PaperConnection:
    """One host's line to the store. Implements `Connection`."""

    def __init__(self, store: PaperStore, host: int) -> None:
        self.of_others = 0
        """Blocks fetched that another host had stored."""
        self._store = store
        self._host = host

    def _notes(self, names: Sequence[bytes]) -> list[bytes | None]:
        return [self._store.notes.get(name) for name in names]

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        """See `Connection`."""
        return Exists([self._store.find(name) is not None for name in names], self._notes(notes))

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        """See `Connection`. Nothing is written to `head` and `body`."""
        there = self._notes(notes)
        if noted is not None:
            noted(there)
        for one in wanted:
            value = self._store.find(one.name)
            one.fate = Fate.MISSING if value is None else Fate.DONE
            if value is not None:
                one.body_bytes = value.size_bytes
                self.of_others += value.host != self._host
                if one.ttl_s:
                    self._store.renew(one.name, one.ttl_s)
            if arrived is not None:
                arrived(one)
        return there

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """See `Connection`."""
        for one in values:
            size_bytes = sum(map(len, one.parts)) - HEADER_BYTES
            stored = self._store.put(one.name, size_bytes, one.ttl_s, self._host)
            one.fate = Fate.DONE if stored else Fate.REFUSED
        return self._notes(notes)

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """See `Connection`."""
        for name in names:
            self._store.drop(name)

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        """See `Connection`."""
        if not only_if_missing or name not in self._store.notes:
            self._store.notes[name] = value
        return self._store.notes[name]

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        """See `Connection`."""
        return self.exists((), (name,), deadline_s).notes[0]

    def close(self) -> None:
        """See `Connection`."""


class PaperForm(ValueForm):
    """Values of frames without memory: there is nothing to read, and nothing to prove."""

    def __init__(self) -> None:
        super().__init__(None)

    def pack(self, whose: BlockIdentity, block: memoryview, scratch: memoryview) -> tuple[bytes, memoryview | bytes]:
        """See `ValueForm`. Of the block only the length is used."""
        return bytes(HEADER_BYTES), block

    def unpack(self, whose: BlockIdentity, header: bytes, body: memoryview, frame: memoryview) -> FetchOutcome:
        """See `ValueForm`."""
        return FetchOutcome.OK


class PaperLines:
    """Runs every job at the next `deliver`, in order: the part of `Lines` that a tier uses."""

    def __init__(self, connection: PaperConnection) -> None:
        self._connection = connection
        self._jobs: deque[SharedJob] = deque()

    def submit(self, job: SharedJob, use: LineUse) -> None:
        """See `Lines`."""
        self._jobs.append(job)

    def deliver(self) -> bool:
        """Do what was submitted so far; False if there was nothing."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            calls: list[Callable[[], None]] = []
            job.post = calls.append
            job.run(self._connection)
            for call in calls:
                call()
            job.ended()
        return bool(jobs)


class PaperShared(SharedTier):
    """The shared tier of one host."""

    def __init__(self, store: PaperStore, host: int, clock_s: Callable[[], float], regions: dict[int, Region]) -> None:
        settings = SharedSettings(store, Naming("replay", b""), PaperForm(), Path("/replay"), ttl_s=_TTL_S)
        super().__init__(settings, regions, lambda: None, clock_s)
        self.connection = PaperConnection(store, host)
        self.lines = PaperLines(self.connection)
        self.access._lines = cast(Lines, self.lines)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """No look-up takes so long that its time is up."""

    def begin_flush(
        self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[bool], None], named: bool = False
    ) -> Callable[[], None]:
        """See `SharedTier`. The store is told once DRAM has forgotten all of it: on paper both happen at once."""
        names = self._flushed_notes([one for one in namespaces if not one.spec.dram_only], key, named)

        def end() -> None:
            job = FlushJob(self.access, {name: new_note() for name in names}, set())
            job.run(self.connection)
            self.access.epochs.learn(job.learned)
            self.access.presence.forget()
            self._writes.flushed(frozenset(names))
            done(True)

        return end
