"""What a client tells the daemon of its process, for the daemon's statistics."""

from __future__ import annotations

import weakref
from typing import Protocol

from tiercache.protocol.messages import ModelCard


class Counting(Protocol):
    """Something that uses a client and counts what it does."""

    def reported(self) -> dict[str, int]:
        """The counters for the daemon's statistics. Called in any thread."""


class SelfReport:
    """The counters of all who use one client, and the models of which they store blocks. Thread-safe.

    It outlives sessions: each sends it to its life of the daemon.
    """

    def __init__(self) -> None:
        self.models: list[ModelCard] = []
        self._users: list[weakref.ref[Counting]] = []

    def include(self, user: Counting) -> None:
        """Add up the counters of `user` with those of others, for as long as it exists: this does not keep it alive."""
        self._users.append(weakref.ref(user))

    def counters(self) -> dict[str, int]:
        """The sum of all counters by name."""
        total: dict[str, int] = {}
        for user in [user for known in tuple(self._users) if (user := known()) is not None]:
            for name, count in user.reported().items():
                total[name] = total.get(name, 0) + count
        return total
