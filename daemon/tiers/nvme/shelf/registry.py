"""The namespaces of one NVMe directory: their numbers in its catalog, and which of their rows were flushed.

A flush raises the namespace's epoch. A flush of everything makes that the oldest valid epoch; a flush of one block
leaves a tombstone, by which that block's rows of older epochs are dropped.

    flush ─► tombstone recorded ─► rows deleted, slice by slice ─► tombstone removed ("buried")

A tombstone is buried when nothing of the directory waits to be unlinked: all rows that were dropped until then have
been deleted by changes posted before. Which flush a row was dropped by does not matter, nor whether it was evicted.
Where rows cannot be deleted, or are still being loaded, tombstones pile up; then a flush of one block becomes one of
everything.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from functools import partial

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.space import Namespace, NoRoom, Space
from tiercache.daemon.tiers.nvme.catalog.catalog import Done, SavedNamespace
from tiercache.protocol.namespaces import NamespaceSpec

from .parts import LATEST, CatalogRows, SavedNames

log = logging.getLogger("tiercache.daemon")


MAX_TOMBSTONES = 65_536
"""Beyond that, namespaces with many get no more: all are in memory, and read in one go at the next start."""
MANY_TOMBSTONES = 1024
"""Of one namespace."""
BURIED_AT_ONCE = 256
ADOPTED_AT_ONCE = 64
"""Namespaces taken in in one slice: a millisecond or two, as most are not known in this life yet."""


class _Stones:
    """The tombstones of one namespace."""

    def __init__(self, epochs: dict[bytes, int]) -> None:
        self.epochs = epochs
        """By key; those being buried are left out."""
        self.kept = set[bytes]()
        """Those that the catalog could not remove."""
        self.count = len(epochs)
        """How many the catalog has, as far as known."""


class Registry:
    """Event loop only; never blocks. `name` is for the log. What the catalog knows already is adopted first."""

    def __init__(self, name: str, catalog: CatalogRows, space: Space) -> None:
        self.epochs: dict[int, int] = {}
        """By namespace number: the epoch of rows written now."""
        self.oldest_epochs: dict[int, int] = {}
        self.tombstone_count = 0
        self.loading = True
        """True if rows may still come that a tombstone is about."""
        self._may_bury = False
        self._name = name
        self._catalog = catalog
        self._space = space
        self._numbers: dict[str, int] = {}
        self._by_number: dict[int, Namespace] = {}
        self._stones: dict[int, _Stones] = {}  # by namespace number
        self._to_bury: dict[int, None] = {}  # numbers of namespaces with tombstones
        self._unserved: dict[int, int] = {}  # by the catalog's number, until they are dropped: their next epochs
        self._last_number = 0

    def adopt(self, names: SavedNames) -> Steps[None]:
        """Take in the namespaces that the catalog knows, some in each slice."""
        self._last_number = names.last_number
        for number, (saved, spec) in enumerate(names.specs, 1):
            if not number % ADOPTED_AT_ONCE:
                yield
            namespace = self._reopen(saved, spec)
            if namespace is None:
                self._unserved[saved.number] = epoch = names.epochs[saved.number] + 1
                self._catalog.raise_epoch(saved.number, epoch)
                continue
            self._numbers[namespace.fingerprint] = saved.number
            self._by_number[saved.number] = namespace
            self.oldest_epochs[namespace.number] = saved.epoch
            self.epochs[namespace.number] = names.epochs[saved.number]
            if epochs := names.stones.get(saved.number):
                self._stones[namespace.number] = _Stones(epochs)
                self.tombstone_count += len(epochs)
                self._to_bury[namespace.number] = None
        if self._unserved:
            log.warning("%s: %d namespaces that cannot be served any more are dropped", self._name, len(self._unserved))
            self.drop_unserved(lambda ok: None)

    def _reopen(self, saved: SavedNamespace, spec: NamespaceSpec | None) -> Namespace | None:
        try:
            return None if spec is None else self._space.open_namespace(spec, saved.fingerprint)
        except NoRoom:
            return None

    def drop_unserved(self, done: Done) -> None:
        """Drop the rows of namespaces that cannot be served; `done(ok)` when that is durable, perhaps at once.

        A flush of everything is about them too, and the next life may have room for them. The last of them is dropped
        once more: the catalog answers in slices, and only when it has written all that was posted before.
        """
        if not self._unserved:
            done(True)
            return
        number, epoch = next(reversed(self._unserved.items()))
        self._catalog.raise_epoch(number, epoch, partial(self._dropped, done))

    def _dropped(self, done: Done, ok: bool) -> None:
        if ok:
            self._unserved.clear()
            if not self.loading and self._may_bury:  # else their rows may still be there, or are forgotten later
                self._catalog.forget_namespaces(keep=self._by_number.keys())
        done(ok)

    def add(self, namespace: Namespace) -> None:
        """Make a namespace known to the catalog, if it is not yet."""
        if namespace.fingerprint not in self._numbers:
            number = self._last_number = self._last_number + 1
            self._numbers[namespace.fingerprint] = number
            self._by_number[number] = namespace
            self.oldest_epochs[namespace.number] = self.epochs[namespace.number] = 0
            self._catalog.add_namespace(number, namespace.fingerprint, self._space.save(namespace))

    def knows(self, namespace: Namespace) -> bool:
        """True if the catalog knows the namespace, or will: else it has no rows."""
        return namespace.fingerprint in self._numbers

    def number(self, namespace: Namespace) -> int:
        """The catalog's number of a namespace that was added."""
        return self._numbers[namespace.fingerprint]

    def named(self, number: int) -> Namespace | None:
        """Inverse of `number`; None for a namespace that is not served."""
        return self._by_number.get(number)

    def forget(self, keep: Container[int], with_rows: Container[int]) -> None:
        """Forget namespaces whose own numbers are not in `keep`: room is limited.

        Those whose numbers in the catalog are in `with_rows` stay as well: their rows may not be deleted for good yet,
        and a flush has to be recorded for them. So do those that cannot be served until they are dropped.
        """
        for number, namespace in list(self._by_number.items()):
            if namespace.number not in keep and number not in with_rows:
                del self._by_number[number], self._numbers[namespace.fingerprint]
                self._forget_stones(namespace)
        self._catalog.forget_namespaces(keep=self._by_number.keys() | self._unserved.keys())

    # --- flushes ---------------------------------------------------------------------------------

    def flush(self, namespace: Namespace, done: Done) -> None:
        """Drop all rows so far; `done(ok)` when that is durable."""
        epoch = self.oldest_epochs[namespace.number] = self._raise(namespace)
        self._forget_stones(namespace)
        self._catalog.raise_epoch(self.number(namespace), epoch, done)

    def flush_key(self, namespace: Namespace, key: bytes, done: Done) -> None:
        """Drop the row of `key`, if there is one; `done(ok)` when that is durable. Then drop it from the index."""
        epoch, number = self._raise(namespace), self.number(namespace)
        self._add(namespace, key, epoch)
        self._catalog.add_tombstone(number, LATEST, epoch)
        self._catalog.add_tombstone(number, key, epoch, done)

    def is_crowded(self, namespace: Namespace) -> bool:
        """True if a namespace has so many tombstones, of so many in all, that it should be flushed instead."""
        stones = self._stones.get(namespace.number)
        return self.tombstone_count >= MAX_TOMBSTONES and stones is not None and stones.count >= MANY_TOMBSTONES

    def flushed_at(self, namespace: Namespace, key: bytes) -> int:
        """While rows are loading: the epoch of the last flush of that block alone; 0 if none is known.

        Older rows of it are dropped.
        """
        stones = self._stones.get(namespace.number)
        return 0 if stones is None else stones.epochs.get(key, 0)

    def _raise(self, namespace: Namespace) -> int:
        self.epochs[namespace.number] += 1
        return self.epochs[namespace.number]

    def _add(self, namespace: Namespace, key: bytes, epoch: int) -> None:
        stones = self._stones.setdefault(namespace.number, _Stones({}))
        if key not in stones.epochs and key not in stones.kept:
            stones.count += 1
            self.tombstone_count += 1
        stones.epochs[key] = epoch
        self._to_bury[namespace.number] = None

    def _forget_stones(self, namespace: Namespace) -> None:
        """The catalog drops all tombstones of a namespace by itself."""
        stones = self._stones.pop(namespace.number, None)
        if stones is not None:
            self.tombstone_count -= stones.count
            self._to_bury.pop(namespace.number, None)

    def loaded(self, complete: bool) -> None:
        """No more rows come; unless `complete`, a row with a tombstone may be left on disk, and no tombstone goes."""
        self.loading = False
        self._may_bury = complete

    def bury(self) -> bool:
        """Bury a slice of the tombstones; True while there are more. Only when nothing waits to be unlinked."""
        left = BURIED_AT_ONCE
        while self._may_bury and self._to_bury and left:
            number = next(iter(self._to_bury))
            stones = self._stones[number]
            catalog_number = self._numbers[self._space.namespaces[number].fingerprint]
            while stones.epochs and left:
                key, _ = stones.epochs.popitem()
                self._catalog.remove_tombstone(catalog_number, key, partial(self._buried, number, stones, key))
                left -= 1
            if not stones.epochs:
                del self._to_bury[number]
        return self._may_bury and bool(self._to_bury)

    def _buried(self, number: int, stones: _Stones, key: bytes, ok: bool) -> None:
        """The catalog has removed one; or not, since some row could not be written: then it stays for the next life."""
        if not ok:
            stones.kept.add(key)
        elif self._stones.get(number) is stones:
            stones.kept.discard(key)
            stones.count -= 1
            self.tombstone_count -= 1
