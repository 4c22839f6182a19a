"""The one thing asked of a store that was away: whether it answers."""

from __future__ import annotations

from collections.abc import Callable

from tiercache.daemon.tiers.shared.epochs import deadline
from tiercache.daemon.tiers.shared.lines import SharedJob
from tiercache.daemon.tiers.shared.stores.store import Connection

PROBE_S = 2.0


class ProbeJob(SharedJob):
    """Reads the deployment's note."""

    def __init__(self, note: bytes, ended: Callable[[ProbeJob], None]) -> None:
        super().__init__()
        self.learned: dict[bytes, bytes] = {}
        self._note = note
        self._ended = ended

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        note = connection.exists((), (self._note,), deadline(PROBE_S)).notes[0]
        if note:
            self.learned[self._note] = note

    def ended(self) -> None:
        """See `SharedJob`."""
        self._ended(self)
