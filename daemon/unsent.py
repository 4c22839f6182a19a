"""Answers that were not sent yet: how much of them each session and each party may have waiting.

A peer that does not read makes the daemon keep what it asked for. Sessions are easily had, so what counts in the end is
the party, a process of this host or a tenant on others, and what a session that has ended left behind counts on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.daemon.sessions import Session

SESSION_BYTES = 128 << 20
"""Of one session: what eight threads of a client of ours ask for before they read, 16 MiB each."""
PARTY_BYTES = 256 << 20
ALL_BYTES = 512 << 20
LEAST_BYTES = 64 << 10
"""What a small answer counts for: there is work for each at every tick."""


class Unsent:
    """Bytes on their way. Event loop only."""

    def __init__(self) -> None:
        self._of_party: Counter[str] = Counter()
        self.bytes = 0
        self.collectors: list[Callable[[], None]] = []
        """Take off what has been sent meanwhile; each looks at all that was on its way."""

    def problem(self, session: Session, length: int) -> str | None:
        """Why there can be no answer of that length for the session now, or None.

        A party that leaves nothing unread gets one in any case: what others leave unread costs it neither its reads nor
        its session.
        """
        if self._over(session, length) is None:
            return None
        for collect in self.collectors:  # a fast client reads much between two ticks
            collect()
        return self._over(session, length)

    def _over(self, session: Session, length: int) -> str | None:
        more, party = max(length, LEAST_BYTES), session.owner.party
        if not self._of_party[party]:
            return None
        for waiting, limit, whose in (
            (session.unsent_bytes, SESSION_BYTES, "this session"),
            (self._of_party[party], PARTY_BYTES, party),
            (self.bytes, ALL_BYTES, "all clients"),
        ):
            if waiting + more > limit:
                return f"{limit >> 20} MiB of answers to {whose} wait to be read: read them first"
        return None

    def add(self, session: Session, length: int) -> None:
        """An answer of that length is on its way."""
        self._count(session, max(length, LEAST_BYTES))

    def sent(self, session: Session, length: int) -> None:
        """It has been sent, or will never be."""
        self._count(session, -max(length, LEAST_BYTES))

    def _count(self, session: Session, more: int) -> None:
        party = session.owner.party
        session.unsent_bytes += more
        self.bytes += more
        self._of_party[party] += more
        if not self._of_party[party]:
            del self._of_party[party]
