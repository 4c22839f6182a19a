"""Look-ups in the store: how far it extends what this host has of a prompt.

    match ─► is anything missing here? ─► a look-up under way, or a new one ─► claim ─► the requests that wait go on
                                                     └─ not in time: they are answered from this host

A look-up that comes too late is not wasted: its claim answers the next request.
"""

from __future__ import annotations

import math
import operator
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.shared.stores.store import Connection
from tiercache.protocol.messages import KEY_BYTES

from .epochs import EPOCH_TRIES, EpochReader, Epochs, StaleEpoch, deadline
from .lines import JobOwner, SharedJob
from .naming import Scope
from .presence import PromptName, prompt_name
from .search import ChainAsk, Probe, WindowAsk, longest_run

LOOKUP_S = 2.0
"""Deadline of a look-up at the store; requests wait much less than that."""
MAX_LOOKUPS = 256
"""Look-ups under way; further requests are answered from this host. A tenant has at most as many as there is room left
for others, so its flood leaves room for each of them."""
KEYS_EACH = 4096
"""A look-up keeps the keys of its prompt: it counts once for so many of them, so all of them keep 16 MiB at most."""
MAX_BEGUN = 4
"""Look-ups given to the lines; those of each tenant wait in a queue of their own, and tenants take turns."""
MAX_NAMESPACES = 64
"""A request for more namespaces is answered from this host: too many probes."""
LATE_IN_A_ROW = 8
"""Look-ups that came too late, after which requests no longer wait, until one comes in time again."""


class LookupJob(SharedJob):
    """Finds the longest run of one prompt. By namespace, `asks`: what this host has; `bad`: what cannot be fetched."""

    def __init__(
        self,
        owner: JobOwner,
        epochs: Epochs,
        namespaces: Sequence[Namespace],
        keys: bytes,
        asks: Sequence[ChainAsk | WindowAsk],
        pack: int,
        bad: Sequence[set[bytes]],
    ) -> None:
        super().__init__(owner)
        self.namespaces = namespaces
        self.keys = keys
        self.asks = asks
        self.end = 0
        self.stored: dict[int, set[int]] = {}
        self.said: list[tuple[Namespace, bytes]] = []
        """Keys that name the values which the store said it has; the rest of what is claimed is inferred."""
        self.found = False
        """True if `end` and `stored` were found, under `epochs`."""
        self.epochs: dict[Scope, bytes] = {}
        self._naming = epochs.naming
        self._known = epochs
        self._pack = pack
        self.bad = bad
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
            self.idle = True  # a note is to be replaced: nothing can be promised until the store has been told
        finally:
            self.learned = reader.learned

    def _search(self, connection: Connection, reader: EpochReader, until_s: float) -> bool:
        """One search under the epochs that are known; False when these turned out to be others."""
        rounds = longest_run(self.asks, self._good_chains_end(), self._pack)
        self.said = []
        try:
            probes = next(rounds)
            while True:
                names = [self._name_of(probe, reader) for probe in probes]
                there, notes = connection.exists(names, reader.names, until_s)
                if not reader.check(notes):
                    return False
                good = [is_there and not self._is_bad(probe) for probe, is_there in zip(probes, there, strict=True)]
                self.said += [
                    (self.namespaces[probe[0]], self._name_key(probe))
                    for probe, is_good in zip(probes, good, strict=True)
                    if is_good
                ]
                probes = rounds.send(good)
        except StopIteration as end:
            self.end, self.stored = end.value
            return True

    def _good_chains_end(self) -> int:
        """How far the chains may reach; blocks of windows are told one by one."""
        end = len(self.keys) // KEY_BYTES
        for ask, bad in zip(self.asks, self.bad, strict=True):
            if bad and isinstance(ask, ChainAsk):
                end = next((number for number in range(ask.start, end) if self._key(number) in bad), end)
        return end

    def _is_bad(self, probe: Probe) -> bool:
        place, number = probe
        return isinstance(self.asks[place], WindowAsk) and self._key(number) in self.bad[place]

    def _key(self, number: int) -> bytes:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def _name_key(self, probe: Probe) -> bytes:
        """The key of the last block in a value."""
        place, number = probe
        return self._key(number if isinstance(self.asks[place], WindowAsk) else (number + 1) * self._pack - 1)

    def _name_of(self, probe: Probe, reader: EpochReader) -> bytes:
        scope = self._scopes[probe[0]]
        return self._naming.block(scope, reader.of(scope), self._name_key(probe))


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
    tenant: str
    waiters: list[Waiter]
    begun_s: float
    weight: int


