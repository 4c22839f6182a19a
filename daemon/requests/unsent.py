"""Unsent answers: how many bytes of them each session and each party may have waiting.

A peer that does not read makes the daemon keep what it asked for. Sessions are cheap to open, so the limit that counts
is per party: a process of this host, or a tenant on others. What an ended session left behind still counts.

    large answer    sent with a tracker, and counted until ZeroMQ has released it
    small answers   counted by connection; from some bytes on one is sent with a tracker, and counted with those before
                    it, since a connection's messages are sent in order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

SESSION_BYTES = 128 << 20
"""Per session: what eight threads of our client ask for before they read, 16 MiB each."""
PARTY_BYTES = 256 << 20
ALL_BYTES = 512 << 20
LEAST_BYTES = 64 << 10
"""What a small answer counts for: there is work for each at every tick."""
SPARE_BYTES = 32 << 20
"""Beyond the limits, for answers that cannot be refused like a read: reads alone never end a session."""
FAIR_BYTES = 4 << 20
"""A party with no more than this waiting loses no session for what others leave unread."""
SMALL_BYTES = 4096
"""Answers up to this size are counted by connection first."""
_ANSWER_BYTES = 128
"""What ZeroMQ needs for an answer beside its bytes, approximately."""
_UNCOUNTED_BYTES = 16 << 10
"""Small answers may go to a connection up to this size before one of them is counted with a tracker."""


class Receiver(Protocol):
    """The receiver of an answer: a session, or all peers without one together."""

    unsent_bytes: int

    @property
    def party(self) -> str:
        """Who is accountable for it."""


class _Strangers:
    """Peers without a session."""

    party = "peers without a session"

    def __init__(self) -> None:
        self.unsent_bytes = 0


class SmallAnswers:
    """Bytes of small answers to each connection of a socket since the last tracked one.

    The first answer to a connection is tracked: so reconnecting until connections are forgotten gains nothing.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes: dict[bytes, int] = {}  # in the order in which they were answered

    def add(self, connection: bytes, length: int) -> int:
        """Count an answer of that length. Returns the bytes to track with it; 0 if it need not be tracked."""
        connection_bytes = self._bytes.pop(connection, _UNCOUNTED_BYTES) + length + _ANSWER_BYTES
        counts = connection_bytes > _UNCOUNTED_BYTES
        self._bytes[connection] = 0 if counts else connection_bytes
        if len(self._bytes) > self._most:
            del self._bytes[next(iter(self._bytes))]
        return connection_bytes if counts else 0


class Unsent:
    """Unsent bytes. Event loop only."""

    def __init__(self) -> None:
        self._of_party: Counter[str] = Counter()
        self.strangers: Receiver = _Strangers()
        self.bytes = 0
        self.collectors: list[Callable[[], None]] = []
        """Called to deduct what has been sent meanwhile."""

    def problem(self, reader: Receiver, length: int) -> str | None:
        """Why it can have no payload of that length now, or None.

        A party that leaves nothing unread always gets one: what others leave unread costs it neither its reads nor its
        session.
        """
        return self._over(reader, length, 0)

    def is_too_much(self, reader: Receiver, length: int) -> bool:
        """True if an answer of that length, that cannot be refused, exceeds what may wait."""
        return self._over(reader, length, SPARE_BYTES) is not None

    def _over(self, reader: Receiver, length: int, spare_bytes: int) -> str | None:
        found = self._found(reader, length, spare_bytes)
        if found is not None:
            for collect in self.collectors:  # a fast client reads much between two ticks
                collect()
            found = self._found(reader, length, spare_bytes)
        return found

    def _found(self, reader: Receiver, length: int, spare_bytes: int) -> str | None:
        more, party_bytes = max(length, LEAST_BYTES), self._of_party[reader.party]
        if not party_bytes:
            return None
        for waiting, limit, whose in (
            (reader.unsent_bytes, SESSION_BYTES, "this session"),
            (party_bytes, PARTY_BYTES, reader.party),
            (self.bytes if party_bytes > FAIR_BYTES or not spare_bytes else 0, ALL_BYTES, "all clients"),
        ):
            if waiting + more > limit + spare_bytes:
                return f"{limit >> 20} MiB of answers to {whose} wait to be read: read them first"
        return None

    def add(self, reader: Receiver, length: int) -> None:
        """An answer of that length is on its way."""
        self._count(reader, max(length, LEAST_BYTES))

    def sent(self, reader: Receiver, length: int) -> None:
        """It has been sent, or will never be."""
        self._count(reader, -max(length, LEAST_BYTES))

    def _count(self, reader: Receiver, more: int) -> None:
        party = reader.party
        reader.unsent_bytes += more
        self.bytes += more
        self._of_party[party] += more
        if not self._of_party[party]:
            del self._of_party[party]
