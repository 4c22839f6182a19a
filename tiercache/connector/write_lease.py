"""A write lease: how one window of a store holds frames or places, and how it ends.

Renewed while blocks are copied. It ends with a commit of all its blocks, or is given up; with `finished` only when no
copy of ours can still write to the frames, because the daemon then gives them to others.
"""

from __future__ import annotations

from types import TracebackType

from tiercache.client.leases import Leases
from tiercache.client.session import Session
from tiercache.copies.pool import CopyLost
from tiercache.errors import TierCacheError
from tiercache.protocol.messages import NO_LEASE, Abort

WRITE_TTL_MS = 10_000


class WriteLease:
    """A write lease. Copy inside of its `with`; then `committed` or, however the store ends, `give_up`.

    Attributes:
        session: the session that granted it.
        lease_id: the daemon's id of it; `NO_LEASE` if nothing was granted.
    """

    def __init__(self, leases: Leases, session: Session, lease_id: int) -> None:
        self.session = session
        self.lease_id = lease_id
        self._leases = leases
        self._over = lease_id == NO_LEASE
        self._finished = True  # no copy of ours can still write to its frames

    def __enter__(self) -> WriteLease:
        self._leases.keep(self.session, self.lease_id, WRITE_TTL_MS, self, writing=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, CopyLost):
            self._finished = False
        self._leases.let_go(self.lease_id)

    def committed(self) -> None:
        """All its blocks are committed, and it ended with that."""
        self._over = True

    def give_up(self) -> None:
        """Give up what is not committed, now or once the daemon answers. Does nothing when it is over."""
        if not self._over:
            self._over = True
            abort_lease(self.session, self.lease_id, finished=self._finished)


def abort_lease(session: Session, lease: int, *, finished: bool) -> None:
    """Give up a write lease; `finished`: no copy of ours is in progress."""
    try:
        session.call(Abort, lease=lease, finished=finished)
    except TierCacheError:
        # For a lease that is over the reply is `done`. So the daemon has not received it: without it the frames would
        # stay ours for as long as this process lives.
        session.give_back(Abort, lease=lease, finished=finished)
