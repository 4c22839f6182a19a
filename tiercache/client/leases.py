"""Leases that one client holds, renewed while in use, and the loads and stores that use them.

Every lease is ended: by the operation that took it, however that ends; by `renew`, when its holder is gone; by an
errand, when the daemon could not be told in time (`Session.give_back`). Errands outlive a session: the next one with
the same life of the daemon runs them, so frames do not stay in quarantine for copies that have ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiercache.client.session import Session
from tiercache.copies.pool import Limit
from tiercache.errors import DaemonUnavailable
from tiercache.ground import forks
from tiercache.protocol.messages import Abort, AnyRequest, Release, Renew

HOLD_AT_MOST_S = 600.0
"""A lease that was never ended is renewed for this long."""


class _Kept(NamedTuple):
    """A lease that is renewed in the background for as long as `holder` lives."""

    session: Session
    ttl_ms: int
    due_s: float
    until_s: float
    holder: weakref.ref[Any]
    writing: bool


class Leases:
    """The leases in use of one client, and its loads and stores in progress. Thread-safe."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.RLock()  # entered faster than a condition
        self._changed = threading.Condition(self._lock)
        self._kept: dict[int, _Kept] = {}
        self._operations: list[Limit] = []
        self._closed = False
        forks.watch(self, "_lock", "_changed")

    def forget_in_child(self) -> None:
        """After a fork, in the child: they are the parent's."""
        self._kept.clear()
        self._operations.clear()

    # --- leases ------------------------------------------------------------------------------------

    def keep(self, session: Session, lease: int, ttl_ms: int, holder: Any, *, writing: bool) -> None:
        """Renew `lease` in the background until `let_go`, for at most 10 minutes, while `holder` exists."""
        now_s = self._clock_s()
        kept = _Kept(session, ttl_ms, now_s + ttl_ms / 2000, now_s + HOLD_AT_MOST_S, weakref.ref(holder), writing)
        with self._lock:
            self._kept[lease] = kept

    def let_go(self, lease: int) -> None:
        """Stop renewing `lease`."""
        with self._lock:
            self._kept.pop(lease, None)

    def until_next_renewal_s(self) -> float:
        """Time until the next renewal is due, at most a second."""
        with self._lock:
            due_s = min((kept.due_s for kept in self._kept.values()), default=None)
        return 1.0 if due_s is None else min(1.0, max(0.001, due_s - self._clock_s()))

    def renew(self, session: Session) -> None:
        """Extend the kept leases that are due; give back those whose holder is gone. Raises as `Session.call`.

        Leases that could not be extended then stay due.
        """
        now_s = self._clock_s()
        due: list[int] = []
        dropped: list[tuple[int, bool]] = []
        with self._lock:
            for lease, kept in list(self._kept.items()):
                if kept.session is not session or now_s > kept.until_s:
                    del self._kept[lease]
                elif kept.holder() is None:
                    del self._kept[lease]
                    dropped.append((lease, kept.writing))
                elif kept.due_s <= now_s:
                    due.append(lease)
            ttl_ms = max((self._kept[lease].ttl_ms for lease in due), default=0)
        for lease, writing in dropped:
            give_back(session, lease, writing=writing)
        if due:
            alive = session.call(Renew, leases=due, ttl_ms=ttl_ms).alive
            with self._lock:
                for lease, still in zip(due, alive, strict=False):
                    known = self._kept.pop(lease, None)
                    if known is not None and still:
                        self._kept[lease] = known._replace(due_s=now_s + known.ttl_ms / 2000)

    # --- loads and stores --------------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(self, limit: Limit) -> Iterator[None]:
        """A load or store: after `stop` it begins no further copy, and `wait_idle` waits for it.

        Raises DaemonUnavailable after `stop`.
        """
        with self._lock:
            if self._closed:
                raise DaemonUnavailable("this client was closed")
            self._operations.append(limit)
        try:
            yield
        finally:
            with self._lock:
                if limit in self._operations:  # not in a child that was forked meanwhile
                    self._operations.remove(limit)
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no further copy and no further operation."""
        with self._lock:
            self._closed = True
            for limit in self._operations:
                limit.stopped = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no load or store is in progress, for at most `timeout_s`; returns whether that is so."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._operations, timeout_s)


def give_back(session: Session, lease: int, *, writing: bool) -> None:
    """End a lease in the background; its copies are over."""
    request: type[AnyRequest] = Abort if writing else Release
    session.give_back(request, lease=lease, **({"finished": True} if writing else {}))