class SharedLookups:
    """Look-ups under way, and the requests that wait for them. Event loop only. `later(seconds, call)`: its timer.

    What one tenant asks does not keep others from waiting for theirs: each has its own room, turns and late look-ups.
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
        self._of_tenant: Counter[str] = Counter()  # what look-ups under way count
        self._late_in_a_row: Counter[str] = Counter()
        self._begun = 0
        self._queues: dict[str, deque[Callable[[], None]]] = {}  # look-ups to begin, by tenant, the next one first

    def __len__(self) -> int:
        return len(self._under_way)

    def wait(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        go: Callable[[], None],
        begin: Callable[[], None],
        patience_s: float = math.inf,
    ) -> bool:
        """Have `go` called when the look-up for this prompt has ended, or the time-out or `patience_s` is over.

        `begin()` starts it where it is not under way. False where the request should not wait: `go` is not called.
        """
        name, tenant = prompt_name(namespaces, keys), namespaces[0].spec.tenant
        under_way = self._under_way.get(name)
        if under_way is None:
            weight = -(-len(keys) // (KEYS_EACH * KEY_BYTES))
            if self._of_tenant[tenant] + weight > MAX_LOOKUPS - self._of_tenant.total():
                return False
            under_way = self._under_way[name] = _UnderWay(tenant, [], self._clock_s(), weight)
            self._of_tenant[tenant] += weight
            self.asked += 1
            self._queues.setdefault(tenant, deque()).append(begin)
            self._begin()
        else:
            self.shared += 1
        timeout_s = min(self._timeout_s, patience_s)
        if self._late_in_a_row[tenant] >= LATE_IN_A_ROW or timeout_s <= 0:
            return False
        waiter = Waiter(go)
        under_way.waiters.append(waiter)
        self._later(timeout_s, lambda: self._time_is_up(waiter, tenant))
        return True

    def _begin(self) -> None:
        """Begin look-ups, of each tenant in turn."""
        while self._queues and self._begun < MAX_BEGUN:
            tenant, queue = next(iter(self._queues.items()))
            begin = queue.popleft()
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # behind the others
            self._begun += 1
            begin()

    def check_integrity(self) -> list[str]:
        """Every way in which the look-ups and their counts disagree."""
        by_tenant = Counter[str]()
        for one in self._under_way.values():
            by_tenant[one.tenant] += one.weight
        begun = len(self._under_way) - sum(map(len, self._queues.values()))
        if by_tenant == self._of_tenant and begun == self._begun:
            return []
        return [f"shared look-ups: {begun} begun, not {self._begun}; {by_tenant} under way, not {self._of_tenant}"]

    def _time_is_up(self, waiter: Waiter, tenant: str) -> None:
        if waiter.end():
            self.late += 1
            self._late_in_a_row[tenant] += 1

    def ended(self, namespaces: Sequence[Namespace], keys: bytes) -> None:
        """A look-up has ended: its claim, if any, is known."""
        under_way = self._under_way.pop(prompt_name(namespaces, keys), None)
        if under_way is None:
            return
        tenant = under_way.tenant
        self._of_tenant[tenant] -= under_way.weight
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._begun -= 1
        self._begin()
        in_time = [waiter.end() for waiter in under_way.waiters]
        # Also where no request waited: it tells when waiting is of use again.
        if all(in_time) and self._clock_s() - under_way.begun_s < self._timeout_s:
            del self._late_in_a_row[tenant]


# --- windows on this host ----------------------------------------------------------------------------
#
# Such namespaces have no leading run: each block is looked for by itself, in DRAM and in the tiers below it.

MAX_LOOKED_FOR = 16_384
"""Blocks that one request may look for on this host, about three milliseconds; with more, nothing is asked of the store
for it."""
_KEY = struct.Struct(f"{KEY_BYTES}s")

Has = Callable[[bytes], bool]


class LocalWindows:
    """Event loop only. `lookup_below`: see `TierBelow.lookup`, of the tiers between DRAM and the store."""

    def __init__(self, index: Index, lookup_below: Callable[[Namespace], Has | None]) -> None:
        self._index = index
        self._lookup_below = lookup_below

    def are_short_work(self, namespaces: Sequence[Namespace], blocks: int) -> bool:
        """True if that many blocks of each of these can be looked for. A namespace without blocks costs nothing."""
        return blocks * sum(len(self._lookups(one)) for one in namespaces if one.table.windowed) <= MAX_LOOKED_FOR

    def here(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """For each of the keys not 0 if this host has its block, in any tier."""
        found = bytes(len(keys))
        for number, has in enumerate(self._lookups(namespace)):
            present = map(has, keys)
            found = bytes(map(operator.or_, found, present) if number else present)
        return found

    def completes(self, claim: Claim, place: int, namespace: Namespace, keys: bytes) -> bool:
        """True if this host still has what the store lacks of the window before the end of a claim.

        `place`: of the namespace in the claim.
        """
        stored = claim.stored.get(place, set())
        numbers = [one for one in range(first_of_window(namespace, claim.end), claim.end) if one not in stored]
        return all(self.here(namespace, [keys[one * KEY_BYTES : (one + 1) * KEY_BYTES] for one in numbers]))

    def _lookups(self, namespace: Namespace) -> list[Has]:
        """Of those tiers that have any block of it."""
        found = self._index.lookup(namespace.table), self._lookup_below(namespace)
        return [lookup for lookup in found if lookup is not None]


def split(keys: bytes) -> list[bytes]:
    """Packed keys, one by one."""
    return [key for (key,) in _KEY.iter_unpack(keys)]
