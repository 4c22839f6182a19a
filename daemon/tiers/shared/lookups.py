"""Look-ups in the store: how far it extends what this host has of a prompt.

    match ─► is anything missing here? ─► a look-up under way, or a new one ─► claim ─► all who wait match again
                                                     └─ not in time: they get what is here

A look-up that comes too late is not wasted: its claim answers the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.shared.epochs import EPOCH_TRIES, EpochReader, Epochs, StaleEpoch, deadline
from tiercache.daemon.tiers.shared.lines import SharedJob
from tiercache.daemon.tiers.shared.naming import Scope
from tiercache.daemon.tiers.shared.presence import PromptName, prompt_name
from tiercache.daemon.tiers.shared.search import ChainAsk, Probe, WindowAsk, longest_run
from tiercache.daemon.tiers.shared.stores.store import Connection
from tiercache.protocol.messages import KEY_BYTES

LOOKUP_S = 2.0
"""Deadline of a look-up at the store; requests wait much less than that."""
MAX_LOOKUPS = 256
"""Look-ups under way; further requests are answered from this host."""
MAX_NAMESPACES = 64
"""A request for more namespaces is answered from this host: too many probes."""
LATE_IN_A_ROW = 8
"""After so many look-ups that came too late, requests no longer wait, until one comes in time again."""


class LookupJob(SharedJob):
    """Finds the longest run of one prompt. `asks`: what this host has, by namespace."""

    def __init__(
        self,
        epochs: Epochs,
        namespaces: Sequence[Namespace],
        keys: bytes,
        asks: Sequence[ChainAsk | WindowAsk],
        pack: int,
        done: Callable[[LookupJob], None],
    ) -> None:
        super().__init__()
        self.namespaces = namespaces
        self.keys = keys
        self.asks = asks
        self.end = 0
        self.stored: dict[int, set[int]] = {}
        self.learned: dict[bytes, bytes] = {}
        self.found = False
        """Whether `end` and `stored` were found, under `epochs`."""
        self.epochs: dict[Scope, bytes] = {}
        self._naming = epochs.naming
        self._known = epochs
        self._pack = pack
        self._done = done
        bucket = self._naming.bucket(keys[:KEY_BYTES])
        self._scopes = [Scope(one.fingerprint, bucket) for one in namespaces]

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        until_s = deadline(LOOKUP_S)
        reader = EpochReader(self._known, self._scopes)
        try:
            for _ in range(EPOCH_TRIES):
                if not reader.complete:
                    reader.read(connection, until_s)
                if self._search(connection, reader, until_s):
                    self.found = True
                    self.epochs = {scope: reader.of(scope) for scope in self._scopes}
                    return
        except StaleEpoch:
            return  # someone keeps deleting notes: nothing can be promised
        finally:
            self.learned = reader.learned

    def _search(self, connection: Connection, reader: EpochReader, until_s: float) -> bool:
        """One search under the epochs that are known; False when these turned out to be others."""
        rounds = longest_run(self.asks, len(self.keys) // KEY_BYTES, self._pack)
        try:
            probes = next(rounds)
            while True:
                names = [self._name_of(probe, reader) for probe in probes]
                there, notes = connection.exists(names, reader.names, until_s)
                if not reader.check(notes):
                    return False
                probes = rounds.send(there)
        except StopIteration as end:
            self.end, self.stored = end.value
            return True

    def _name_of(self, probe: Probe, reader: EpochReader) -> bytes:
        place, number = probe
        last = number if isinstance(self.asks[place], WindowAsk) else (number + 1) * self._pack - 1
        scope, key = self._scopes[place], self.keys[last * KEY_BYTES : (last + 1) * KEY_BYTES]
        epoch = reader.of(scope)
        mark = self._naming.mark(scope.fingerprint, epoch, key)
        return self._naming.block(scope.fingerprint, epoch, mark)

    def ended(self) -> None:
        """See `SharedJob`."""
        self._done(self)


class Waiter:
    """A request that waits for a look-up; `go()` is called once, when that has ended or the time is up."""

    __slots__ = ("go", "over")

    def __init__(self, go: Callable[[], None]) -> None:
        self.go = go
        self.over = False

    def end(self) -> bool:
        """Let it go on; False when it has done so already."""
        if self.over:
            return False
        self.over = True
        go, self.go = self.go, _gone  # its timer lives on, the request need not
        go()
        return True


def _gone() -> None:
    raise AssertionError("a request that waited goes on once")


class _UnderWay(NamedTuple):
    waiters: list[Waiter]
    begun_s: float


class SharedLookups:
    """Look-ups under way, and who waits for them. Event loop only.

    `begin(namespaces, keys, asks)` gives a job to a thread; `later(seconds, call)` is the loop's timer.
    """

    def __init__(
        self,
        timeout_s: float,
        later: Callable[[float, Callable[[], None]], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.asked = 0
        self.shared = 0
        """Requests that waited for a look-up that another one had begun."""
        self.late = 0
        """Requests that were answered before their look-up ended."""
        self._timeout_s = timeout_s
        self._later = later
        self._clock_s = clock_s
        self._under_way: dict[PromptName, _UnderWay] = {}
        self._late_in_a_row = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def wait(
        self, namespaces: Sequence[Namespace], keys: bytes, go: Callable[[], None], begin: Callable[[], None]
    ) -> bool:
        """Have `go` called when the look-up for this prompt has ended, at the latest after the time-out.

        `begin()` starts it where it is not under way. False where the request should not wait: `go` is not called.
        """
        name = prompt_name(namespaces, keys)
        under_way = self._under_way.get(name)
        if under_way is None:
            if len(self._under_way) >= MAX_LOOKUPS:
                return False
            under_way = self._under_way[name] = _UnderWay([], self._clock_s())
            self.asked += 1
            begin()
        else:
            self.shared += 1
        if self._late_in_a_row >= LATE_IN_A_ROW or self._timeout_s <= 0:
            return False
        waiter = Waiter(go)
        under_way.waiters.append(waiter)
        self._later(self._timeout_s, lambda: self._time_is_up(waiter))
        return True

    def _time_is_up(self, waiter: Waiter) -> None:
        if waiter.end():
            self.late += 1
            self._late_in_a_row += 1

    def ended(self, namespaces: Sequence[Namespace], keys: bytes) -> None:
        """A look-up has ended: its claim, if any, is known."""
        under_way = self._under_way.pop(prompt_name(namespaces, keys), None)
        if under_way is None:
            return
        in_time = [waiter.end() for waiter in under_way.waiters]
        # Also where no request waited: it tells when waiting is of use again.
        if all(in_time) and self._clock_s() - under_way.begun_s < self._timeout_s:
            self._late_in_a_row = 0
