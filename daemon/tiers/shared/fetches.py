"""Fetches from the store into frames: the shared tier as a source of promotions.

    promotion ─► SharedSource.fetch ─► jobs of a few blocks ─► a line: get ─► prove ─► frame ─► done, block by block

Each fetch has one block, since each ends by itself.

Sealed values arrive in scratch space of their thread and are decrypted into the frame. A plain value arrives in the
frame, and is proved there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tiercache.daemon.tiers.dram.source import Fetch, FetchOutcome, FetchTally
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get
from tiercache.protocol.messages import KEY_BYTES

from .access import StoreAccess
from .epochs import EpochReader, deadline
from .lines import LineUse, SharedJob
from .memory import frame_view, thread_scratch
from .naming import Scope, lifetime_s
from .value import HEADER_BYTES, PACK_BYTES, announced_bytes

FETCH_S = 2.0
"""Deadline of a job, beside the time that the bytes of its blocks may take."""
BLOCKS_EACH = 8
BYTES_EACH = 8 << 20
"""Blocks in one job, and their bytes, unless one block is larger."""


class HeldBlock(NamedTuple):
    """Block `number` of a chain: the one at `place` in a value of `pack` blocks.

    name_key: of the last block in the value, which gives the value its name; generation: see `Presence`.
    """

    scope: Scope
    name_key: bytes
    place: int
    pack: int
    number: int
    generation: int


_OUTCOMES = {Fate.MISSING: FetchOutcome.MISSING, Fate.MISFIT: FetchOutcome.CORRUPT}


class _Reading:
    """One value, or a range of a pack, and the blocks that are in it."""

    __slots__ = ("_record_bytes", "fetches", "get")

    def __init__(self, get: Get, fetch: Fetch) -> None:
        self.get = get
        self.fetches = [fetch]
        self._record_bytes = len(get.body)

    def goes_on_with(self, fetch: Fetch) -> bool:
        """True if a block follows the last one in the same value."""
        last, held = _held(self.fetches[-1]), _held(fetch)
        return (last.name_key, last.place + 1) == (held.name_key, held.place)

    def records(self) -> Iterator[tuple[Fetch, bytes, memoryview]]:
        """Each block with its header and the body that the header announces."""
        get = self.get
        if not get.ranged:
            yield self.fetches[0], bytes(get.head), get.body[: get.body_bytes]
            return
        for number, fetch in enumerate(self.fetches):
            start = number * self._record_bytes
            record = get.body[start : min(start + self._record_bytes, get.body_bytes)]
            header = bytes(record[:HEADER_BYTES])
            yield fetch, header, record[HEADER_BYTES : HEADER_BYTES + announced_bytes(header)]


def _held(fetch: Fetch) -> HeldBlock:
    [held] = fetch.held
    assert isinstance(held, HeldBlock)
    return held


def _nothing() -> memoryview:
    return memoryview(bytearray())


class FetchJob(SharedJob):
    """Reads a few blocks."""

    def __init__(self, access: StoreAccess, fetches: Sequence[Fetch]) -> None:
        super().__init__(access)
        self.fetches = fetches
        self._unsettled = set(fetches)
        self.stale = False
        """Another host has flushed: nothing that was claimed is true."""
        self._form = access.settings.form
        self._epochs = access.epochs
        self._ttl_s = access.settings.ttl_s

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        reader = EpochReader(self._epochs, [_held(fetch).scope for fetch in self.fetches])
        try:
            if self.given_up():
                self.idle = True
                return
            if not reader.complete:
                self.stale = self.idle = True
                return
            readings = {id(one.get): one for one in self._readings(reader)}

            def noted(notes: list[bytes | None]) -> None:
                self.stale = not reader.check(notes)

            def arrived(get: Get) -> None:
                self._arrived(readings[id(get)], epochs)

            epochs = {scope: reader.of(scope) for scope in [_held(fetch).scope for fetch in self.fetches]}
            gets = [one.get for one in readings.values()]
            until_s = deadline(FETCH_S, sum(len(get.body) for get in gets))
            connection.get(gets, reader.names, until_s, arrived, noted)
        finally:
            self.learned = reader.learned
            self._settle_rest()

    def _readings(self, reader: EpochReader) -> list[_Reading]:
        """One value for each block; of a pack, one range for all neighbours."""
        lengths = [self._form.body_bytes(fetch.namespace.spec.block_bytes) for fetch in self.fetches]
        scratch_bytes = sum(HEADER_BYTES + length for length in lengths)
        in_scratch = self._form.sealed or _held(self.fetches[0]).pack > 1
        scratch, at, found = thread_scratch().get(scratch_bytes if in_scratch else 0), 0, list[_Reading]()
        for fetch, length in zip(self.fetches, lengths, strict=True):
            held = _held(fetch)
            last_number = held.number - held.place + held.pack - 1
            name, ttl_s = self._name(held, reader), lifetime_s(self._ttl_s, last_number)
            if held.pack > 1:
                record_bytes = HEADER_BYTES + length
                begins, at = at, at + record_bytes
                if found and found[-1].goes_on_with(fetch):
                    last = found[-1]
                    last.fetches.append(fetch)
                    last.get.body = scratch[at - len(last.fetches) * record_bytes : at]
                    continue
                get = Get(name, _nothing(), scratch[begins:at], held.place * record_bytes, ranged=True, ttl_s=ttl_s)
            else:
                body = scratch[at : at + length] if in_scratch else frame_view(fetch.addresses[0], length)
                at += length
                get = Get(name, memoryview(bytearray(HEADER_BYTES)), body, ttl_s=ttl_s)
            found.append(_Reading(get, fetch))
        return found

    def _name(self, held: HeldBlock, reader: EpochReader) -> bytes:
        return self._epochs.naming.block(held.scope, reader.of(held.scope), held.name_key)

    def _arrived(self, reading: _Reading, epochs: dict[Scope, bytes]) -> None:
        get = reading.get
        if self.stale or get.fate is not Fate.DONE:
            outcome = FetchOutcome.FLUSHED if self.stale else _OUTCOMES.get(get.fate, FetchOutcome.FAILED)
            for fetch in reading.fetches:
                self._settle(fetch, outcome, 0)
            return
        for fetch, header, body in reading.records():
            scope, length = _held(fetch).scope, fetch.namespace.spec.block_bytes
            whose = self._epochs.naming.identity(scope, epochs[scope], fetch.keys[0], length)
            outcome = FetchOutcome.CORRUPT
            if len(header) == HEADER_BYTES:
                outcome = self._form.unpack(whose, header, body, frame_view(fetch.addresses[0], length))
            self._settle(fetch, outcome, len(header) + len(body))

    def _settle(self, fetch: Fetch, outcome: FetchOutcome, stored_bytes: int) -> None:
        self._unsettled.discard(fetch)
        self.post(partial(fetch.end, [outcome], [stored_bytes]))

    def _settle_rest(self) -> None:
        outcome = FetchOutcome.CANCELLED if self.idle else FetchOutcome.FAILED
        outcome = FetchOutcome.FLUSHED if self.stale else outcome
        for fetch in self.fetches:
            if fetch in self._unsettled:
                self._settle(fetch, outcome, 0)


class SharedSource:
    """Implements `Source`. Event loop only.

    It is trusted once something has arrived, and while it delivers what it said it has: one that says so of what it
    has not would have all of DRAM evicted. What was only inferred may be missing: a client can make up keys.
    """

    retired = False

    def __init__(self, access: StoreAccess) -> None:
        self.tally = FetchTally()
        self.trusted = False
        self._access = access
        self._presence = access.presence

    @property
    def offline(self) -> bool:
        """See `Source`."""
        return self._access.away

    def kept_word(self, kept: bool) -> None:
        """See `Source`."""
        self.trusted = kept
        self._access.kept_word(kept)

    def most_together(self, namespace: Namespace) -> int:
        """See `Source`."""
        return 1

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> Sequence[HeldBlock]:
        """See `Source`. The store keeps what it likes: nothing is held there."""
        if self._access.away:
            return ()
        pack, held = self._access.pack_of(namespace), list[HeldBlock]()
        scope, generation = self._access.scope_of(namespace, keys[:KEY_BYTES]), self._presence.generation(namespace)
        for number in numbers:
            last = (number // pack + 1) * pack - 1
            name_key = keys[last * KEY_BYTES : (last + 1) * KEY_BYTES]
            if len(name_key) < KEY_BYTES:
                break
            held.append(HeldBlock(scope, name_key, number % pack, pack, number, generation))
        return held

    def fetch(self, fetches: Sequence[Fetch]) -> bool:
        """See `Source`."""
        some, size_bytes = list[Fetch](), 0
        for fetch in fetches:
            block_bytes = fetch.namespace.spec.block_bytes
            pack = _held(fetch).pack
            full = len(some) >= max(BLOCKS_EACH, pack) or size_bytes + block_bytes > (
                BYTES_EACH if pack == 1 else PACK_BYTES
            )
            if some and full:
                self._submit(some)
                some, size_bytes = [], 0
            some.append(fetch)
            size_bytes += block_bytes
        if some:
            self._submit(some)
        return True

    def _submit(self, fetches: Sequence[Fetch]) -> None:
        self._access.submit(FetchJob(self._access, fetches), LineUse.FETCH)

    def let_go(self, fetches: Sequence[Fetch]) -> None:
        """See `Source`."""
        self._access.soon()  # leases grow before the next tick
        for fetch in fetches:
            if fetch.outcomes == [FetchOutcome.OK]:
                self._presence.note(fetch.namespace, fetch.keys[0], _held(fetch).generation)

    def failed(self, fetch: Fetch, place: int) -> bool:
        """See `Source`. A value that is another one is no lie that counts: the next store replaces it."""
        [outcome], [key], held = fetch.outcomes, fetch.keys, _held(fetch)
        if outcome is FetchOutcome.CANCELLED:
            return False
        broken = outcome in (FetchOutcome.MISSING, FetchOutcome.CORRUPT) and self._presence.breaks_word(
            fetch.namespace, key, held.name_key, held.generation
        )
        if broken:
            self.trusted = False
        bad = outcome in (FetchOutcome.CORRUPT, FetchOutcome.OTHER_VERSION)
        self._presence.could_not_fetch(fetch.namespace, key, held.generation, bad)
        return broken and outcome is FetchOutcome.MISSING

    def cancel(self) -> None:
        """See `Source`. Its jobs have deadlines: they end by themselves."""
