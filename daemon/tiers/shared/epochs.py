"""What this host knows of the notes, and so of the epochs. Any thread may read; the event loop alone writes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

from tiercache.daemon.tiers.shared.stores.store import Connection

from .naming import NOTE_BYTES, Naming, Scope

MAX_NOTES = 65_536
"""Notes that are remembered; beyond that all are forgotten and read again."""
SLOWEST_BYTES_PER_S = 10 << 20
"""A store that moves less in a second, on one connection, does not answer in time."""
EPOCH_TRIES = 3
"""How often a job begins again because another host flushed meanwhile."""


class StaleEpoch(Exception):
    """Blocks have no names now: a flush of this host is under way, or the store has yet to be told of one."""


class Epochs:
    """Notes as last read from the store."""

    def __init__(self, naming: Naming) -> None:
        self.naming = naming
        self.changes = 0
        """How often a note turned out to have been replaced."""
        self.flushes = 0
        """How often this host has begun or ended a flush."""
        self.pending: set[bytes] = set()
        """Notes of flushes that DRAM is forgetting, or the store has yet to be told of: no block below has a name."""
        self._notes: dict[bytes, bytes] = {}

    def of(self, scope: Scope) -> bytes | None:
        """The epoch of a scope; None while a note of it has not been read, or is to be replaced."""
        names = self.naming.notes(scope)
        if not self.pending.isdisjoint(names):
            return None
        found = [self._notes.get(name) for name in names]
        known = [note for note in found if note is not None]
        return self.naming.epoch(known) if len(known) == len(found) else None

    def learn(self, notes: dict[bytes, bytes]) -> list[bytes]:
        """Remember what the store has; returns the names of those notes that have changed."""
        notes = {name: note for name, note in notes.items() if name not in self.pending}
        changed = [name for name, note in notes.items() if self._notes.get(name, note) != note]
        if len(self._notes) + len(notes) > MAX_NOTES:
            self._notes = {}
        self._notes.update(notes)
        self.changes += bool(changed)
        return changed

    def await_replacement(self, names: Iterable[bytes]) -> None:
        """These notes are to be replaced: see `pending`."""
        names = list(names)
        self.pending.update(names)
        for name in names:
            self._notes.pop(name, None)

    def replaced(self, names: Iterable[bytes]) -> None:
        """These notes are no longer to be replaced."""
        self.pending.difference_update(names)


class EpochReader:
    """The epochs of some scopes during one job: as this host knows them, then as the store's notes say.

    Where the store has lost a note, the note that this host remembers is not used: it may be from before a flush, and
    what was flushed would be found again. A new note is made, which makes all that was stored before unreachable.
    """

    def __init__(self, epochs: Epochs, scopes: Sequence[Scope]) -> None:
        self.names = list(dict.fromkeys(name for scope in scopes for name in epochs.naming.notes(scope)))
        self.learned: dict[bytes, bytes] = {}
        self._naming = epochs.naming
        self._epochs = epochs
        self._known = {scope: epochs.of(scope) for scope in scopes}

    @property
    def complete(self) -> bool:
        """True if all epochs are known."""
        return None not in self._known.values()

    def of(self, scope: Scope) -> bytes:
        """The epoch of a scope, once `complete`."""
        epoch = self._known[scope]
        assert epoch is not None
        return epoch

    def check(self, notes: Sequence[bytes | None]) -> bool:
        """Take in the notes that came with an answer; whether the names that were asked for are the present ones."""
        if not self._epochs.pending.isdisjoint(self.names):
            return False
        self.learned.update((name, note) for name, note in zip(self.names, notes, strict=True) if note)
        before, self._known = self._known, {scope: self._present(scope, notes) for scope in self._known}
        return self.complete and before == self._known

    def _present(self, scope: Scope, notes: Sequence[bytes | None]) -> bytes | None:
        here = dict(zip(self.names, notes, strict=True))
        found = [here[name] for name in self._naming.notes(scope)]
        known = [note for note in found if note]
        return self._naming.epoch(known) if len(known) == len(found) else None

    def read(self, connection: Connection, deadline_s: float) -> None:
        """Read all notes, and make those that are missing or empty. Raises StoreError; StaleEpoch for notes to be
        replaced. A host that ended while it made a note may have left an empty one.
        """
        if not self._epochs.pending.isdisjoint(self.names):
            raise StaleEpoch
        notes = connection.exists((), self.names, deadline_s).notes
        made = [
            note or connection.set_note(name, new_note(), deadline_s, only_if_missing=note is None)
            for name, note in zip(self.names, notes, strict=True)
        ]
        self.check(made)
        if not self.complete:
            raise StaleEpoch


def new_note() -> bytes:
    """A note that no host has ever made."""
    return secrets.token_bytes(NOTE_BYTES)


def deadline(seconds: float, moved_bytes: int = 0) -> float:
    """A point in time for calls to a store, with the time that so many bytes may take."""
    return time.monotonic() + seconds + moved_bytes / SLOWEST_BYTES_PER_S
