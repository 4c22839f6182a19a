"""What a client tells the daemon of its process, for the daemon's statistics."""

from __future__ import annotations

from collections.abc import Callable

from tiercache.protocol.messages import ModelCard


class SelfReport:
    """The counters of all who use one client, and the models of which they store blocks. Thread-safe.

    It outlives sessions: each sends it to its life of the daemon.
    """

    def __init__(self) -> None:
        self.models: list[ModelCard] = []
        self._readers: list[Callable[[], dict[str, int]]] = []

    def include(self, read: Callable[[], dict[str, int]]) -> None:
        """Add up the counters that `read` returns with those of others."""
        self._readers.append(read)

    def counters(self) -> dict[str, int]:
        """The sum of all counters by name."""
        total: dict[str, int] = {}
        for read in tuple(self._readers):
            for name, count in read().items():
                total[name] = total.get(name, 0) + count
        return total
