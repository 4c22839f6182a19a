"""The namespaces of one NVMe directory: their numbers in its catalog, and which of their rows were flushed.

A flush raises the namespace's epoch. A flush of everything makes that the oldest valid epoch; a flush of one block
leaves a tombstone, by which that block's rows of older epochs are dropped, until those are deleted. Where rows cannot
be deleted, or are still being read, tombstones pile up; then a flush of one block becomes one of everything.
"""

from __future__ import annotations

import logging
from collections.abc import Container

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.space import Namespace, NoRoom, Space
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState, Done, SavedNamespace

from .parts import CatalogRows

log = logging.getLogger("tiercache.daemon")

_LATEST = b""
"""The key of a tombstone that stays: its epoch is the latest of the namespace. Without it a flush while rows are
loading could choose an epoch that some of those rows already have."""

MAX_TOMBSTONES = 65_536
"""Beyond that, namespaces with many get no more: all are in memory, and read in one go at the next start."""
MANY_TOMBSTONES = 1024
"""Of one namespace."""
BURIED_AT_ONCE = 256

Stone = tuple[int, bytes]
"""A tombstone: namespace number and key."""


class Registry:
    """Event loop only; never blocks. `name` is for the log."""

    def __init__(self, name: str, catalog: CatalogRows, state: CatalogState, space: Space) -> None:
        self.epochs: dict[int, int] = {}
        """By namespace number: the epoch of rows written now."""
        self.oldest_epochs: dict[int, int] = {}
        self.tombstone_count = 0
        self.loading = True
        """True if rows may still come that a tombstone is about."""
        self._name = name
        self._catalog = catalog
        self._space = space
        self._numbers: dict[str, int] = {}
        self._by_number: dict[int, Namespace] = {}
        self._tombstones: dict[int, dict[bytes, int]] = {}  # epochs, by namespace number and key
        self._stones: dict[int, tuple[Stone, int]] = {}  # by slot: whose row they are about
        self._burying: Steps[None] | None = None
        self._adopt(state)

    def _adopt(self, state: CatalogState) -> None:
        # Numbers of dropped namespaces are not given again: their rows are still there.
        self._last_number = max((saved.number for saved in state.namespaces), default=0)
        for saved in state.namespaces:
            namespace = self._reopen(saved)
            if namespace is None:
                log.warning("%s: a namespace that cannot be served any more is dropped", self._name)
                continue
            self._numbers[namespace.fingerprint] = saved.number
            self._by_number[saved.number] = namespace
            self.oldest_epochs[namespace.number] = self.epochs[namespace.number] = saved.epoch
        for stone in state.tombstones:
            buried = self._by_number.get(stone.namespace)
            if buried is not None:
                if stone.key != _LATEST:
                    self._add((buried.number, stone.key), stone.epoch)
                self.epochs[buried.number] = max(self.epochs[buried.number], stone.epoch)

    def _reopen(self, saved: SavedNamespace) -> Namespace | None:
        try:
            namespace = self._space.open_saved(saved.spec)
        except NoRoom:
            return None
        # If the fingerprint was made in another way, all of its blocks would fail their checksums.
        return namespace if namespace is not None and namespace.fingerprint == saved.fingerprint else None

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

    def forget(self, keep: Container[int]) -> None:
        """Forget namespaces whose own numbers are not in `keep`, and those that cannot be served: room is limited."""
        for number, namespace in list(self._by_number.items()):
            if namespace.number not in keep:
                del self._by_number[number], self._numbers[namespace.fingerprint]
        self._catalog.forget_namespaces(keep=self._by_number)

    # --- flushes ---------------------------------------------------------------------------------

    def flush(self, namespace: Namespace, done: Done) -> None:
        """Drop all rows so far; `done(ok)` when that is durable."""
        epoch = self.oldest_epochs[namespace.number] = self._raise(namespace)
        self.tombstone_count -= len(self._tombstones.pop(namespace.number, ()))  # the catalog drops them too
        self._catalog.raise_epoch(self.number(namespace), epoch, done)

    def flush_key(self, namespace: Namespace, key: bytes, slot: int | None, done: Done) -> None:
        """Drop the row of `key`, in `slot` if there is one; `done(ok)` when that is durable."""
        epoch, number = self._raise(namespace), self.number(namespace)
        stone = namespace.number, key
        self._add(stone, epoch)
        if slot is not None:
            self._stones[slot] = stone, epoch

        def noted(ok: bool) -> None:
            if ok and slot is None:
                self._bury(stone, epoch)
            done(ok)

        self._catalog.add_tombstone(number, _LATEST, epoch)
        self._catalog.add_tombstone(number, key, epoch, noted)

    def is_crowded(self, namespace: Namespace) -> bool:
        """True if a namespace has so many tombstones, of so many in all, that it should be flushed instead."""
        return (
            self.tombstone_count >= MAX_TOMBSTONES
            and len(self._tombstones.get(namespace.number, ())) >= MANY_TOMBSTONES
        )

    def flushed_at(self, namespace: Namespace, key: bytes) -> int:
        """The epoch of the last flush of that block alone, rows before which are dropped; 0 if none is known."""
        return self._tombstones.get(namespace.number, {}).get(key, 0)

    def _add(self, stone: Stone, epoch: int) -> None:
        keys = self._tombstones.setdefault(stone[0], {})
        self.tombstone_count += stone[1] not in keys
        keys[stone[1]] = epoch

    def _raise(self, namespace: Namespace) -> int:
        self.epochs[namespace.number] += 1
        return self.epochs[namespace.number]

    def row_gone(self, slot: int) -> None:
        """A slot's row is deleted: the tombstone for it is no longer needed."""
        if slot in self._stones:
            self._bury(*self._stones.pop(slot))

    def _bury(self, stone: Stone, epoch: int) -> None:
        keys = self._tombstones.get(stone[0], {})
        if not self.loading and keys.get(stone[1]) == epoch:
            del keys[stone[1]]
            self.tombstone_count -= 1
            number = self._numbers[self._space.namespaces[stone[0]].fingerprint]
            self._catalog.remove_tombstone(number, stone[1])

    def loaded(self, complete: bool) -> None:
        """No more rows come; unless `complete`, a row with a tombstone may be left on disk."""
        self.loading = False
        if complete:
            self._burying = self._bury_all()

    def _bury_all(self) -> Steps[None]:
        """Bury all tombstones but those of rows that still wait for deletion: they are buried together with these."""
        waiting, left = {stone for stone, _ in self._stones.values()}, BURIED_AT_ONCE
        for number in list(self._tombstones):
            for key, epoch in list(self._tombstones.get(number, {}).items()):
                if (number, key) not in waiting:
                    self._bury((number, key), epoch)
                left -= 1
                if not left:
                    left = BURIED_AT_ONCE
                    yield

    def work(self) -> bool:
        """Bury a slice of the tombstones that nothing needs any more; True while there is more."""
        if self._burying is not None and next(self._burying, self) is self:
            self._burying = None
        return self._burying is not None
